"""Rows of ids to padded batches of int64 tensors [B, T]."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lmmods.core.dropout import token_seeds
from lmmods.core.labels import IGNORED

SEEDS = "token_seeds"


@dataclass
class Collator:
    """Pads to the longest row, rounded up to a multiple.

    A padding row (None) attends to one token, so that no softmax is over nothing, and has no label.

    Args:
        keys: Columns of a batch; `attention_mask` comes on top. `token_seeds` are those of `core.dropout`, for rows
            of a `NumberedSet`; 0 in padding.
        multiple: Lengths are rounded up to a multiple of this, but not above `max_length`.
        side: Where the padding goes.
    """

    keys: tuple[str, ...]
    pad_id: int
    multiple: int
    max_length: int
    side: str = "right"
    seed: int = 0  # of `token_seeds`

    def __call__(self, rows: list[dict[str, Any] | None]) -> dict[str, torch.Tensor]:
        """Batch of rows that hold `input_ids` and any of `labels`, `position_ids`, `segment_ids` [T], and numbers.

        `loss_weights` [B, T] float32 are a row's `weight`, a number or [T].
        """
        length = self.padded(max((len(row["input_ids"]) for row in rows if row is not None), default=1))
        return {key: torch.from_numpy(self._column(key, rows, length)) for key in (*self.keys, "attention_mask")}

    def padded(self, longest: int) -> int:
        """To how many tokens rows are padded, the longest of which has so many."""
        return max(longest, min(-(-longest // self.multiple) * self.multiple, self.max_length))

    def _column(self, key: str, rows: list[dict[str, Any] | None], length: int) -> np.ndarray:
        if key == SEEDS:
            return self._token_seeds(rows, length)
        if key == "index":
            return np.array([-1 if row is None else row[key] for row in rows], np.int64)
        if key in ("start_positions", "end_positions"):
            return np.array([IGNORED if row is None else self._moved(row, key, length) for row in rows], np.int64)
        fill = {"input_ids": self.pad_id, "labels": IGNORED}.get(key, 0)
        column = np.full((len(rows), length), fill, np.float32 if key == "loss_weights" else np.int64)
        for place, row in enumerate(rows):
            if row is None and key in ("attention_mask", "segment_ids"):
                value: Any = np.ones(1, np.int64)
            elif key == "attention_mask":
                value = np.ones(len(row["input_ids"]), np.int64)
            elif row is None:
                continue
            elif key == "loss_weights":
                value = np.broadcast_to(row["weight"], len(row["input_ids"]))
            else:
                value = row[key]
            column[place, slice(len(value)) if self.side == "right" else slice(length - len(value), None)] = value
        return column

    def _token_seeds(self, rows: list[dict[str, Any] | None], length: int) -> np.ndarray:
        """[B, T], of which packed rows have several data rows each."""
        draws, sizes = (np.array([[0 if row is None else get(row)] for row in rows], np.int64)
                        for get in (lambda row: row["draw"], lambda row: len(row["input_ids"])))
        positions = np.arange(length) - (0 if self.side == "right" else length - sizes)
        real = (positions >= 0) & (positions < sizes)
        if any(row is not None and "segment_ids" in row for row in rows):
            numbers, positions = (self._column(key, rows, length) for key in ("row", "position_ids"))
        else:
            numbers = np.array([[0 if row is None else row["row"]] for row in rows], np.int64)
        return np.where(real, token_seeds(self.seed, draws, numbers, positions), 0).astype(np.int64)

    def _moved(self, row: dict[str, Any], key: str, length: int) -> int:
        """A position in the padded row."""
        position = int(row[key])
        return position if self.side == "right" or position == IGNORED else position + length - len(row["input_ids"])
