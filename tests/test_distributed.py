"""Two processes (gloo, CPU) against one on the same rows."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lmmods.cli import main
from lmmods.run import RunFolder

CUT = {"train/tokens_per_second", "train/epoch"}  # what depends on the number of processes
ROOT = Path(__file__).parent.parent


def figures(folder: RunFolder) -> list[dict[str, float]]:
    with open(folder.metrics_csv, newline="") as file:
        return [{key: float(value) for key, value in row.items() if value and key not in CUT}
                for row in csv.DictReader(file)]


def fit_with_two(arguments: list[str]) -> str:
    done = subprocess.run([sys.executable, "train.py", "fit", *arguments], cwd=ROOT, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_two_processes_resume_inside_a_window(recipe, tmp_path):
    """A validation falls inside a window of three micro-batches; its checkpoint holds what both had summed."""
    folder = RunFolder(tmp_path / "run")
    arguments = recipe(data__init_args__batch_size=2, trainer__accumulate_grad_batches=3, trainer__max_steps=4,
                       trainer__val_check_interval=4, trainer__devices=2, trainer__strategy="ddp",
                       checkpoint={"every_n_steps": None, "keep_last": 9})
    fit_with_two(arguments)
    assert "step=1+1" in folder.names()
    expected = load_file(folder.resolve("last") / "model.safetensors")
    before = figures(folder)
    fit_with_two([*arguments, "--ckpt_path", str(folder.checkpoint("step=1+1")), "--overwrite", "true"])
    assert figures(folder) == [pytest.approx(row, rel=1e-5) for row in before]
    for name, weight in load_file(folder.resolve("last") / "model.safetensors").items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"model__init_args__quantize": None, "model__init_args__lora": None}],
                         ids=["qlora", "full"])
def test_two_processes_take_the_steps_of_one(recipe, tmp_path, changes):
    """One process with windows of two micro-batches, two processes with one each: the same rows a step.

    32 training rows in batches of 3 are 11 micro-batches, so the last round leaves one process without rows.
    """
    one, two = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "two")
    common = {"data__init_args__batch_size": 3, "trainer__max_steps": 8, "trainer__gradient_clip_val": 0.5,
              "model__init_args__lora": {"rank": 4}, **changes}
    assert main(["fit", *recipe(**common, trainer__default_root_dir=str(one.root), trainer__val_check_interval=8,
                                trainer__accumulate_grad_batches=2)]) == 0
    arguments = recipe("two.yaml", **common, trainer__default_root_dir=str(two.root), trainer__devices=2,
                       trainer__strategy="ddp")
    assert fit_with_two(arguments).count("Parameters:") == 1  # told once
    alone, together = figures(one), figures(two)
    assert len(alone) == len(together)
    for row, expected in zip(together, alone):
        assert row == pytest.approx(expected, rel=1e-4), row
    weights, expected = (load_file(folder.resolve("last") / "model.safetensors") for folder in (two, one))
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-5)
