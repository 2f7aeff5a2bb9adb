"""Token rows concatenated and split into blocks, without copying them."""

from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lmmods.data.store.rows import RowSet


class BlockSet(Dataset):
    """Blocks of at most `max_length` tokens. Item -1 is None, a padding row.

    Args:
        joined: Concatenate all rows before splitting, so that only the last block is short. Otherwise each row is split
            separately.
        by_source: Start a block with each source, so that every block is of one.
    """

    def __init__(self, rows: RowSet, max_length: int, join_rows: bool, by_source: bool = False) -> None:
        self.rows = rows
        # A block is a pair of positions [start, end) in the concatenated rows, which are never copied.
        sizes = rows.lengths
        self._row_ends = np.cumsum(sizes)
        if join_rows:
            # Tokens before the end of each source, or of all.
            last = np.cumsum(rows.source_sizes) if by_source else np.array([len(rows)])
            totals = np.concatenate([[0], self._row_ends])[last]
            starts = np.concatenate([np.arange(*bounds, max_length) for bounds in zip([0, *totals[:-1]], totals)])
            ends = np.minimum(starts + max_length, totals[np.searchsorted(totals, starts, "right")])
        else:
            num_blocks = -(-sizes // max_length)
            # For each block: the index of its row's first block, then its own index within the row.
            first_block = np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
            within = np.arange(len(first_block)) - first_block
            starts = np.repeat(self._row_ends - sizes, num_blocks) + within * max_length
            ends = np.minimum(starts + max_length, np.repeat(self._row_ends, num_blocks))
        self._starts, self._ends = starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each block."""
        return self._ends - self._starts

    @property
    def source_sizes(self) -> np.ndarray:
        """Blocks that start in each source; they are in the order of the sources."""
        ends = np.concatenate([[0], self._row_ends])[np.cumsum(self.rows.source_sizes)]
        return np.diff(np.searchsorted(self._starts, ends, "left"), prepend=0)

    @property
    def truncated(self) -> np.ndarray:
        """Tokens truncated from each block: none."""
        return np.zeros(len(self), np.int64)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        if index < 0:
            return None
        position, end = int(self._starts[index]), int(self._ends[index])
        # The first row that ends after `position`; empty rows are skipped.
        row_index = first = int(np.searchsorted(self._row_ends, position, "right"))
        parts = []
        while position < end:
            # Take tokens from row after row until the block is full.
            row_end = int(self._row_ends[row_index])
            ids = self.rows[row_index]["input_ids"]
            start = len(ids) - (row_end - position)  # offset of `position` within the row
            parts.append(ids[start : start + end - position])
            position, row_index = min(row_end, end), row_index + 1
        ids = np.concatenate(parts)
        return {"input_ids": ids, "labels": ids, "index": self.rows[first]["index"]}
