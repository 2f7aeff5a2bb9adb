"""EarlyStopping from the recipe: stopped runs are complete; its count survives a resume and a change of engine."""

import json
import math
import random

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping as LightningEarlyStopping

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.evaluation.early_stopping import EarlyStoppingRule
from lmmods.runs.folder import RunFolder


@pytest.fixture
def flat(recipe):
    """Return arguments of a run that learns nothing: its first validation stays the best one."""
    stopping = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss", "patience": 2, "min_delta": 0.001}}
    return recipe(trainer__max_steps=20, trainer__val_check_interval=2, trainer__callbacks=[stopping],
                  model__init_args__optimizer={"lr": 0.0})


def read_state(folder: RunFolder) -> dict:
    callbacks = json.loads((folder.resolve("last") / "state.json").read_text())["callbacks"]
    [saved] = [value for name, value in callbacks.items() if name.startswith("EarlyStopping")]
    return saved


def assert_stopped_at_step_6(folder: RunFolder) -> None:
    assert folder.names()[-1] == "step=6" and folder.completed.exists()
    assert (folder.model / "adapter_model.safetensors").exists() and folder.loss_png.exists()
    assert json.loads(folder.metrics_json.read_text())["trainer/global_step"] == 6
    assert read_state(folder)["wait_count"] == 2


