"""Preference optimisation: answers to one prompt, one of them preferred, or each wanted or unwanted."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from lmmods.core.errors import UserError
from lmmods.data.batch.collate import AnswerCollator, AnswerSet, Collator, MismatchedSet
from lmmods.data.batch.loader import StatefulLoader
from lmmods.data.batch.stream import StreamLoader
from lmmods.data.conversations import ConversationCodec, ConversationSettings
from lmmods.data.encode.encoder import Encoder
from lmmods.data.encode.preferences import PreferenceEncoder
from lmmods.data.images import ImageCodec, ImageData
from lmmods.data.read.conversation import RowProblem
from lmmods.data.read.preferences import (
    Judged,
    conversation_layout,
    holds_preference,
    keep_chosen,
    label_of,
    read_answers,
)
from lmmods.data.read.readers import Row
from lmmods.data.read.source_reader import SourceReader
from lmmods.data.store.references import REFERENCE_LOGPS
from lmmods.data.store.rows import RowSet
from lmmods.recipe.tasks.preference import PreferenceDataFields


class AnswersCodec(ConversationCodec):
    """Records with several answers to a prompt. Abstract."""

    def read_all(self, record: dict[str, Any], info: dict[str, Any]) -> list[Judged]:
        """Return the answers of a record. Raises RowProblem."""
        return read_answers(record, partial(self.read, info=info))

    def list_texts(self, record: dict[str, Any], info: dict[str, Any]) -> list[str]:
        # The turns before both answers are there twice.
        return list(dict.fromkeys(text for answer in self.read_all(record, info)
                                  for text in self.list_spoken(answer.conversation.messages)))

    def context_of(self, record: dict[str, Any], info: dict[str, Any]) -> str:
        return "\n".join(dict.fromkeys(self.surroundings_of(answer.conversation)
                                       for answer in self.read_all(record, info)))


class PreferenceSettings(PreferenceDataFields, ConversationSettings):
    """See `Settings`."""


class PreferenceCodec(AnswersCodec):
    """Pairs of answers, or single ones with a label; one row of a batch is a pair, or one answer."""

    settings: PreferenceSettings

    # From records to rows

    def make_encoder(self, reader: SourceReader, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        layout = reader.source.format or self.settings.dataset_format or conversation_layout(
            first.values, f"{first.file}:{first.line}", prompts_only)
        conversations, info = self.encoder_and_facts(layout, prompts_only)
        return PreferenceEncoder(conversations, "pair" if self.model.answers == "pair" else "single"), info

    def encoding_settings(self) -> dict[str, Any]:
        return {**super().encoding_settings(), "is_paired": self.model.answers == "pair"}

    # From rows to batches

    def make_items(self, rows: RowSet, by_source: bool) -> AnswerSet:
        if self.model.answers == "mismatched":
            return MismatchedSet(rows, self.settings.seed, self.settings.max_length)
        return AnswerSet(rows, 2 if self.model.answers == "pair" else 1)

    def sequences_per_row(self, sets: Sequence[RowSet]) -> int:
        """Return the answers of a row; 2 also if another row lends one."""
        return 1 if self.model.answers == "single" else 2

    def make_collator(self, collator: Collator, sets: Sequence[RowSet], added: Sequence[str] = ()) -> AnswerCollator:
        of_rows = tuple(name for name in added if name in (REFERENCE_LOGPS, "index"))
        inner = super().make_collator(collator, sets, [name for name in added if name not in of_rows])
        return AnswerCollator(inner, self.sequences_per_row(sets), self.model.answers == "pair", of_rows)

    # From outputs to predictions

    def reference(self, rows: RowSet, index: int) -> str | None:
        """Return the wanted answer in the data for a row of predict, or None."""
        with suppress(RowProblem):
            for conversation, is_wanted in self.read_all(self.example(rows, index), rows.info(index)):
                last = conversation.messages[-1]
                if is_wanted and last["role"] == "assistant":
                    return last["content"]
        return None

    @staticmethod
    def select_prompt(record: dict[str, Any]) -> dict[str, Any]:
        return keep_chosen(record)


class ImagePreferenceCodec(ImageCodec, PreferenceCodec):
    """`PreferenceCodec` with images, which the answers of a row share."""


class PreferenceData(PreferenceDataFields, ImageData):
    """Pairs of answers, or single ones with a label."""

    codec_class, image_codec_class = PreferenceCodec, ImagePreferenceCodec

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        return "the rows have better and worse answers" if holds_preference(row.values) else None

    @classmethod
    def model_settings(cls, row: Row) -> dict[str, tuple[Any, str]]:
        return {"loss": ("sigmoid" if label_of(row.values) is None else "kto", "others: docs/tasks/preference.md"),
                "beta": (0.1, "lower values let the model move further from its start")}

    def train_batches(self) -> StatefulLoader | StreamLoader:
        """See `DataModule`. Raises UserError for `kto` on a stream, whose last buffer may contain a single row."""
        if self.streaming and self._model.answers == "mismatched":
            raise UserError("model.loss kto compares each answer with another row's, which data.streaming does not "
                            "support. Set data.streaming to false, or use apo_zero_unpaired")
        return super().train_batches()
