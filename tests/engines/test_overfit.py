"""`trainer.overfit_batches` trains on the same few micro-batches in every epoch, on both engines."""

import csv

import numpy as np
import pytest

from lmmods.cli import main


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize("overfit", [2, 0.25])
def test_each_epoch_trains_on_the_same_micro_batches(recipe, tmp_path, engine, overfit):
    """Both values mean two of nine micro-batches."""
    arguments = recipe(engine=engine, model__init_args__quantize=None, trainer__overfit_batches=overfit,
                       data__init_args__val_size=0,
                       trainer__max_steps=-1, trainer__max_epochs=3, trainer__val_check_interval=1.0)
    assert main(["fit", *arguments]) == 0
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        tokens = np.diff([0, *(float(row["train/tokens"]) for row in csv.DictReader(file))])
    assert len(tokens) == 6 and tokens[:2].tolist() == tokens[2:4].tolist() == tokens[4:].tolist()
