"""Causal language modelling on plain text: documents, each ended by the end token, split into blocks."""

from collections.abc import Callable, Sequence
from typing import Any

from lmmods.core.errors import UserError
from lmmods.data.base import DataModule
from lmmods.data.batch.blocks import BlockSet
from lmmods.data.codec import Codec, Settings
from lmmods.data.encode.encoder import Encoder, TextEncoder, TextRowEncoder, check_text_column
from lmmods.data.read.cells import as_text
from lmmods.data.read.formats import recognise_texts
from lmmods.data.read.readers import Row
from lmmods.data.read.source_reader import SourceReader
from lmmods.data.store.rows import RowSet
from lmmods.recipe.tasks.base import TextDataFields
from lmmods.recipe.tasks.clm import CLMDataFields


class TextSettings(TextDataFields, Settings):
    """See `Settings`."""


class TextCodec(Codec):
    """Plain texts. Abstract."""

    settings: TextSettings

    def list_texts(self, record: dict[str, Any], info: dict[str, Any]) -> list[str]:
        return [as_text(record.get(self.settings.text_column), self.settings.text_column)]

    def batch_columns(self, sets: Sequence[RowSet]) -> tuple[str, ...]:
        return ("input_ids", "labels")


class TextData(TextDataFields, DataModule):
    """Plain texts. Abstract."""

    @property
    def text_files(self) -> str:  # type: ignore[override]
        """How text files are read, as in `read_file`."""
        return self.documents

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        return recognise_texts(row)


class CLMSettings(CLMDataFields, TextSettings):
    """See `Settings`."""


class CLMCodec(TextCodec):
    """Texts in blocks of `max_length` tokens."""

    settings: CLMSettings

    def make_encoder(self, reader: SourceReader, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        check_text_column(first, self.settings.text_column)
        if self.tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-text token to separate documents. Set data.eos_token")
        text = TextEncoder(self.tokenizer)
        # A prompt leaves space for one generated token, and must not end its document.
        end, max_length = ([], self.settings.max_length - 1) if prompts_only else ([self.tokenizer.eos_token_id], None)
        return TextRowEncoder(self.settings.text_column, text, self._begin(text), end, max_length), {"format": "text"}

    def _begin(self, text: TextEncoder) -> list[int]:
        """Return the ids before each document."""
        return [self.tokenizer.bos_token_id] if text.uses_bos else []

    def encoding_settings(self) -> dict[str, Any]:
        return {"text_column": self.settings.text_column, "max_length": self.settings.max_length}

    def make_items(self, rows: RowSet, by_source: bool) -> BlockSet:
        # Packing separates documents; without it, joining wastes no tokens on padding.
        join_rows = not self.settings.packing if self.settings.join is None else self.settings.join
        return BlockSet(rows, self.settings.max_length, join_rows, by_source)

    def prompt_of(self, row: dict[str, Any]) -> dict[str, Any]:
        ids = row["input_ids"]
        # Rows of a validation set end in the end token, after which there is nothing to continue.
        ids = ids[:-1] if len(ids) and ids[-1] == self.tokenizer.eos_token_id else ids
        return {"input_ids": ids[-self.settings.max_length + 1 :], "index": row["index"]}

    def encode_prompts(self, texts: list[str], training_rows: Callable[[], RowSet]) -> list[list[int]]:
        """Return the token ids of texts that start a document."""
        text = TextEncoder(self.tokenizer)
        return [[*self._begin(text), *ids] for ids in text.encode_texts(texts, [False] * len(texts))]


class CLMData(CLMDataFields, TextData):
    """Texts for causal language modelling; one row of a batch is a block of `max_length` tokens."""

    codec_class = CLMCodec
    adds_padding = False  # another row in the output head would change every probability
