"""`sweep`: the search space, the W&B file and the commands of its agents, and local trials."""

import contextlib
import fcntl
import json
import os
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from lmmods.cli import main
from lmmods.commands import registry
from lmmods.core.errors import UserError
from lmmods.extras.sweep import command as trials_module
from lmmods.extras.sweep.study import Parameter, Study, grid, read_space
from lmmods.runs.folder import RunFolder

LR = "model.optimizer.lr"


# The space ----------------------------------------------------------------------------------------------------------


def test_parameters_are_read_from_words_and_files(tmp_path):
    words = [f"{LR}=1e-4..1e-2,log", "data.batch_size=4,8", "trainer.max_steps=10..30,step=10",
             "model.optimizer.name=sgd,1e-3"]
    (tmp_path / "space.yaml").write_text("model.lora: [null, {rank: 8}]\nm.eps: {low: 1, high: 2.5, log: true}\n")
    assert read_space(words, str(tmp_path / "space.yaml")) == [
        Parameter(LR, (), 1e-4, 1e-2, None, True), Parameter("data.batch_size", (4, 8)),
        Parameter("trainer.max_steps", (), 10, 30, 10), Parameter("model.optimizer.name", ("sgd", 1e-3)),
        Parameter("model.lora", ("null", '{"rank": 8}')), Parameter("m.eps", (), 1, 2.5, None, True)]


@pytest.mark.parametrize("words", [
    [], ["lr"], ["=3"], [f"{LR}=2..1"], [f"{LR}=0..1,log"], [f"{LR}=1..2,log,step=1"], [f"{LR}=1..2,step=5"],
    [f"{LR}=1,1"], [f"{LR}=1", f"{LR}=2"], [f"{LR}=1..2..3"], [f"{LR}=[1"], [f"{LR}=1..2,logg"]])
def test_an_invalid_search_space_is_rejected(words):
    with pytest.raises(UserError, match="sweep: "):
        read_space(words, None)


def test_a_grid_is_every_combination():
    space = read_space(["a=1..3", "b=0.1..0.3,step=0.1", "c=x"], None)
    assert [tuple(row.values()) for row in grid(space)] == [(a, b, "x") for a in (1, 2, 3) for b in (0.1, 0.2, 0.3)]
    with pytest.raises(UserError, match="a range without step"):
        grid(read_space(["a=0.5..1.0"], None))
    with pytest.raises(UserError, match="more than 10,000 combinations"):
        grid(read_space(["a=1..1000", "b=1..1000"], None))


# The command line ---------------------------------------------------------------------------------------------------


def test_options_of_sweep_and_of_fit_may_be_in_any_order():
    words = f"--config a.yaml {LR}=1,2 --trials 3 --trainer.max_steps 5 data.batch_size=1,2 --engine=jax --seed=4"
    parsed = registry.parse_command("sweep", words.split())
    assert parsed["recipe"] == ["--config", "a.yaml", "--trainer.max_steps", "5", "--engine=jax"]
    assert parsed["parameters"] == [f"{LR}=1,2", "data.batch_size=1,2"] and (parsed["trials"], parsed["seed"]) == (3, 4)


@pytest.mark.parametrize(("words", "message"), [
    (["model.optimizer.lrr=1,2"], "Did you mean model.optimizer.lr?"),
    (["data.batch_size=4,0"], "data.batch_size is 0"),
    ([f"{LR}=1e-3,fast"], "fast"), ([f"{LR}=1,2", "--model.optimizer.lr", "3"], "is set by the sweep"),
    ([f"{LR}=1,2", "--trainer.default_root_dir", "x"], "is set by the sweep"),
    (["trainer.default_root_dir=a,b"], "cannot vary"), ([f"{LR}=1,2", "--trials", "0"], "--trials is 0"),
    ([f"{LR}=1.0..2", "--sampler", "grid"], "range without step"),
    ([f"{LR}=1,2", "--backend", "wandb", "--trials", "3"], "applies only to --backend optuna"),
    ([f"{LR}=1,2", "--backend", "wandb"], "does not log to W&B")])
def test_what_fit_rejects_is_rejected_before_anything_runs(recipe, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *recipe(), *words, "--folder", "sweep"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("words", "metric"), [
    ([], ("val/reward", "maximize")), (["--metric", "val/pass@1"], ("val/pass@1", "minimize")),
    (["--metric", "val/pass@1", "--mode", "max"], ("val/pass@1", "maximize"))])
