"""Causal language modelling on plain text: documents, each ended by the end token, split into blocks."""

from typing import Any

from lmmods.core.errors import UserError
from lmmods.data.base import DataModule
from lmmods.data.batches.blocks import BlockSet
from lmmods.data.encode.encoder import Encoder, TextEncoder, TextRowEncoder, check_text_column
from lmmods.data.sources.cells import as_text
from lmmods.data.sources.formats import recognise_texts
from lmmods.data.sources.readers import Row
from lmmods.data.sources.source_reader import SourceReader
from lmmods.data.store.rows import RowSet
from lmmods.recipe.source import Source
from lmmods.recipe.tasks.clm import CLMDataFields


class CLMData(CLMDataFields, DataModule):
    """Texts for causal language modelling; one row of a batch is a block of `max_length` tokens."""

    _adds_padding = False  # another row in the output head would change every probability

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        return recognise_texts(row)

    def encode_prompts(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts that begin a document."""
        text = TextEncoder(self.tokenizer)
        return [[*self._begin(text), *ids] for ids in text.encode_texts(texts, [False] * len(texts))]

    def _begin(self, text: TextEncoder) -> list[int]:
        """Ids before each document."""
        return [self.tokenizer.bos_token_id] if text.uses_bos else []

    def _reader(self, source: Source, streaming: bool = False) -> SourceReader:
        return SourceReader(source, self.documents, streaming)

    def _encoding_settings(self) -> dict[str, Any]:
        return {"text_column": self.text_column, "max_length": self.max_length}

    def _encoder(self, source: Source, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        check_text_column(first, self.text_column)
        if self.tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-text token to part documents; name one with data.eos_token")
        text = TextEncoder(self.tokenizer)
        # A prompt leaves room for one generated token, and must not end its document.
        end, longest = ([], self.max_length - 1) if prompts_only else ([self.tokenizer.eos_token_id], None)
        return TextRowEncoder(self.text_column, text, self._begin(text), end, longest), {"format": "text"}

    def _texts(self, row: dict[str, Any], info: dict[str, Any]) -> list[str]:
        return [as_text(row.get(self.text_column), self.text_column)]

    def _batch_keys(self) -> tuple[str, ...]:
        return ("input_ids", "labels")

    def _arrange(self, rows: RowSet) -> BlockSet:
        # Packing keeps documents apart; without it, joining wastes no tokens on padding.
        joined = not self.packing if self.join is None else self.join
        return BlockSet(rows, self.max_length, joined, self.parts_sources)

    def _prompt(self, row: dict[str, Any]) -> dict[str, Any]:
        ids = row["input_ids"]
        # Rows of a validation set end in the end token, after which there is nothing to continue.
        ids = ids[:-1] if len(ids) and ids[-1] == self.tokenizer.eos_token_id else ids
        return {"input_ids": ids[-self.max_length + 1 :], "index": row["index"]}
