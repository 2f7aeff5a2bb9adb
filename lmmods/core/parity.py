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

Row = dict[str, np.ndarray]
# Relative differences above those of rounding in float32, and below those of a model that really differs.
TOLERANCES = {"logits": 1e-4, "loss": 1e-4, "gradient": 1e-3}
SMALL = 1e-3  # of the largest gradient: smaller ones are measured relative to this, as they may be rounding errors
POSITIONS = 256  # number of compared positions, over all rows
LOSS, LOGITS, GRADIENTS = "loss.json", "logits.safetensors", "gradients.safetensors"


@dataclass(frozen=True)
class Difference:
    """The largest difference between the results of both engines.

    Args:
        what: A key of `TOLERANCES`.
        absolute: Absolute difference.
        relative: Relative to the largest value; for a gradient, to the largest of its parameter.
        name: Parameter whose gradient has the largest relative difference.
    """

    what: str
    absolute: float
    relative: float
    name: str = ""

    @property
    def passes(self) -> bool:
        """True if the difference is within rounding."""
        return self.relative <= TOLERANCES[self.what]  # False for NaN

    def __str__(self) -> str:
        of = f" ({self.name})" if self.name else ""
        return (f"{self.what:<9} differ{'s' if self.what != 'logits' else ''} by {self.absolute:.1e}, relative "
                f"{self.relative:.1e}{of}: {'pass' if self.passes else 'FAIL'}, tolerance "
                f"{TOLERANCES[self.what]:.0e}")


def sequences(row: Row) -> Row:
    """Return the inputs of a model for a row: [A, T] for each column, where a row of preferences has A answers."""
    # Labels and weights are not inputs of the model.
    names = ("input_ids", "attention_mask", "position_ids", "segment_ids", "token_type_ids")
    return {name: row[name].reshape(-1, row[name].shape[-1]) for name in names if name in row}


def compared_positions(row: Row, num_rows: int) -> np.ndarray:
    """Positions [P] among the A × T tokens of a row whose logits are compared: real tokens, evenly spaced."""
    # Logits at padding are arbitrary and may differ between attention kernels.
    real = np.flatnonzero(row["attention_mask"])
    # First to last, so that errors which grow along the row are seen.
    return real[np.linspace(0, len(real) - 1, max(POSITIONS // num_rows, 1)).round().astype(int)]


def row_logits(logits: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Logits [P, K] of a classifier that are compared: those of tokens at `places`, or all of a row [1, ...].

    Args:
        logits: [1, T, K] of a row's tokens, or [1, K] of the row itself or its choices.
        places: As `compared_positions` returns them.
    """
    return logits[0, places] if logits.ndim == 3 else logits.reshape(-1, 1)


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
        logits: [P, V] float32, of all rows.
        gradients: Gradients of the loss, by torch's names of the parameters.
    """
    from safetensors.numpy import save_file

    if not weight:
        raise UserError("--parity true: these rows have no targets. Raise --rows.")
    (folder / LOSS).write_text(json.dumps(loss))
    save_file({"logits": np.ascontiguousarray(logits)}, folder / LOGITS)
    save_file({name: np.ascontiguousarray(values) for name, values in gradients.items()}, folder / GRADIENTS)


def compare(expected: Path, found: Path) -> list[Difference]:
    """Return the largest differences between the results of two engines, by kind."""
    from safetensors import safe_open

    one_loss, other_loss = (np.array(json.loads((folder / LOSS).read_text())) for folder in (expected, found))
    with safe_open(expected / LOGITS, "np") as one, safe_open(found / LOGITS, "np") as other:
        logits = _difference("logits", one.get_tensor("logits"), other.get_tensor("logits"))
    with safe_open(expected / GRADIENTS, "np") as one, safe_open(found / GRADIENTS, "np") as other:
        return [logits, _difference("loss", one_loss, other_loss), _worst_gradient(one, other)]


def _worst_gradient(one: Any, other: Any) -> Difference:
    """Return the parameter with the largest difference, read one at a time; infinity if an engine lacks a parameter."""
    names = sorted(one.keys())
    # A parameter that trains on one engine alone is a difference, too.
    if apart := sorted(set(names).symmetric_difference(other.keys())):
        return Difference("gradient", math.inf, math.inf, apart[0])
    least = SMALL * max(np.abs(one.get_tensor(name)).max() for name in names)
    found = [_difference("gradient", one.get_tensor(name), other.get_tensor(name), name, least) for name in names]
    # NaN compares as False, so `max` could pass over it.
    return max(found, key=lambda each: math.inf if math.isnan(each.relative) else each.relative)


def _difference(what: str, expected: np.ndarray, found: np.ndarray, name: str = "", least: float = 0.0) -> Difference:
    if expected.shape != found.shape:
        return Difference(what, math.inf, math.inf, name)
    absolute, scale = float(np.abs(expected - found).max()), max(float(np.abs(expected).max()), float(least))
    # Without a scale: equal zeros are no difference, anything else is infinitely large. NaN stays NaN.
    return Difference(what, absolute, absolute / scale if scale else math.inf * absolute if absolute else 0.0, name)
