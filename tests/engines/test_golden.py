"""The first losses of the demo recipe equal the recorded ones; run this file as a program to record them again."""

import csv
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "sft_qlora.json"
NUM_STEPS = 8


def train_first_losses(folder: str) -> list[float]:
    """Train the shipped recipe for a few steps and return its losses."""
    from lmmods.cli import main

    os.chdir(ROOT)
    assert main(["fit", "--config", "configs/sft_qlora.yaml", "--trainer.max_steps", str(NUM_STEPS),
                 "--trainer.log_every_n_steps", "1", "--trainer.logger", "null", "--trainer.limit_val_batches", "0",
                 "--trainer.enable_progress_bar", "false", "--trainer.precision", "32-true",
                 "--trainer.default_root_dir", folder]) == 0
    with open(Path(folder) / "metrics.csv", newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file)]


def test_the_first_losses_equal_the_recorded_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("LMMODS_CACHE", str(tmp_path / "cache"))
    assert train_first_losses(str(tmp_path / "run")) == pytest.approx(
        json.loads(GOLDEN.read_text()), rel=1e-3)  # other CPUs round differently


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    GOLDEN.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(json.dumps(train_first_losses(f"{folder}/run")) + "\n")
