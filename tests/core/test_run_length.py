"""Lengths of runs in epochs, fractions of epochs and steps, equal on both engines."""

import csv
import json

import pytest

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.recipe.trainer_fields import check_length, num_steps
from lmmods.runs.folder import RunFolder
from tests.finished_runs import assert_same_checkpoint


@pytest.mark.parametrize(("max_epochs", "max_steps", "steps"), [
    (1, -1, 4), (2, -1, 8), (2.0, -1, 8), (1.5, -1, 6), (0.1, -1, 1), (1.01, -1, 5), (1.99, -1, 8), (None, 9, 9),
    (-1, 9, 9), (3, 9, 9), (1.5, 9, 6), (0, -1, 0),
])
def test_the_number_of_steps_follows_from_epochs_and_max_steps(max_epochs, max_steps, steps):
    assert num_steps(10, 3, max_epochs, max_steps) == steps


def test_a_fraction_of_epochs_is_not_rounded_up_by_binary_error():
    """In binary, 1.1 is slightly more than 1.1."""
    for tenths in range(1, 100):
        assert num_steps(100, 1, tenths / 10, -1) == 10 * tenths


@pytest.mark.parametrize("max_epochs", [-2, -0.5, float("nan"), float("inf")])
def test_an_invalid_number_of_epochs_is_rejected(max_epochs):
    with pytest.raises(UserError, match="trainer.max_epochs is"):
        check_length(max_epochs, 10)


# 32 rows: 8 micro-batches and 3 steps per epoch. Half an epoch ends in the second step, micro-batches 4 to 6.
FRACTION = {"trainer__max_epochs": 1.5, "trainer__max_steps": -1, "trainer__accumulate_grad_batches": 3}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_run_may_last_one_and_a_half_epochs(recipe, tmp_path, engine):
    assert main(["fit", *recipe(**FRACTION, engine=engine, model__init_args__optimizer={
        "lr": 0.01, "schedule": "linear"})]) == 0
    folder = RunFolder(tmp_path / "run")
    with open(folder.metrics_csv, newline="") as file:
        rows = list(csv.DictReader(file))
    lr = [float(row["train/lr"]) for row in rows if row["train/lr"]]
    assert lr == pytest.approx([0.01 * (1 - step / 5) for step in range(5)])
    assert [float(row["train/epoch"]) for row in rows if row["train/epoch"]] == pytest.approx(
        [1 / 3, 2 / 3, 1, 4 / 3, 5 / 3])
    assert rows[-1]["step"] == "5" and rows[-1]["val/loss"]  # validation of the final model
    assert folder.names()[-1] == "step=5" and folder.completed.exists()
    assert json.loads(folder.metrics_json.read_text())["trainer/global_step"] == 5


@pytest.mark.slow
def test_a_run_interrupted_in_a_fractional_epoch_resumes_with_the_same_bits(recipe, tmp_path, stop_at):
    uninterrupted, interrupted = RunFolder(tmp_path / "straight"), RunFolder(tmp_path / "broken")
    assert main(["fit", *recipe(**FRACTION, trainer__default_root_dir=str(uninterrupted.root))]) == 0
    arguments = recipe(**FRACTION, trainer__default_root_dir=str(interrupted.root))
    for batch in (10, 3):  # then after two more batches, inside an accumulation window
        stop_at(batch)
        assert main(["fit", *arguments, *(["--ckpt_path", "last"] if interrupted.names() else [])]) == 130
    stop_at(0)
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert_same_checkpoint(uninterrupted, interrupted)
    assert json.loads(interrupted.metrics_json.read_text())["trainer/global_step"] == 5
