"""Causal language modelling on plain text: documents, each closed by the end token, cut into blocks."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lmmods.data.base import DataModule
from lmmods.data.blocks import BlockSet
from lmmods.data.encoding import TextEncoder
from lmmods.data.formats import RowProblem, as_text
from lmmods.data.readers import Row
from lmmods.data.rows import RowSet
from lmmods.data.sources import Source, SourceReader
from lmmods.data.store import Encoded, Encoder, Ragged
from lmmods.errors import UserError


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
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowProblem("text with a lone surrogate (half of a character)") from error

    def _finish(self, ids: list[int], row: dict[str, Any], counts: Counter) -> np.ndarray:
        begin = [self.text.bos_id] if self.text.uses_bos and row.get("starts", True) else []
        if self.prompts_only:
            cut = max(0, len(begin) + len(ids) - (self.max_length - 1))
            counts["rows_cut"] += bool(cut)
            counts["tokens_cut"] += cut
            return np.array([*begin, *ids[cut:]], np.int32)
        return np.array([*begin, *ids, self.text.eos_id] if row.get("ends", True) else [*begin, *ids], np.int32)


class CLMData(DataModule):
    """Texts for causal language modelling; one row of a batch is a block of `max_length` tokens.

    Args:
        source: Where the training texts come from: file, folder, glob, URL, hub id, a mapping {path, name, split,
            revision, columns, limit, weight}, or a list of these. Text files, or files with a text column.
        text_column: Column that holds the text.
        documents: What a document of a .txt file is: the whole `file`, each `paragraph` (parted by blank lines) or `line`.
        join: Lay the documents end to end before cutting, so that every block but the last is full. Otherwise each
            document fills blocks of its own, padded.
        **common: Fields of every data module.
    """

    def __init__(
        self,
        source: str | Source | list[str | Source],
        *,
        text_column: str = "text",
        documents: Literal["file", "paragraph", "line"] = "file",
        join: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(source, **common)
        self.text_column = text_column
        self.documents = documents
        self.join = join

    def _reader(self, source: Source) -> SourceReader:
        return SourceReader(source, self.documents)

    def _encoding_settings(self) -> dict[str, Any]:
        return {"text_column": self.text_column, "max_length": self.max_length}

    def _encoder(self, source: Source, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        if self.text_column not in first.values:
            raise UserError(f"{first.file}:{first.line}: no column {self.text_column!r}; the columns are "
                            f"{', '.join(first.values)}. Name yours with data.text_column")
        if self.tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-text token to part documents; name one with data.eos_token")
        return TextRowEncoder(self.text_column, TextEncoder(self.tokenizer), prompts_only, self.max_length), {"format": "text"}

    def _batch_keys(self) -> tuple[str, ...]:
        return ("input_ids", "labels")

    def _arrange(self, rows: RowSet) -> BlockSet:
        return BlockSet(rows, self.max_length, self.join)

    def _prompt(self, row: dict[str, Any]) -> dict[str, Any]:
        ids = row["input_ids"]
        ids = ids[:-1] if len(ids) and ids[-1] == self.tokenizer.eos_token_id else ids
        return {"input_ids": ids[-self.max_length + 1 :], "index": row["index"]}
