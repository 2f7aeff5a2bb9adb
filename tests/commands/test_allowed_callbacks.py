"""Every callback of Lightning either works here, exact resume included, or is refused by name."""

import gc
import json

import lightning.pytorch.callbacks as theirs
import pytest
import yaml
from lightning.pytorch.profilers import Profiler

from lmmods.cli import main
from lmmods.recipe.classes import ALLOWED, REFUSED
from lmmods.runs.folder import RunFolder
from tests.finished_runs import assert_same_checkpoint

KNOWN = {name for name in theirs.__all__ if issubclass(getattr(theirs, name), theirs.Callback)}
NEEDED = {"EarlyStopping": {"monitor": "val/loss", "patience": 9}}
ABSTRACT = ["BaseFinetuning", "BasePredictionWriter", "Callback", "Checkpoint", "ProgressBar"]


def test_each_is_in_one_of_the_tables():
    unknown = KNOWN - set(ALLOWED) - set(REFUSED)
    assert not unknown, f"Lightning has new callbacks: {unknown}. Add them to recipe/classes.py once tried."
    assert not set(ALLOWED) & set(REFUSED) and set(ALLOWED) | set(REFUSED) <= KNOWN


@pytest.mark.parametrize("name", sorted(KNOWN - set(ALLOWED)))
def test_what_cannot_work_is_refused_by_name(recipe, capsys, name, tmp_path):
    needed = {"ThroughputMonitor": {"batch_size_fn": "torch.numel"}, "ModelPruning": {"pruning_fn": "l1_unstructured"},
              "GradientAccumulationScheduler": {"scheduling": {1: 2}}, "OnExceptionCheckpoint": {"dirpath": "x"},
              "StochasticWeightAveraging": {"swa_lrs": 0.1}}.get(name, {})
    callback = {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": needed}
    assert main(["fit", *recipe(trainer__callbacks=[callback])]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and name in said and not (tmp_path / "run").exists()
    assert f"{name} is not supported" in said or name in ABSTRACT, said


@pytest.mark.parametrize("path", ["lmmods.torch_engine.callbacks.metrics.Metrics",
                                  "lightning.pytorch.cli.SaveConfigCallback"])
def test_what_is_there_already_or_unknown_is_refused(recipe, capsys, path):
    assert main(["fit", *recipe(trainer__callbacks={"class_path": path})]) == 2
    assert path.rsplit(".", 1)[-1] in capsys.readouterr().err


def test_help_lists_what_works(capsys):
    assert main(["fit", "--help"]) == 0
    said = "".join(capsys.readouterr().out.split())
    listed = said[said.rindex("--trainer.callbacks"):said.rindex("--trainer.max_epochs")]
    assert all(f"{name}" in listed for name in ALLOWED), listed
    for name in REFUSED.keys() - {"Callback"}:
        assert f"callbacks.{name}," not in listed and f"callbacks.{name})" not in listed, name
    assert "FSDPStrategy" not in said and "lmmods.strategies.FSDP2" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALLOWED if name != "EarlyStopping"])  # that has tests of its own
def test_what_is_allowed_resumes_exactly(recipe, tmp_path, name, stop_at):
    if name == "RichModelSummary":
        pytest.importorskip("rich")
    callback = {"class_path": name, "init_args": NEEDED.get(name, {})}
    settings = {"trainer__callbacks": [callback], "model__init_args__quantize": None}
    assert main(["fit", *recipe(trainer__default_root_dir=str(tmp_path / "whole"), **settings)]) == 0
    stop_at(3)
    assert main(["fit", *recipe(**settings)]) == 130
    stop_at(0)
    assert main(["fit", *recipe(**settings), "--ckpt_path", "last"]) == 0
    whole, run = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "run")
    assert_same_checkpoint(run, whole)

    def rows(folder):
        import csv

        with open(folder.metrics_csv, newline="") as file:
            return [{key: value for key, value in row.items() if "per_second" not in key}
                    for row in csv.DictReader(file)]

    assert rows(run) == rows(whole)
    json.loads((run.resolve("last") / "state.json").read_text())


@pytest.mark.parametrize("accumulate", [1, 4])
def test_max_time_ends_a_run(recipe, tmp_path, monkeypatch, capsys, accumulate):
    """With a whole step; that no time is left is said to who would go on."""
    clock = iter([0.0] * 3 + [3600.0] * 1000)
    monkeypatch.setattr(theirs.Timer, "time_elapsed", lambda *_: next(clock))
    timed = recipe(trainer__max_time={"minutes": 30}, trainer__max_steps=100,
                   trainer__accumulate_grad_batches=accumulate)
    assert main(["fit", *timed]) == 0
    assert "+" not in RunFolder(tmp_path / "run").find("last").name
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert 0 < metrics["trainer/global_step"] < 5 and (tmp_path / "run" / "completed").exists()
    capsys.readouterr()
    assert main(["fit", *timed, "--ckpt_path", "last"]) == 0
    assert "Nothing was changed: trainer.max_time has passed. Raise it to train longer." in capsys.readouterr().out


@pytest.mark.parametrize(("value", "shown"), [
    ("0", "'0'"), (0, "'0'"), ("12:00", "'12:00'"), ("00:00:00:00", "'00:00:00:00'"), ({"hours": 0}, "{'hours': 0}"),
    ({"hours": -1}, "{'hours': -1}"), ({"hour": 1}, "{'hour': 1}"), ({"weeks": 10**9}, "{'weeks': 1000000000}")])
def test_a_max_time_that_is_none_is_refused(recipe, capsys, value, shown):
    """A run of no time would end with status 0, a step short and without a word."""
    assert main(["fit", *recipe(trainer__max_time=value)]) == 2
    said = capsys.readouterr()
    assert f"trainer.max_time is {shown}, but must be more than 0: DD:HH:MM:SS" in said.err and not said.out


@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_one_callback_needs_no_list(recipe, tmp_path, engine):
    stopping = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss"}}
    assert main(["fit", *recipe(trainer__callbacks=stopping, trainer__max_steps=4), "--engine", engine]) == 0
    config = RunFolder(tmp_path / "run").config
    [kept] = yaml.safe_load(config.read_text())["trainer"]["callbacks"]
    assert kept["class_path"] == "EarlyStopping"
    assert main(["validate", "--config", str(config), "--ckpt_path", "last", "--engine", engine]) == 0


def test_a_profiler_without_its_package_is_the_recipe_s_mistake(recipe, capsys, monkeypatch):
    monkeypatch.delattr(Profiler, "__del__")  # of a half-made one it fails, in whatever test the collector comes by
    assert main(["fit", *recipe(trainer__profiler="xla")]) == 2
    assert "torch_xla" in capsys.readouterr().err
    gc.collect()  # the half-made profiler, now
