"""What several tests ask of a finished run."""

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
    """The logged rows, without what no two runs share."""
    with open(run.metrics_csv, newline="") as file:
        return [{key: float(value) for key, value in row.items() if value and key not in without}
                for row in csv.DictReader(file)]


def alike(found: Any, wanted: Any) -> bool:
    """Equal, but numbers that are no whole ones to rounding."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(alike(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(alike, found, wanted))
    return found == (pytest.approx(wanted, rel=1e-3, abs=1e-4) if isinstance(wanted, float) else wanted)


def seconds_of_steps(run: RunFolder) -> list[float]:
    """Seconds that each logged step took by the speed that the run has logged for it."""
    with open(run.metrics_csv, newline="") as file:
        rows = list(csv.DictReader(file))
    seen = [float(row["train/tokens"]) for row in rows]
    return [(now - before) / float(row["train/tokens_per_second"])
            for before, now, row in zip([0, *seen], seen, rows, strict=False)]


def assert_same_checkpoint(run: RunFolder, other: RunFolder) -> None:
    """The last checkpoints hold the same bits of weights and optimiser state."""
    for name in ("model", "optimizer"):
        left, right = (load_file(each.resolve("last") / f"{name}.safetensors") for each in (run, other))
        assert left.keys() == right.keys() and all((tensor == right[key]).all() for key, tensor in left.items())


def assert_same_run(run: RunFolder, other: RunFolder) -> None:
    """Two runs left the same: rows, last checkpoint to the bit, final numbers, exported weights."""
    assert rows(run) == rows(other)
    assert run.names()[-1] == other.names()[-1]
    assert_same_checkpoint(run, other)
    states = [json.loads((each.resolve("last") / "state.json").read_text()) for each in (run, other)]
    for state in states:
        state["callbacks"]["Metrics"]["latest"].pop("train/tokens_per_second", None)
    assert states[0] == states[1]
    left, right = (_final_numbers(each.metrics_json) for each in (run, other))
    assert left == right
    left, right = (_weights(each.model) for each in (run, other))
    assert left.keys() == right.keys() and all((tensor == right[key]).all() for key, tensor in left.items())
    assert run.completed.exists() == other.completed.exists()


def _final_numbers(path: Path) -> dict[str, float]:
    return {key: value for key, value in json.loads(path.read_text()).items() if key not in TIMED}


def _weights(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def paths(node: object, path: str = "") -> Iterator[str]:
    """Every key and number in a tree, under those that lead to it."""
    yield path
    for key, value in (node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()):
        yield from paths(value, f"{path}/{key}")
