"""Rows with a text to ids. Free of torch, so that worker processes start fast."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmmods.core.errors import UserError
from lmmods.data.encode.encoder import Encoded, Ragged
from lmmods.data.encode.text_encoder import Run, TextEncoder
from lmmods.data.sources.cells import as_text, check_unicode
from lmmods.data.sources.conversation import RowProblem
from lmmods.data.sources.readers import Row


def ends_of(row: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a row begins and ends its document. Only a piece of a text file does not; other rows may have columns of
    the same names."""
    starts, ends = row.get("starts"), row.get("ends")
    if len(row) == 3 and isinstance(starts, bool) and isinstance(ends, bool):
        return starts, ends
    return True, True


def check_text_column(first: Row, column: str) -> None:
    """Raise UserError where the first row of a source lacks the column of its texts."""
    if column not in first.values:
        raise UserError(f"{first.file}:{first.line}: no column {column!r}; the columns are {', '.join(first.values)}. "
                        "Name yours with data.text_column")


@dataclass
class TextRowEncoder:
    """Rows with a text to ids: `begin`, the text, `end`. A piece of a document gets what stands at its ends only.

    Args:
        begin: Ids before each document.
        end: Ids behind each document.
        longest: Longest row, truncated on the left; None is no limit.
        gap: Token that is recognised in the text; None is none.
    """

    column: str
    text: TextEncoder
    begin: list[int]
    end: list[int]
    longest: int | None = None
    gap: str | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> Encoded:
        """Column `input_ids`."""
        places, texts, dropped = [], [], []
        for place, row in enumerate(rows):
            try:
                texts.append(self._text(row))
                places.append(place)
            except RowProblem as problem:
                dropped.append((place, str(problem)))
        kept = [rows[place] for place in places]
        counts: Counter = Counter()
        lists = [self._finish(ids, row, counts) for ids, row in zip(self._encode(texts, kept), kept, strict=True)]
        columns = {"input_ids": Ragged.of(lists)}
        counts["tokens"] += len(columns["input_ids"].values)
        counts["unknown_tokens"] += int((columns["input_ids"].values == self.text.unk_id).sum())
        counts["labelled_tokens"] = counts["tokens"]
        return Encoded(columns, np.array(places, np.int64), dropped, counts)

    def _text(self, row: dict[str, Any]) -> str:
        if self.column not in row:
            raise RowProblem(f"{self.column} is missing")
        text = as_text(row[self.column], self.column)
        if not text.strip():
            raise RowProblem("empty text")
        check_unicode(text)
        return text

    def _encode(self, texts: list[str], rows: list[dict[str, Any]]) -> list[list[int]]:
        if self.gap is None:
            return self.text.encode_texts(texts, [not ends_of(row)[0] for row in rows])
        gap = Run(self.text.control[self.gap], -1)
        parted = [[run for part in text.split(self.gap) for run in (Run(part, -1), gap)][:-1] for text in texts]
        runs = [[run for run in row if run.content != ""] for row in parted]
        return [ids.tolist() for ids, _ in self.text.encode_rows(runs)]

    def _finish(self, ids: list[int], row: dict[str, Any], counts: Counter) -> np.ndarray:
        starts, ends = ends_of(row)
        begin = self.begin if starts else []
        end = self.end if ends else []
        num_truncated = 0 if self.longest is None else max(0, len(begin) + len(ids) + len(end) - self.longest)
        counts["rows_cut"] += bool(num_truncated)
        counts["tokens_cut"] += num_truncated
        return np.array([*begin, *ids[num_truncated:], *end], np.int32)
