"""Checks of finished runs that several tests share."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from lmmods.runs.folder import RunFolder

TIMED = {"train/tokens_per_second"}


def rows(run: RunFolder, without: set[str] = TIMED) -> list[dict[str, float]]:
    """Return the logged metrics by step, without timings."""
    with open(run.metrics_csv, newline="") as file:
        return [{key: float(value) for key, value in row.items() if value and key not in without}
                for row in csv.DictReader(file)]


def alike(found: Any, wanted: Any) -> bool:
    """Return whether two trees are equal, floats up to rounding."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(alike(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(alike, found, wanted))
    return found == (pytest.approx(wanted, rel=1e-3, abs=1e-4) if isinstance(wanted, float) else wanted)


def seconds_of_steps(run: RunFolder) -> list[float]:
    """Return the duration of each logged step in seconds, from its logged speed."""
    with open(run.metrics_csv, newline="") as file:
        rows = list(csv.DictReader(file))
    tokens = [float(row["train/tokens"]) for row in rows]
    return [(now - before) / float(row["train/tokens_per_second"])
            for before, now, row in zip([0, *tokens], tokens, rows, strict=False)]


def assert_same_checkpoint(run: RunFolder, other: RunFolder) -> None:
    """Check that the last checkpoints have the same bits of weights and optimiser state."""
    for name in ("model", "optimizer"):
        left, right = (load_file(folder.resolve("last") / f"{name}.safetensors") for folder in (run, other))
        assert left.keys() == right.keys() and all((tensor == right[key]).all() for key, tensor in left.items())


def assert_same_run(run: RunFolder, other: RunFolder) -> None:
    """Check that two runs have equal metrics, last checkpoints, final metrics and exported weights, to the bit."""
    assert rows(run) == rows(other)
    assert run.names()[-1] == other.names()[-1]
    assert_same_checkpoint(run, other)
    states = [json.loads((folder.resolve("last") / "state.json").read_text()) for folder in (run, other)]
    for state in states:
        state["callbacks"]["Metrics"]["latest"].pop("train/tokens_per_second", None)
    assert states[0] == states[1]
    left, right = (_final_numbers(folder.metrics_json) for folder in (run, other))
    assert left == right
    left, right = (_weights(folder.model) for folder in (run, other))
    assert left.keys() == right.keys() and all((tensor == right[key]).all() for key, tensor in left.items())
    assert run.completed.exists() == other.completed.exists()


def _final_numbers(path: Path) -> dict[str, float]:
    return {key: value for key, value in json.loads(path.read_text()).items() if key not in TIMED}


def _weights(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def paths(node: object, path: str = "") -> Iterator[str]:
    """Yield the path of every key and index in a tree."""
    yield path
    for key, value in (node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()):
        yield from paths(value, f"{path}/{key}")
