"""Multiple choice: a question and several texts of which one is right, encoded as a pair for each."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.base import DataModule
from lmmods.data.batch.collate import Collator
from lmmods.data.batch.numbered import NumberedSet
from lmmods.data.batch.sequences import RowColumn, SequenceCollator, SequenceSet
from lmmods.data.codec import NumbersCodec, Predictions, Settings, can_score
from lmmods.data.encode.choices import ChoiceEncoder
from lmmods.data.encode.encoder import Encoder
from lmmods.data.encode.tokenizer import distinguishes_texts
from lmmods.data.read.choices import CHOICES, CONTEXTS, QUESTIONS, holds_choices, read_question
from lmmods.data.read.readers import Row
from lmmods.data.read.source_reader import SourceReader
from lmmods.data.store.rows import RowSet
from lmmods.recipe.tasks.multiple_choice import MultipleChoiceDataFields

CHOICE_COUNT = RowColumn("choices", 1, np.int64)


class MultipleChoiceSettings(MultipleChoiceDataFields, Settings):
    """See `Settings`."""


class MultipleChoiceCodec(NumbersCodec):
    """Questions with several choices; one row of a batch is a question, and `index` its number in its set."""

    settings: MultipleChoiceSettings

    # From records to rows

    def make_encoder(self, reader: SourceReader, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        if not holds_choices(first.values):
            raise UserError(
                f"{first.file}:{first.line}: the columns {', '.join(first.values)} are not a question with choices: a "
                f"row needs a list of choices ({', '.join(CHOICES)}) or numbered columns (ending0, choice1, option_2), "
                f"and a text before them ({', '.join((*CONTEXTS, *QUESTIONS))}). Map yours with data.columns, for "
                "example {my_answers: choices}")
        tokenizer, max_length = self.tokenizer, self.settings.max_length
        specials = tokenizer.num_special_tokens_to_add(pair=True)
        if max_length <= specials:
            raise UserError(f"data.max_length is {max_length}, but the tokenizer adds {specials} special tokens to a "
                            "pair of texts. Raise it")
        encoder = ChoiceEncoder(tokenizer.backend_tokenizer.to_str(), tokenizer.unk_token_id, max_length, prompts_only)
        return encoder, {"format": "choices"}

    def encoding_settings(self) -> dict[str, Any]:
        return {"max_length": self.settings.max_length}

    def list_texts(self, record: dict[str, Any], info: dict[str, Any]) -> list[str]:
        question = read_question(record, with_answer=False)
        return [question.first, *question.seconds]

    # From rows to batches

    def make_items(self, rows: RowSet, by_source: bool) -> SequenceSet:
        return SequenceSet(rows, _name_of)

    def sequences_per_row(self, sets: Sequence[RowSet]) -> int:
        """Return the choices of the widest question of all sets, which every batch has, so that every process knows it.
        """
        return max((int(rows.column("choices").max(initial=1)) for rows in sets), default=1)

    def batch_columns(self, sets: Sequence[RowSet]) -> tuple[str, ...]:
        types = ("token_type_ids",) if self.model.token_types and distinguishes_texts(self.tokenizer) else ()
        return ("input_ids", *types)

    def make_collator(self, collator: Collator, sets: Sequence[RowSet], added: Sequence[str] = ()) -> SequenceCollator:
        return SequenceCollator(super().make_collator(collator, sets, added), self.sequences_per_row(sets),
                                {"labels": RowColumn("answer", IGNORED, np.int64), "choices": CHOICE_COUNT})

    def make_prompts(self, rows: RowSet) -> NumberedSet:
        return NumberedSet(self.make_items(rows, by_source=False), redrawn=False)

    def make_prompt_collator(self, collator: Collator, sets: Sequence[RowSet]) -> SequenceCollator:
        return replace(self.make_collator(collator, sets), columns={"choices": CHOICE_COUNT})

    # From outputs to predictions

    def evaluate(self, role: str, rows: RowSet, outputs: dict[int, np.ndarray]) -> Predictions:
        """Return metrics and records of an evaluation or of predict.

        Args:
            outputs: Logits of each choice by question; those beyond its choices are omitted.

        Returns:
            Records with the `prediction`, the text of the choice with the highest logit (of equal ones the first), its
            number `choice` from 0, and the `probabilities` of all choices; `accuracy` if all records say which is
            right.
        """
        records = []
        is_right: list[Any] = []  # whether each choice is right; None if unknown
        for index, logits in sorted(outputs.items()):
            row = rows[index]
            assert row is not None
            record = rows.source_row(row["index"])
            logits = logits[: row["choices"]].astype(np.float64)
            exponentials = np.exp(logits - logits.max())
            choice = int(logits.argmax())
            records.append({**record, "prediction": read_question(record, with_answer=False).choices[choice],
                            "choice": choice, "probabilities": (exponentials / exponentials.sum()).tolist()})
            is_right.append(None if row["answer"] == IGNORED else choice == row["answer"])
        is_scored, warnings = can_score(role, [is_hit is not None for is_hit in is_right])
        return Predictions(records, {"accuracy": float(np.mean(is_right))} if is_scored else {}, {}, warnings)

    def example(self, rows: RowSet, index: int) -> dict[str, Any]:
        """Return the record of the question behind `index` of a predict batch."""
        row = rows[index]
        assert row is not None
        return rows.source_row(row["index"])


class MultipleChoiceData(MultipleChoiceDataFields, DataModule):
    """Questions with several choices."""

    codec_class = MultipleChoiceCodec

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        return "the rows are questions with choices" if holds_choices(row.values) else None


def _name_of(row: dict[str, Any], index: int) -> str:
    """Describe a choice by its index, and whether it is the right one."""
    return f"choice {index}, right" if index == row["answer"] else f"choice {index}"
