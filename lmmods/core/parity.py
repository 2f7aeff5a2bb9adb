"""Comparison of both engines: each measures the same rows with the same model, then the results are compared.

Each engine writes its results into a folder, so that only one of them is in memory at a time.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmmods.core.errors import UserError
from lmmods.core.initialization import Normal, draw
from lmmods.core.labels import PER_ROW

Row = dict[str, np.ndarray]
# Relative differences: more than rounding in float32 causes, less than between models that really differ.
TOLERANCES = {"logits": 1e-4, "loss": 1e-4, "gradient": 1e-3}
SMALL = 1e-3  # fraction of the largest gradient; smaller gradients, possibly rounding errors, are compared with this
POSITIONS = 256  # number of compared positions, over all rows
LOSS, LOGITS, GRADIENTS = "loss.json", "logits.safetensors", "gradients.safetensors"


@dataclass(frozen=True)
class Difference:
    """The largest difference between the results of both engines.

    Args:
        quantity: A key of `TOLERANCES`.
        absolute: Absolute difference.
        relative: Relative to the largest value; for a gradient, to the largest of its parameter.
        name: Parameter whose gradient has the largest relative difference.
    """

    quantity: str
    absolute: float
    relative: float
    name: str = ""

    @property
    def passes(self) -> bool:
        """True if the difference is within rounding."""
        return self.relative <= TOLERANCES[self.quantity]  # False for NaN

    def __str__(self) -> str:
        parameter = f" ({self.name})" if self.name else ""
        return (f"{self.quantity:<9} differ{'s' if self.quantity != 'logits' else ''} by {self.absolute:.1e}, relative "
                f"{self.relative:.1e}{parameter}: {'pass' if self.passes else 'FAIL'}, tolerance "
                f"{TOLERANCES[self.quantity]:.0e}")


def sequences(row: Row) -> Row:
    """Return the inputs of a model for a row: [A, T] for each column, where a row of preferences has A answers.

    Columns of PER_ROW, such as images, keep their shape.
    """
    # Labels and weights are not inputs of the model.
    names = ("input_ids", "attention_mask", "position_ids", "segment_ids", "token_type_ids")
    return {name: row[name].reshape(-1, row[name].shape[-1]) for name in names if name in row} | {
        name: column for name, column in row.items() if name.startswith(PER_ROW)}


def compared_positions(row: Row, num_rows: int) -> np.ndarray:
    """Return the positions [P] among a row's A × T tokens whose logits are compared: real tokens, evenly spaced."""
    # Logits at padding are arbitrary and may differ between attention kernels.
    real = np.flatnonzero(row["attention_mask"])
    # From first to last, to find errors that grow along the row.
    return real[np.linspace(0, len(real) - 1, max(POSITIONS // num_rows, 1)).round().astype(int)]


def row_logits(logits: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the logits [P, K] of a classifier that are compared: of tokens at `positions`, or all of a row [1, ...].

    Args:
        logits: [1, T, K] of a row's tokens, or [1, K] of the row itself or its choices.
        positions: Result of `compared_positions`.
    """
    return logits[0, positions] if logits.ndim == 3 else logits.reshape(-1, 1)


def moved_adapter(name: str, values: np.ndarray) -> np.ndarray:
    """Replace an adapter's B for a comparison: with zeros A would have no gradient, and only the base would count.

    Args:
        name: Name of the parameter in torch.
        values: Kept if not zero, as in a trained adapter.
    """
    return values if values.any() else draw(0, f"parity {name}", Normal(0.02), values.shape)


def write(folder: Path, loss: float, weight: float, logits: np.ndarray, gradients: Mapping[str, np.ndarray]) -> None:
    """Write the results of an engine.

    Args:
        loss: Mean over target positions.
        weight: Weight of the target positions.
        logits: [P, V] float32, for all rows.
        gradients: Gradients of the loss, by torch's names of the parameters.
    """
    from safetensors.numpy import save_file

    if not weight:
        raise UserError("--parity true: these rows have no targets. Raise --rows.")
    (folder / LOSS).write_text(json.dumps(loss))
    save_file({"logits": np.ascontiguousarray(logits)}, folder / LOGITS)
    save_file({name: np.ascontiguousarray(values) for name, values in gradients.items()}, folder / GRADIENTS)


def compare(expected: Path, actual: Path) -> list[Difference]:
    """Return the largest differences between the results of two engines, by kind."""
    from safetensors import safe_open

    expected_loss, actual_loss = (np.array(json.loads((folder / LOSS).read_text())) for folder in (expected, actual))
    with safe_open(expected / LOGITS, "np") as expected_file, safe_open(actual / LOGITS, "np") as actual_file:
        logits = _measure("logits", expected_file.get_tensor("logits"), actual_file.get_tensor("logits"))
    with safe_open(expected / GRADIENTS, "np") as expected_file, safe_open(actual / GRADIENTS, "np") as actual_file:
        return [logits, _measure("loss", expected_loss, actual_loss), _worst_gradient(expected_file, actual_file)]


def _worst_gradient(expected: Any, actual: Any) -> Difference:
    """Return the parameter with the largest difference, read one at a time; infinity if an engine lacks a parameter."""
    names = sorted(expected.keys())
    # A parameter that trains on only one engine is a difference, too.
    if unmatched := sorted(set(names).symmetric_difference(actual.keys())):
        return Difference("gradient", math.inf, math.inf, unmatched[0])
    min_scale = SMALL * max(np.abs(expected.get_tensor(name)).max() for name in names)
    differences = [_measure("gradient", expected.get_tensor(name), actual.get_tensor(name), name, min_scale)
                   for name in names]
    # NaN compares as False, so `max` could pass over it.
    return max(differences, key=lambda difference: math.inf if math.isnan(difference.relative) else difference.relative)


def _measure(quantity: str, expected: np.ndarray, actual: np.ndarray, name: str = "", min_scale: float = 0.0
             ) -> Difference:
    if expected.shape != actual.shape:
        return Difference(quantity, math.inf, math.inf, name)
    absolute, scale = float(np.abs(expected - actual).max()), max(float(np.abs(expected).max()), float(min_scale))
    # Without a scale, equal zeros differ by 0 and anything else by infinity. NaN stays NaN.
    return Difference(quantity, absolute, absolute / scale if scale else math.inf * absolute if absolute else 0.0, name)
