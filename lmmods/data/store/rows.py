"""Rows of several stores as one numbered set, and its division into training and validation rows."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lmmods.core.errors import UserError
from lmmods.data.store.arrow_store import MemoryStore, Store


class RowSet(Dataset):
    """Selected kept rows of concatenated stores.

    Item i contains the encoder's columns of the i-th selected row, with `index` counted over all rows read; item -1 is
    None, a padding row.

    Args:
        selection: Numbers of kept rows (int64), counted through all stores; None is all.
    """

    def __init__(self, stores: Sequence[Store | MemoryStore], selection: np.ndarray | None = None) -> None:
        self.stores = stores
        self._starts = np.cumsum([0] + [len(store) for store in stores])
        # Kept rows and rows as read are counted through all stores, each in its own numbering.
        self._index_starts = np.cumsum([0] + [store.info["rows_read"] for store in stores])
        self._selection = selection

    @property
    def selection(self) -> np.ndarray:
        """Numbers of the selected kept rows (int64), counted through all stores."""
        return np.arange(self._starts[-1]) if self._selection is None else self._selection

    @property
    def source_sizes(self) -> np.ndarray:
        """Selected rows of each store, int64; rows that are in the order of the stores."""
        return np.diff(np.searchsorted(self.selection, self._starts, "left"))

    def __len__(self) -> int:
        return int(self._starts[-1]) if self._selection is None else len(self._selection)

    def __getitem__(self, index: int) -> Any:  # a dictionary, unless the index is -1
        if index < 0:
            return None
        kept_index = index if self._selection is None else self._selection[index]
        store = int(np.searchsorted(self._starts, kept_index, "right")) - 1
        row = self.stores[store].row(int(kept_index - self._starts[store]))
        return {**row, "index": int(row["index"] + self._index_starts[store])}

    def column(self, name: str) -> np.ndarray:
        """Return a column of numbers of the selected rows, or the lengths of a column of lists."""
        return self._selected([store.column(name) for store in self.stores])

    def counts(self, name: str, size: int) -> np.ndarray:
        """Return how often the selected rows have each of the numbers 0 to `size` - 1 in their lists of a column."""
        # Rows may be selected several times.
        times = np.bincount(self.selection, minlength=self._starts[-1])
        counts, position = np.zeros(size, np.int64), 0
        for store in self.stores:
            for values, lengths in store.lists(name):
                weights = np.repeat(times[position : position + len(lengths)], lengths)
                is_counted = (values >= 0) & (values < size)
                counts += np.bincount(values[is_counted], weights[is_counted], size).astype(np.int64)
                position += len(lengths)
        return counts

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row."""
        return self.column("input_ids")

    @property
    def truncated(self) -> np.ndarray:
        """Tokens truncated from each row."""
        return self.column("truncated")

    @property
    def index(self) -> np.ndarray:
        """Number of each selected row among all rows read."""
        return self._selected([store.column("index") + start
                               for store, start in zip(self.stores, self._index_starts, strict=False)])

    def _selected(self, columns: list[np.ndarray]) -> np.ndarray:
        """Return the selected rows of a column that is given by store."""
        column = columns[0] if len(columns) == 1 else np.concatenate(columns)
        return column if self._selection is None else column[self._selection]

    def subset(self, indices: np.ndarray) -> "RowSet":
        """Return the selected rows at these positions, in this order."""
        return RowSet(self.stores, indices if self._selection is None else self._selection[indices])

    def store_of(self, index: int) -> Store | MemoryStore:
        """Return the store that the row comes from."""
        return self.stores[self._store_of(index)]

    def source_row(self, index: int) -> dict[str, Any]:
        """Return the row as read."""
        store = self._store_of(index)
        return self.stores[store].source_row(int(index - self._index_starts[store]))

    def info(self, index: int) -> dict[str, Any]:
        """Return info.json of the store that the row comes from."""
        return self.stores[self._store_of(index)].info

    def location(self, index: int) -> str:
        """Return file:line of the row as read."""
        store = self._store_of(index)
        return self.stores[store].location(int(index - self._index_starts[store]))

    def _store_of(self, index: int) -> int:
        if not 0 <= index < self._index_starts[-1]:
            raise IndexError(f"row {index} of {self._index_starts[-1]}")
        return int(np.searchsorted(self._index_starts, index, "right")) - 1


def split(rows: RowSet, val_size: int | float, seed: int) -> tuple[RowSet, RowSet]:
    """Split into training and validation rows: disjoint, together complete, deterministic for the rows read and the
    seed.

    The permutation covers rows as read and skips dropped ones, so settings that drop or truncate rows move as few other
    rows as possible to the other side. Raises UserError if nothing is left on one side.

    Args:
        rows: All kept rows. Those that come from one row as read (the windows of a question) stay together.
        val_size: Fraction (float) or number (int) of the usable rows for validation.
        seed: Seed of the permutation.
    """
    if not val_size:  # skips the permutation, which takes a second for ten million rows
        return rows, rows.subset(np.empty(0, np.int64))
    total = sum(store.info["rows_read"] for store in rows.stores)
    index = rows.index
    usable = np.zeros(total, bool)
    usable[index] = True
    num_usable = int(usable.sum())
    # A fraction is at least one row.
    count = val_size if isinstance(val_size, int) else max(round(val_size * num_usable), 1)
    if not 0 < count < num_usable or val_size < 0:
        raise UserError(f"data.val_size is {val_size}, but the source has {num_usable} usable rows of {total}. Set a "
                        "fraction below 1.0 or fewer rows")
    order = np.random.default_rng([seed, total]).permutation(total)
    held_out = np.zeros(total, bool)
    # The first `count` usable rows in random order.
    held_out[order[usable[order]][:count]] = True
    in_validation = held_out[index]
    return rows.subset(np.flatnonzero(~in_validation)), rows.subset(np.flatnonzero(in_validation))


def repeat_by_weight(rows: RowSet, weights: list[float], seed: int) -> RowSet:
    """Repeat or subsample rows by the weights of their stores: 2 takes each twice, 0.5 a random half by the seed."""
    if all(weight == 1 for weight in weights):
        return rows
    # The store of each selected row.
    store_of = np.searchsorted(np.cumsum([len(store) for store in rows.stores]), rows.selection, "right")
    random = np.random.default_rng([seed, len(rows)])
    parts = []
    for index, weight in enumerate(weights):
        positions = np.flatnonzero(store_of == index)
        times = int(weight)
        # A weight of 2.5 takes each row twice and a random half once more.
        extra = random.permutation(positions)[: round((weight - times) * len(positions))]
        parts += [np.tile(positions, times), np.sort(extra)]
    return rows.subset(np.concatenate(parts))


class PromptSet(Dataset):
    """Prompts built by `prompt_of` from kept rows, or from another dataset of them with `lengths`.

    Item -1 is None, a padding row.
    """

    def __init__(self, rows: Any, prompt_of: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._rows, self._prompt_of = rows, prompt_of
        self.lengths = rows.lengths

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        row = self._rows[index]
        return None if row is None else self._prompt_of(row)


class IndexedRows(Dataset):
    """Rows with `index`, their number in this set, and `source`, their number as read. Item -1 is None, a padding row.

    Args:
        are_whole: True if no row is ever truncated.
    """

    def __init__(self, rows: RowSet, are_whole: bool = False) -> None:
        self.rows, self.lengths = rows, rows.lengths
        self.truncated = np.zeros(len(rows), np.int64) if are_whole else rows.truncated  # tokens removed from each row

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        row = self.rows[index]
        return None if row is None else {**row, "index": index, "source": row["index"]}