def test_trials_are_compared_as_checkpoints_are(recipe, tmp_path, monkeypatch, words, metric):
    monkeypatch.chdir(tmp_path)
    arguments = recipe(trainer__logger=[{"class_path": "WandbLogger", "init_args": {"project": "mine"}}],
                       model__class_path="GRPO", model__init_args__rewards=[{"name": "exact_match"}],
                       data__class_path="PromptData")
    assert main(["sweep", *arguments, f"{LR}=1e-6,1e-5", "--backend", "wandb", "--folder", "sweep", *words]) == 0
    content = yaml.safe_load((tmp_path / "sweep" / "sweep.yaml").read_text())
    assert (content["metric"]["name"], content["metric"]["goal"]) == metric


# W&B ----------------------------------------------------------------------------------------------------------------


def test_a_wandb_agent_starts_fit_in_a_folder_of_its_run(recipe, tmp_path, monkeypatch):
    """Build the command as a W&B agent does and run it with a `python` that prints its arguments."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    monkeypatch.chdir(tmp_path)
    words = [f"{LR}=1e-4..1e-2,log", "data.batch_size=4,8", "model.lora=null,{rank: 4}",
             "trainer.max_steps=2..6,step=2"]
    arguments = recipe(trainer__logger=[{"class_path": "WandbLogger", "init_args": {"project": "mine"}}],
                       model__init_args__quantize=None)
    assert main(["sweep", *arguments, *words, "--backend", "wandb", "--folder", "my sweep", "--mode", "max"]) == 0
    content = yaml.safe_load((tmp_path / "my sweep" / "sweep.yaml").read_text())
    assert (content["method"], content["project"], content["metric"]) == (
        "bayes", "mine", {"name": "val/loss", "goal": "maximize"})
    assert content["parameters"] == {
        LR: {"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-2}, "data.batch_size": {"values": [4, 8]},
        "model.lora": {"values": ["null", '{"rank": 4}']}, "trainer.max_steps": {"values": [2, 4, 6]}}
    values = create_sweep_command_args({"args": {LR: {"value": 0.003}, "model.lora": {"value": '{"rank": 4}'}}})
    chunks = create_sweep_command(content["command"])
    command = [word for chunk in chunks for word in (values["args"] if chunk == "${args}" else [chunk])]
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    output = subprocess.run(command, capture_output=True, text=True, check=True, env={
        "PATH": f"{python.parent}:{os.environ['PATH']}", "WANDB_RUN_ID": "abc123"}).stdout.splitlines()
    assert output == ["train.py", "fit", *arguments, "--trainer.default_root_dir", "my sweep/abc123", f"--{LR}=0.003",
                      '--model.lora={"rank": 4}']


def test_a_run_started_by_an_agent_has_the_agents_run_id(monkeypatch, tmp_path):
    from lmmods.runs.wandb import SUPPORT

    monkeypatch.setenv("WANDB_RUN_ID", "abc123")
    options = {"save_dir": ".", "project": None, "name": None, "id": None, "version": None}
    SUPPORT.configure(options, tmp_path, goes_on=False)
    assert options["id"] == "abc123"


def test_a_password_is_not_sent_to_wandb(recipe, tmp_path, capsys):
    arguments = [*recipe(trainer__logger=[{"class_path": "WandbLogger"}]), "--data.source", "https://a:b@host/x.jsonl"]
    assert main(["sweep", *arguments, f"{LR}=1,2", "--backend", "wandb", "--folder", str(tmp_path / "s")]) == 2
    assert "contains a password or token" in capsys.readouterr().err and not (tmp_path / "s").exists()


# The study ----------------------------------------------------------------------------------------------------------


SPACE = ["x=0.0..1.0", "kind=a,b"]


def make_study(folder: Path, sampler: str = "tpe", pruner: str = "median") -> Study:
    folder.mkdir(exist_ok=True)
    return Study(folder, read_space(SPACE, None), sampler, pruner, 3, "min")


def run_trials(study: Study, max_trials: int, stop_after: int = 99) -> list[dict]:
    """Run trials with the metric (x - 0.3)², reported in three steps, and return their parameters."""
    params = []
    while len(params) < stop_after and (trial_and_lock := study.ask(max_trials)) is not None:
        trial, lock = trial_and_lock
        params.append(trial.params)
        value = (trial.params["x"] - 0.3) ** 2
        if study.should_prune(trial, [(step, value + 1 / step) for step in (1, 2, 3)]):
            study.finish(trial, "pruned")
        else:
            study.finish(trial, "complete", value)
        os.close(lock)
    return params


def test_a_resumed_study_tries_the_same_parameters(tmp_path):
    whole, first = make_study(tmp_path / "whole"), make_study(tmp_path / "parts")
    expected, first_params = run_trials(whole, 12), run_trials(first, 12, stop_after=6)
    with open(tmp_path / "parts" / "study.journal", "ab") as journal:
        journal.write(b'{"op_code": 4')  # the process was killed while writing
    second = make_study(tmp_path / "parts")
    assert first_params + run_trials(second, 12) == expected and len(expected) == 12
    states = [[trial.state.name for trial in study.trials()] for study in (whole, second)]
    assert states[0] == states[1] and {"PRUNED", "COMPLETE"} == set(states[0])


def test_only_a_trial_whose_process_died_is_resumed(tmp_path):
    first, second = make_study(tmp_path / "s"), make_study(tmp_path / "s")
    trial, lock = first.ask(2)
    assert first.should_prune(trial, [(1, 0.5)]) is False
    other, _ = second.ask(2)
    assert other.number == 1 and second.ask(2) is None
    os.close(lock)  # as when its process ends
    resumed, _ = second.ask(2)
    assert (resumed.number, resumed.params) == (0, trial.params)
    second.should_prune(resumed, [(1, 0.7), (2, 0.4)])  # the value of step 1 stays
    assert second.trials()[0].intermediate_values == {1: 0.5, 2: 0.4}


def test_a_grid_ends_after_every_combination(tmp_path):
    study = Study(tmp_path, read_space(["x=1,2", "kind=a,b"], None), "grid", "none", 0, "min")
    combinations = []
    while trial_and_lock := study.ask(None):
        combinations.append(tuple(trial_and_lock[0].params.values()))
        study.finish(trial_and_lock[0], "complete", 1.0)
    assert combinations == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


# Trials -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_process(monkeypatch, capfd):
    """Run trials in this process, one after the other; `replacements` has functions to call instead of the n-th."""
    calls, replacements = [], {}

    @contextlib.contextmanager
    def run_here(arguments, log, keeps):
        with pytest.raises(BlockingIOError), open(f"/dev/fd/{keeps[0]}") as lock:  # a child's lock
            fcntl.flock(os.open(os.readlink(lock.name), os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
        calls.append(arguments)
        status = replacements[len(calls)]() if len(calls) in replacements else main(arguments)
        log.write_text(capfd.readouterr().err)
        yield SimpleNamespace(poll=lambda: status, returncode=status, terminate=lambda: None)

    monkeypatch.setattr(trials_module, "run_program", run_here)
    return calls, replacements


@pytest.mark.slow
def test_a_sweep_resumes_and_counts_failed_trials(recipe, tmp_path, monkeypatch, in_process, stop_at, capfd):
    """Interrupt the first trial in its third step; the second has a NaN loss."""
    monkeypatch.chdir(tmp_path)
    calls, replacements = in_process
    replacements[1] = lambda: (stop_at(3), main(calls[-1]))[1]
    sweep = ["sweep", *recipe(trainer__max_steps=4, trainer__val_check_interval=2), "model.optimizer.lr=0.01,1.0e+30",
             "--sampler", "grid", "--folder", "all"]
    assert main(sweep) == 130 and "The same command continues it" in capfd.readouterr().err
    assert main(sweep) == 0
    out = capfd.readouterr().out
    assert calls[1] == calls[0] and "--model.optimizer.lr=1e+30" in calls[2] and len(calls) == 3
    runs = [RunFolder(tmp_path / "all" / f"trial={index}") for index in range(2)]
    assert [run.completed.exists() for run in runs] == [True, False] and "Best: all/trial=0" in out
    assert "trial 1: failed: Step " in out and json.loads(runs[0].metrics_json.read_text())["trainer/global_step"] == 4
    page = (tmp_path / "all" / "report.html").read_text()
    assert "<h2>Trials</h2>" in page and "model.<wbr>optimizer.<wbr>lr" in page and "loss is nan" in page
    assert main([*sweep, "--seed", "1"]) == 2 and "seed was 0, is 1" in capfd.readouterr().err
