"""Multiple choice: a question and several texts of which one is right, encoded as a pair for each."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.base import DataModule
from lmmods.data.batches.collate import Collator
from lmmods.data.batches.loader import EvaluationLoader
from lmmods.data.batches.sequences import RowColumn, SequenceCollator, SequenceSet
from lmmods.data.encode.choices import ChoiceEncoder
from lmmods.data.encode.encoder import Encoder
from lmmods.data.encode.tokenizer import tells_texts_apart
from lmmods.data.scoring import Predictions
from lmmods.data.sources.choices import CHOICES, CONTEXTS, QUESTIONS, holds_choices, read_question
from lmmods.data.sources.readers import Row
from lmmods.data.splits import Role
from lmmods.data.store.rows import RowSet
from lmmods.recipe.source import Source
from lmmods.recipe.tasks.multiple_choice import MultipleChoiceDataFields


class MultipleChoiceData(MultipleChoiceDataFields, DataModule):
    """Questions with several choices; one row of a batch is a question.

    `index` of a batch counts the questions of its set.
    """

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        return "the rows are questions with choices" if holds_choices(row.values) else None

    # Batches ---------------------------------------------------------------------------------------------------------

    def predict_dataloader(self) -> EvaluationLoader:
        """Questions of this rank, without labels. Raises UserError without rows to predict."""
        collator = self._loaders.collator()
        collator = replace(collator, columns={"choices": collator.columns["choices"]})
        return self._loaders.evaluation("predict", replace(self._shard(), num_workers=0), collator)

    @property
    def sequences_per_row(self) -> int:
        """Choices of the widest question of all sets, which every batch has, so that every process knows it."""
        return max((int(rows.column("choices").max(initial=1)) for rows in self._splits.sets.values()), default=1)

    def _arrange(self, rows: RowSet) -> SequenceSet:
        return SequenceSet(rows, _name_of)

    def _batch_keys(self) -> tuple[str, ...]:
        types = ("token_type_ids",) if self.token_types and tells_texts_apart(self.tokenizer) else ()
        return ("input_ids", *types)

    def _batch_collator(self, collator: Collator) -> Callable[[list], dict[str, Any]]:
        return SequenceCollator(collator, self.sequences_per_row, {"labels": RowColumn("answer", IGNORED, np.int64),
                                                  "choices": RowColumn("choices", 1, np.int64)})

    def _texts(self, row: dict[str, Any], info: dict[str, Any]) -> list[str]:
        question = read_question(row, with_answer=False)
        return [question.first, *question.seconds]

    # Answers ---------------------------------------------------------------------------------------------------------

    def answer(self, role: Role, outputs: dict[int, np.ndarray]) -> Predictions:
        """Metrics and rows of an evaluation or of predict.

        Args:
            outputs: Logits of each choice by question; those beyond its choices are left out.

        Returns:
            Rows with the `prediction`, the text of the choice with the highest logit (of equal ones the first), its
            number `choice` from 0, and the `probabilities` of all choices; `accuracy` if all rows say which is right.
        """
        rows = self._rows(role)
        written, right = [], []  # is each choice right; None if the row does not say it
        for number, logits in sorted(outputs.items()):
            row = rows[number]
            assert row is not None
            source = rows.source_row(row["index"])
            logits = logits[: row["choices"]].astype(np.float64)
            powers = np.exp(logits - logits.max())
            choice = int(logits.argmax())
            written.append({**source, "prediction": read_question(source, with_answer=False).choices[choice],
                            "choice": choice, "probabilities": (powers / powers.sum()).tolist()})
            right.append(None if row["answer"] == IGNORED else choice == row["answer"])
        is_scored = self._can_score(role, [each is not None for each in right])
        return Predictions(written, {"accuracy": float(np.mean(right))} if is_scored else {}, {})

    def outputs_by_index(self, batch: dict[str, Any], outputs: Any) -> dict[int, Any]:
        """Logits by `index`; the network already returns them so."""
        return outputs

    def predictions(self, outputs: dict[int, Any]) -> Predictions:
        """Choices of all questions of predict."""
        return self.answer("predict", outputs)

    def example(self, index: int) -> dict[str, Any]:
        """The row of the question behind `index` of a predict batch."""
        row = self._rows("predict")[index]
        assert row is not None
        return self._rows("predict").source_row(row["index"])

    # Rows ------------------------------------------------------------------------------------------------------------

    def _encoding_settings(self) -> dict[str, Any]:
        return {"max_length": self.max_length}

    def _encoder(self, source: Source, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        if not holds_choices(first.values):
            raise UserError(
                f"{first.file}:{first.line}: the columns {', '.join(first.values)} are no question with choices: a row "
                f"needs a list of choices ({', '.join(CHOICES)}) or numbered columns (ending0, choice1, option_2), and "
                f"a text before them ({', '.join((*CONTEXTS, *QUESTIONS))}). Map yours with data.columns, for example "
                "{my_answers: choices}")
        tokenizer = self.tokenizer
        specials = tokenizer.num_special_tokens_to_add(pair=True)
        if self.max_length <= specials:
            raise UserError(f"data.max_length is {self.max_length}, but the tokenizer adds {specials} special tokens "
                            "to a pair of texts; set it to more")
        encoder = ChoiceEncoder(tokenizer.backend_tokenizer.to_str(), tokenizer.unk_token_id, self.max_length,
                                prompts_only)
        return encoder, {"format": "choices"}


def _name_of(row: dict[str, Any], place: int) -> str:
    """A choice by its number, and whether it is the right one."""
    return f"choice {place}, right" if place == row["answer"] else f"choice {place}"