def test_a_run_that_no_longer_improves_ends_complete(flat, tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    assert main(["fit", *flat]) == 0
    assert_stopped_at_step_6(folder)
    assert "did not improve in the last 2 checks" in capsys.readouterr().out
    assert main(["fit", *flat, "--ckpt_path", "last"]) == 0
    assert "did not improve in the last 2 checks" in capsys.readouterr().out
    assert_stopped_at_step_6(folder)


def test_a_run_resumes_with_more_patience(flat, tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert main(["fit", *flat]) == 0
    assert main(["fit", *flat, "--ckpt_path", "last", "--trainer.callbacks.patience", "4"]) == 0
    assert folder.names()[-1] == "step=10" and read_state(folder)["wait_count"] == 4


@pytest.mark.slow
def test_validation_once_an_epoch_is_counted_in_its_checkpoint(flat, tmp_path, stop_at):
    """An epoch is 8 steps: validations after 8, 16 and 24."""
    folder = RunFolder(tmp_path / "run")
    arguments = [*flat, "--trainer.val_check_interval", "null", "--trainer.max_steps", "40"]
    stop_at(16)
    assert main(["fit", *arguments]) == 130
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert folder.names()[-1] == "step=24" and read_state(folder)["wait_count"] == 2


@pytest.mark.parametrize("batch", [4, 5, 6], ids=lambda batch: f"interrupted_in_batch_{batch}")
def test_the_count_survives_a_resume(flat, tmp_path, stop_at, batch):
    folder = RunFolder(tmp_path / "run")
    stop_at(batch)
    assert main(["fit", *flat]) == 130
    assert not folder.completed.exists()
    assert main(["fit", *flat, "--ckpt_path", "last"]) == 0
    assert_stopped_at_step_6(folder)


def test_a_metric_that_is_not_logged_is_an_error(recipe, capsys):
    stopping = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/los", "patience": 2}}
    assert main(["fit", *recipe(trainer__callbacks=[stopping])]) == 2
    assert "val/los" in capsys.readouterr().err


# The rule ---------------------------------------------------------------------------------------------------------


class Values:
    """Trainer for Lightning's callback that provides a list of values."""

    fast_dev_run, current_epoch, should_stop = False, 0, False
    strategy = type("Strategy", (), {"reduce_boolean_decision": staticmethod(lambda decision, all: decision)})

    def __init__(self, values):
        self.values, self.num_checked = values, 0

    def check_lightnings(self, callback) -> tuple[int, dict]:
        """Return the number of values checked until the callback stops, and its state."""
        for value in self.values:
            self.num_checked += 1
            self.callback_metrics = {"val/loss": torch.tensor(value, dtype=torch.float64)}
            callback._run_early_stopping_check(self)
            if self.should_stop:
                break
        return self.num_checked, callback.state_dict()

    def check_rule(self, rule) -> tuple[int, dict]:
        for value in self.values:
            self.num_checked += 1
            if rule.check({"val/loss": value}):
                break
        return self.num_checked, rule.state_dict()


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_rule_stops_when_lightnings_callback_does(mode, capsys):
    dice = random.Random(0)
    stopped = set()
    for _ in range(400):
        fields = {"mode": mode, "min_delta": dice.choice([0.0, 0.125, -0.125]), "patience": dice.randint(1, 4),
                  "check_finite": dice.random() < 0.5, "stopping_threshold": dice.choice([None, 0.25, 0.75]),
                  "divergence_threshold": dice.choice([None, 0.0, 1.0])}
        values = [dice.choice([dice.randint(-1, 9) / 8, dice.random(), math.nan, math.inf, -math.inf])
                  for _ in range(dice.randint(1, 12))]
        lightnings, rule = LightningEarlyStopping("val/loss", **fields), EarlyStoppingRule("val/loss", **fields)
        expected_checks, expected = Values(values).check_lightnings(lightnings)
        num_checks, actual = Values(values).check_rule(rule)
        assert (num_checks, actual["wait_count"], actual["stopping_reason"]) == (
            expected_checks, expected["wait_count"], expected["stopping_reason"]), (fields, values)
        assert actual["best_score"] == expected["best_score"].item(), (fields, values)
        assert rule.state_key == lightnings.state_key
        stopped.add(actual["stopping_reason"])
    assert stopped == {0, 1, 2, 3, 4}


def make_old_states() -> dict[str, dict]:
    """Return states of older checkpoints, with a best score of 2.5 two validations ago."""
    torch_state = {"wait_count": 2, "stopped_epoch": 0, "best_score": torch.tensor(2.5), "patience": 5,
                   "stopping_reason": 0, "stopping_reason_message": None}
    return {"torch": torch_state, "jax": {"wait_count": 2, "best": 2.5}}


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_older_checkpoints_of_both_engines_resume(engine):
    rule = EarlyStoppingRule("val/loss", patience=4)
    rule.load_state_dict(make_old_states()[engine])
    assert not rule.begin(validates=True)
    assert not rule.check({"val/loss": 3.0}) and rule.check({"val/loss": 3.0})
    assert rule.state_dict()["best_score"] == 2.5 and rule.state_dict()["wait_count"] == 4


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_an_older_stopped_run_resumes_only_with_more_patience(engine):
    state = {**make_old_states()[engine], **({"stopping_reason": 3} if engine == "torch" else {})}
    for patience, stays in ((2, True), (3, False)):
        rule = EarlyStoppingRule("val/loss", patience=patience)
        rule.load_state_dict(state)
        assert bool(rule.begin(validates=True)) is stays


def test_when_the_rule_checks():
    for setting, validates, moments in ((None, True, {"validated"}), (None, False, {"epoch", "both"}),
                                        (True, True, {"epoch", "both"}), (False, True, {"validated", "both"})):
        rule = EarlyStoppingRule("val/loss", check_on_train_epoch_end=setting)
        rule.begin(validates)
        due = {name for name, moment in {"validated": (True, False), "epoch": (False, True), "both": (True, True)
                                         }.items() if rule.is_due(*moment)}
        assert due == moments | ({"both"} if setting is None else set())


def test_a_missing_metric_is_an_error_unless_strict_is_false():
    assert not EarlyStoppingRule("val/late", strict=False).check({"val/loss": 1.0})
    with pytest.raises(UserError, match="which this run does not log. Set it to one of val/loss."):
        EarlyStoppingRule("val/late").check({"val/loss": 1.0})


# Both engines -----------------------------------------------------------------------------------------------------


def read_comparable_state(folder: RunFolder) -> dict:
    saved = read_state(folder)
    return {**saved, "best_score": round(saved["best_score"], 4), "stopping_reason_message": ""}


@pytest.mark.slow
@pytest.mark.parametrize("first", ["torch", "jax"])
def test_a_run_that_changes_engine_keeps_count(flat, tmp_path, stop_at, first, capfd):
    """The first engine ends after step 4 with a count of 1; the other stops at step 6, with config.yaml as recipe."""
    second = {"torch": "jax", "jax": "torch"}[first]
    folder = RunFolder(tmp_path / "run")
    assert main(["fit", *flat, "--engine", first, "--trainer.max_steps", "4"]) == 0
    assert read_state(folder)["wait_count"] == 1
    before = read_comparable_state(folder)
    assert main(["fit", "--config", str(folder.config), "--engine", second, "--trainer.max_steps", "20",
                 "--ckpt_path", "last"]) == 0
    assert_stopped_at_step_6(folder)
    assert read_comparable_state(folder) == {**before, "wait_count": 2, "stopping_reason": 3}
    capfd.readouterr()
    exported = folder.completed.stat().st_mtime_ns
    assert main(["fit", *flat, "--engine", first, "--ckpt_path", "last"]) == 0  # it stays stopped
    assert "finished at step 6. Nothing was changed: EarlyStopping: val/loss" in (output := capfd.readouterr().out)
    assert "Raise its patience" in output and folder.completed.stat().st_mtime_ns == exported
    assert_stopped_at_step_6(folder)
    assert main(["fit", *flat, "--engine", first, "--ckpt_path", "last", "--trainer.callbacks.patience", "3"]) == 0
    assert folder.names()[-1] == "step=8" and read_state(folder)["wait_count"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_run_without_validation_is_checked_each_epoch(recipe, tmp_path, engine):
    """An epoch has 9 steps; with a rate of 0 and no dropout or shuffling, the loss depends on the rows only."""
    stopping = {"class_path": "EarlyStopping", "init_args": {"monitor": "train/loss", "patience": 1,
                                                             "min_delta": 100.0}}
    folder = RunFolder(tmp_path / "run")
    assert main(["fit", *recipe(engine=engine, trainer__max_steps=40, trainer__callbacks=[stopping],
                                data__init_args__val_size=0, model__init_args__quantize=None,
                                trainer__val_check_interval=None, checkpoint__keep_best=0)]) == 0
    assert folder.names()[-1] == "step=18" and read_state(folder)["wait_count"] == 1 and folder.completed.exists()
