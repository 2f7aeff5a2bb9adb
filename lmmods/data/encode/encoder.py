"""What an encoder makes of a batch of rows."""

from collections import Counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from lmmods.data.sources.readers import Row

EXAMPLES_PER_REASON = 3
UNUSED = "unused:"  # counts that begin with it are of rows whose key of the rest holds something that is not used


class Ragged(NamedTuple):
    """A column of lists: all values in a row, and the length of each list."""

    values: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, lists: list[np.ndarray]) -> "Ragged":
        """Column of these int32 arrays."""
        values = np.concatenate(lists) if lists else np.empty(0, np.int32)
        return cls(values.astype(np.int32, copy=False), np.array([len(item) for item in lists], np.int64))


class Encoded(NamedTuple):
    """What an encoder made of a batch of rows.

    Args:
        columns: `input_ids` (Ragged) and others, one entry per kept row.
        positions: Place in the batch of each kept row.
        dropped: (place in the batch, reason) of each other row.
    """

    columns: dict[str, Ragged | np.ndarray]
    positions: np.ndarray
    dropped: list[tuple[int, str]]
    counts: Counter


class RowError(Exception):
    """A row that must stop the run: RowError(place in the batch, message)."""


class Encoder(Protocol):
    """Rows to token ids; picklable. Raises RowError."""

    def __call__(self, rows: list[dict[str, Any]]) -> Encoded: ...


class Tally:
    """Adds up what encoders counted and dropped."""

    def __init__(self) -> None:
        self.num_rows = self.num_kept = 0
        self._counts: Counter = Counter()
        self._dropped: dict[str, dict[str, Any]] = {}

    def add(self, batch: list[Row], encoded: Encoded) -> None:
        """Count one batch."""
        self.num_rows += len(batch)
        self.num_kept += len(encoded.positions)
        for place, reason in encoded.dropped:
            entry = self._dropped.setdefault(reason, {"rows": 0, "first": []})
            entry["rows"] += 1
            if len(entry["first"]) < EXAMPLES_PER_REASON:
                entry["first"].append(f"{batch[place].file}:{batch[place].line}")
        self._counts.update(encoded.counts)

    def summary(self) -> dict[str, Any]:
        """Counts, and for each reason to drop a row their number and the first places; plain JSON."""
        return {"rows_read": self.num_rows, "rows_kept": self.num_kept, "dropped": self._dropped,
                "counts": dict(self._counts)}


def describe_dropped(info: dict[str, Any]) -> str:
    """How many rows were read and why they were dropped, in words, from `Tally.summary` and `rows_read`."""
    reasons = "; ".join(f"{reason} ({entry['rows']} rows, first {entry['first'][0]})"
                        for reason, entry in info["dropped"].items())
    return f"{info['rows_read']} read: {reasons}"


def arrow_column(column: Ragged | np.ndarray) -> pa.Array:
    if not isinstance(column, Ragged):
        return pa.array(column)
    offsets = np.concatenate([[0], np.cumsum(column.lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(column.values))
