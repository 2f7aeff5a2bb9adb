"""Rows with a text to ids. Free of torch, so that worker processes start fast."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmmods.data.encoding import TextEncoder
from lmmods.data.formats import RowProblem, as_text, check_unicode
from lmmods.data.store import Encoded, Ragged


@dataclass
class TextRowEncoder:
    """Rows with a text to ids: begin token where the tokenizer uses one, the text, the end token.

    Args:
        column: Column that holds the text.
        text: Encodes it.
        prompts_only: Leave the end open, and cut prompts from the left to fit `max_length` with a token to spare.
        max_length: Longest prompt plus one.
    """

    column: str
    text: TextEncoder
    prompts_only: bool
    max_length: int

    def __call__(self, rows: list[dict[str, Any]]) -> Encoded:
        """Column `input_ids`."""
        places, dropped = [], []
        for place, row in enumerate(rows):
            try:
                self._check(row)
                places.append(place)
            except RowProblem as problem:
                dropped.append((place, str(problem)))
        kept = [rows[place] for place in places]
        encoded = self.text.encode_texts([as_text(row[self.column], self.column) for row in kept],
                                         [not row.get("starts", True) for row in kept])
        counts: Counter = Counter()
        lists = [self._finish(ids, row, counts) for ids, row in zip(encoded, kept)]
        columns = {"input_ids": Ragged.of(lists)}
        counts["tokens"] += len(columns["input_ids"].values)
        counts["labelled_tokens"] = counts["tokens"]
        return Encoded(columns, np.array(places, np.int64), dropped, counts)

    def _check(self, row: dict[str, Any]) -> None:
        if self.column not in row:
            raise RowProblem(f"{self.column} is missing")
        text = as_text(row[self.column], self.column)
        if not text.strip():
            raise RowProblem("empty text")
        check_unicode(text)

    def _finish(self, ids: list[int], row: dict[str, Any], counts: Counter) -> np.ndarray:
        begin = [self.text.bos_id] if self.text.uses_bos and row.get("starts", True) else []
        if self.prompts_only:
            cut = max(0, len(begin) + len(ids) - (self.max_length - 1))
            counts["rows_cut"] += bool(cut)
            counts["tokens_cut"] += cut
            return np.array([*begin, *ids[cut:]], np.int32)
        return np.array([*begin, *ids, self.text.eos_id] if row.get("ends", True) else [*begin, *ids], np.int32)
