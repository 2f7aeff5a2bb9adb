"""Every Lightning callback either works, including exact resume, or is rejected by name."""

import gc
import json

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import yaml
from lightning.pytorch.profilers import Profiler

from lmmods.cli import main
from lmmods.recipe.classes import ALLOWED, UNSUPPORTED
from lmmods.runs.folder import RunFolder
from tests.finished_runs import assert_same_checkpoint

LIGHTNING_CALLBACKS = {name for name in lightning_callbacks.__all__
                       if issubclass(getattr(lightning_callbacks, name), lightning_callbacks.Callback)}
NEEDED = {"EarlyStopping": {"monitor": "val/loss", "patience": 9}}
ABSTRACT = ["BaseFinetuning", "BasePredictionWriter", "Callback", "Checkpoint", "ProgressBar"]


def test_every_lightning_callback_is_either_allowed_or_unsupported():
    unknown = LIGHTNING_CALLBACKS - set(ALLOWED) - set(UNSUPPORTED)
    assert not unknown, f"Lightning has new callbacks: {unknown}. Add them to recipe/classes.py once tried."
    assert not set(ALLOWED) & set(UNSUPPORTED) and set(ALLOWED) | set(UNSUPPORTED) <= LIGHTNING_CALLBACKS


@pytest.mark.parametrize("name", sorted(LIGHTNING_CALLBACKS - set(ALLOWED)))
def test_an_unsupported_callback_is_rejected_by_name(recipe, capsys, name, tmp_path):
    init_args = {"ThroughputMonitor": {"batch_size_fn": "torch.numel"},
                 "ModelPruning": {"pruning_fn": "l1_unstructured"},
                 "GradientAccumulationScheduler": {"scheduling": {1: 2}}, "OnExceptionCheckpoint": {"dirpath": "x"},
                 "StochasticWeightAveraging": {"swa_lrs": 0.1}}.get(name, {})
    callback = {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": init_args}
    assert main(["fit", *recipe(trainer__callbacks=[callback])]) == 2
    output = capsys.readouterr().err
    assert output.startswith("error: ") and name in output and not (tmp_path / "run").exists()
    assert f"{name} is not supported" in output or name in ABSTRACT, output


@pytest.mark.parametrize("path", ["lmmods.torch_engine.callbacks.metrics.Metrics",
                                  "lightning.pytorch.cli.SaveConfigCallback"])
def test_a_built_in_or_unknown_callback_is_rejected(recipe, capsys, path):
    assert main(["fit", *recipe(trainer__callbacks={"class_path": path})]) == 2
    assert path.rsplit(".", 1)[-1] in capsys.readouterr().err


def test_help_lists_only_supported_callbacks_and_strategies(capsys):
    assert main(["fit", "--help"]) == 0
    help_text = "".join(capsys.readouterr().out.split())
    callbacks_help = help_text[help_text.rindex("--trainer.callbacks"):help_text.rindex("--trainer.max_epochs")]
    assert all(f"{name}" in callbacks_help for name in ALLOWED), callbacks_help
    for name in UNSUPPORTED.keys() - {"Callback"}:
        assert f"callbacks.{name}," not in callbacks_help and f"callbacks.{name})" not in callbacks_help, name
    assert "FSDPStrategy" not in help_text and "lmmods.strategies.FSDP2" in help_text


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALLOWED if name != "EarlyStopping"])  # which has its own tests
def test_a_run_with_an_allowed_callback_resumes_with_the_same_bits(recipe, tmp_path, name, stop_at):
    if name == "RichModelSummary":
        pytest.importorskip("rich")
    callback = {"class_path": name, "init_args": NEEDED.get(name, {})}
    settings = {"trainer__callbacks": [callback], "model__init_args__quantize": None}
    assert main(["fit", *recipe(trainer__default_root_dir=str(tmp_path / "whole"), **settings)]) == 0
    stop_at(3)
    assert main(["fit", *recipe(**settings)]) == 130
    stop_at(0)
    assert main(["fit", *recipe(**settings), "--ckpt_path", "last"]) == 0
    uninterrupted, resumed = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "run")
    assert_same_checkpoint(resumed, uninterrupted)

    def rows(folder):
        import csv

        with open(folder.metrics_csv, newline="") as file:
            return [{key: value for key, value in row.items() if "per_second" not in key}
                    for row in csv.DictReader(file)]

    assert rows(resumed) == rows(uninterrupted)
    json.loads((resumed.resolve("last") / "state.json").read_text())


@pytest.mark.parametrize("accumulate", [1, 4])
def test_max_time_ends_a_run_at_a_whole_step(recipe, tmp_path, monkeypatch, capsys, accumulate):
    """At a whole step; a later resume reports that no time is left."""
    clock = iter([0.0] * 3 + [3600.0] * 1000)
    monkeypatch.setattr(lightning_callbacks.Timer, "time_elapsed", lambda *_: next(clock))
    arguments = recipe(trainer__max_time={"minutes": 30}, trainer__max_steps=100,
                       trainer__accumulate_grad_batches=accumulate)
    assert main(["fit", *arguments]) == 0
    assert "+" not in RunFolder(tmp_path / "run").find("last").name
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert 0 < metrics["trainer/global_step"] < 5 and (tmp_path / "run" / "completed").exists()
    capsys.readouterr()
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert "Nothing was changed: trainer.max_time has passed. Raise it to train longer." in capsys.readouterr().out


@pytest.mark.parametrize(("value", "shown"), [
    ("0", "'0'"), (0, "'0'"), ("12:00", "'12:00'"), ("00:00:00:00", "'00:00:00:00'"), ({"hours": 0}, "{'hours': 0}"),
    ({"hours": -1}, "{'hours': -1}"), ({"hour": 1}, "{'hour': 1}"), ({"weeks": 10**9}, "{'weeks': 1000000000}")])
def test_a_max_time_of_zero_or_less_is_rejected(recipe, capsys, value, shown):
    """Such a run would end silently with status 0."""
    assert main(["fit", *recipe(trainer__max_time=value)]) == 2
    output = capsys.readouterr()
    assert f"trainer.max_time is {shown}, but must be more than 0: DD:HH:MM:SS" in output.err and not output.out


@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_single_callback_needs_no_list(recipe, tmp_path, engine):
    stopping = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss"}}
    assert main(["fit", *recipe(trainer__callbacks=stopping, trainer__max_steps=4), "--engine", engine]) == 0
    config = RunFolder(tmp_path / "run").config
    [callback] = yaml.safe_load(config.read_text())["trainer"]["callbacks"]
    assert callback["class_path"] == "EarlyStopping"
    assert main(["validate", "--config", str(config), "--ckpt_path", "last", "--engine", engine]) == 0


def test_a_profiler_without_its_package_is_an_error(recipe, capsys, monkeypatch):
    monkeypatch.delattr(Profiler, "__del__")  # it fails on a partly initialised profiler, in any later test
    assert main(["fit", *recipe(trainer__profiler="xla")]) == 2
    assert "torch_xla" in capsys.readouterr().err
    gc.collect()  # collects the partly initialised profiler here
