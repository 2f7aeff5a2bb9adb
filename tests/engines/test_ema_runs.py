"""Runs that average their parameters, on both engines: they resume, evaluate and export the average."""

import csv
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from lmmods.cli import main
from lmmods.runs.averaging import load_averages
from lmmods.runs.checkpoint import read_checkpoint
from lmmods.runs.folder import RunFolder

CHANGES = {"model__init_args__optimizer": {"lr": 0.01, "ema_decay": 0.5, "layer_decay": 0.9},
           "model__init_args__quantize": None, "model__init_args__lora": {"rank": 4}, "trainer__max_steps": 4,
           "trainer__val_check_interval": 2, "checkpoint": {"every_n_steps": 1, "keep_last": 9}}


def read_val_losses(folder):
    with open(folder.metrics_csv, newline="") as file:
        return [float(row["val/loss"]) for row in csv.DictReader(file) if row.get("val/loss")]


def average_checkpoints(folder):
    """Return the average of all checkpoints' parameters, computed by hand."""
    average = None
    for step in range(1, 5):
        params = load_file(folder.checkpoint(f"step={step}") / "model.safetensors")
        average = params if average is None else {name: (average[name] + params[name]) / 2 for name in params}
    return average


@pytest.mark.slow
def test_both_engines_average_alike_and_export_and_resume_the_average(recipe, tmp_path):
    results = {}
    for engine, other in (("torch", "jax"), ("jax", "torch")):
        folder = RunFolder(tmp_path / engine)
        arguments = {**CHANGES, "trainer__default_root_dir": str(folder.root)}
        assert main(["fit", *recipe(**arguments, engine=engine), "--stop_at", "2"]) == 0
        assert main(["fit", *recipe(**arguments, engine=other), "--ckpt_path", "last"]) == 0
        average = average_checkpoints(folder)
        saved = load_averages(read_checkpoint(folder.resolve("last")), 1)
        exported = load_file(folder.model / "adapter_model.safetensors")
        for name, value in average.items():
            np.testing.assert_allclose(saved[name], value, rtol=1e-6, atol=1e-8)
            peft = name.removeprefix("model.").replace(".default.weight", ".weight")
            assert np.array_equal(exported[peft], saved[name])
        results[engine] = folder, read_val_losses(folder)
    assert results["torch"][1] == pytest.approx(results["jax"][1], rel=1e-4)
    # Evaluating the checkpoint gives the run's final validation loss.
    for engine, (folder, losses) in results.items():
        assert main(["validate", *recipe(**CHANGES, trainer__default_root_dir=str(folder.root), engine=engine),
                     "--ckpt_path", "last"]) == 0
        assert json.loads(folder.metrics_json.read_text())["val/loss"] == pytest.approx(losses[-1], rel=1e-5)
