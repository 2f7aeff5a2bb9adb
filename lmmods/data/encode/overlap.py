"""N-grams of evaluation texts, to find training rows that contain parts of them."""

from collections.abc import Iterable

import numpy as np

from lmmods.data.encode.words import ngram_hashes, texts_in, words_in
from lmmods.data.read.readers import Row


class EvaluationNgrams:
    """All n-grams of evaluation rows, in memory: 16 bytes for each.

    Args:
        sources: Name and rows of each source. All texts of a row count, each separately.
        size: Words of an n-gram.

    Attributes:
        notes: Notes on the search for the data report.
    """

    def __init__(self, sources: Iterable[tuple[str, Iterable[Row]]], size: int) -> None:
        self.size = size
        self.notes: list[str] = []
        self._names: list[str] = []
        hashes_of_sources, owners = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        for name, rows in sources:
            num_rows, num_short, hashes = 0, 0, np.empty(0, np.uint64)
            parts: list[np.ndarray] = []
            for row in rows:
                row_hashes = self._hashes(texts_in(row.values))
                num_rows += 1
                num_short += not len(row_hashes)
                parts.append(row_hashes)
                if len(parts) == 1000:  # deduplicate before reading more rows
                    hashes, parts = np.unique(np.concatenate([hashes, *parts])), []
            hashes = np.unique(np.concatenate([hashes, *parts]))
            hashes_of_sources.append(hashes)
            owners.append(np.full(len(hashes), len(self._names)))
            self._names.append(name)
            self.notes.append(f"looked for {size} consecutive words of {num_rows - num_short} rows of {name}"
                              + (f"; {num_short} more have only shorter texts" if num_short else ""))
        # An n-gram of several sources counts for the first one.
        self._known_hashes, firsts = np.unique(np.concatenate(hashes_of_sources), return_index=True)
        self._owners = np.concatenate(owners)[firsts]

    def _hashes(self, texts: list[str]) -> np.ndarray:
        return np.concatenate([np.empty(0, np.uint64), *(ngram_hashes(words_in(text), self.size) for text in texts)])

    def source_of(self, texts: list[str]) -> str | None:
        """Return the name of the source with which these texts share their first common n-gram; None without one."""
        hashes = self._hashes(texts)
        indices = np.searchsorted(self._known_hashes, hashes)
        indices[indices == len(self._known_hashes)] = 0  # larger than all
        is_known = len(self._known_hashes) > 0
        shared: np.ndarray | list[int] = np.flatnonzero(self._known_hashes[indices] == hashes) if is_known else []
        return self._names[self._owners[indices[shared[0]]]] if len(shared) else None
