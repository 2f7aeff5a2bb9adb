"""Lightning's EarlyStopping from the recipe: it stops, the run is complete, and its count survives a resume."""

import json

import pytest

from lmmods.cli import main
from lmmods.runs.folder import RunFolder


@pytest.fixture
def flat(recipe):
    """Arguments of a run that learns nothing: the first of its validations, every two steps, stays the best."""
    stopping = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss", "patience": 2}}
    return recipe(trainer__max_steps=20, trainer__val_check_interval=2, trainer__callbacks=[stopping],
                  model__init_args__optimizer={"lr": 0.0})


def state(folder: RunFolder) -> dict:
    callbacks = json.loads((folder.resolve("last") / "state.json").read_text())["callbacks"]
    [found] = [value for name, value in callbacks.items() if name.startswith("EarlyStopping")]
    return found


def assert_stopped_at_step_6(folder: RunFolder) -> None:
    assert folder.names()[-1] == "step=6" and folder.completed.exists()
    assert (folder.model / "adapter_model.safetensors").exists() and folder.loss_png.exists()
    assert json.loads(folder.metrics_json.read_text())["trainer/global_step"] == 6
    assert state(folder)["wait_count"] == 2


def test_a_run_that_no_longer_improves_ends_complete(flat, tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    assert main(["fit", *flat]) == 0
    assert_stopped_at_step_6(folder)
    assert "val/loss did not improve in the last 2 records" in capsys.readouterr().out
    assert main(["fit", *flat, "--ckpt_path", "last"]) == 0
    assert_stopped_at_step_6(folder)


def test_more_patience_goes_on(flat, tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert main(["fit", *flat]) == 0
    assert main(["fit", *flat, "--ckpt_path", "last", "--trainer.callbacks.patience", "4"]) == 0
    assert folder.names()[-1] == "step=10" and state(folder)["wait_count"] == 4


def test_validation_once_an_epoch_is_counted_in_its_checkpoint(flat, tmp_path, stop_at):
    """An epoch is 8 steps: validations after 8, 16 and 24."""
    folder = RunFolder(tmp_path / "run")
    arguments = [*flat, "--trainer.val_check_interval", "null", "--trainer.max_steps", "40"]
    stop_at(16)
    assert main(["fit", *arguments]) == 130
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert folder.names()[-1] == "step=24" and state(folder)["wait_count"] == 2


@pytest.mark.parametrize("batch", [4, 5, 6], ids=lambda batch: f"interrupted_in_batch_{batch}")
def test_the_count_survives_a_resume(flat, tmp_path, stop_at, batch):
    folder = RunFolder(tmp_path / "run")
    stop_at(batch)
    assert main(["fit", *flat]) == 130
    assert not folder.completed.exists()
    assert main(["fit", *flat, "--ckpt_path", "last"]) == 0
    assert_stopped_at_step_6(folder)


def test_a_metric_that_is_not_logged_is_told(recipe, capsys):
    stopping = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/los", "patience": 2}}
    assert main(["fit", *recipe(trainer__callbacks=[stopping])]) == 2
    assert "val/los" in capsys.readouterr().err
