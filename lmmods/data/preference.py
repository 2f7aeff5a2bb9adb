"""Preference optimisation: answers to one prompt, one of them preferred, or each wanted or unwanted."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from lmmods.core import fingerprints
from lmmods.core.errors import UserError
from lmmods.core.hardware import REFERENCE, cache_folder
from lmmods.data.batches.collate import AnswerCollator, AnswerSet, Collator, MismatchedSet
from lmmods.data.batches.loader import EvaluationLoader, StatefulLoader
from lmmods.data.batches.stream import StreamLoader
from lmmods.data.encode.conversations import Choices
from lmmods.data.encode.encoder import Encoder
from lmmods.data.encode.preferences import PreferenceEncoder
from lmmods.data.sft import ConversationData
from lmmods.data.sources.conversation import RowProblem
from lmmods.data.sources.preferences import as_asked, conversation_layout, holds_preference, label_of, read_answers
from lmmods.data.sources.readers import Row
from lmmods.data.splits import STAGE_ROLES, Role
from lmmods.data.store.cache import fingerprint
from lmmods.data.store.references import ReferenceStore
from lmmods.data.store.rows import RowSet
from lmmods.recipe.source import Source
from lmmods.recipe.tasks.preference import PreferenceDataFields


class PreferenceData(PreferenceDataFields, ConversationData):
    """Pairs of answers, or single ones with a label; one row of a batch is a pair, or one answer."""

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        return "the rows hold better and worse answers" if holds_preference(row.values) else None

    @classmethod
    def model_settings(cls, row: Row) -> dict[str, tuple[Any, str]]:
        return {"loss": ("sigmoid" if label_of(row.values) is None else "kto", "others: docs/tasks/preference.md"),
                "beta": (0.1, "lower lets the model go further from where it starts")}

    def reference(self, index: int) -> str | None:
        """The wanted answer in the data for a row of predict, or None."""
        layout = self._rows("predict").info(index)["format"]
        with suppress(RowProblem):
            for conversation, is_wanted in read_answers(layout, self.example(index), self.roles, self.turn_fields):
                last = conversation.messages[-1]
                if is_wanted and last["role"] == "assistant":
                    return last["content"]
        return None

    def _asked(self, row: dict[str, Any]) -> dict[str, Any]:
        return as_asked(row)

    def train_batches(self) -> StatefulLoader | StreamLoader:
        """As of `DataModule`. Raises UserError for `kto` on a stream, whose last buffer may hold a single row."""
        if self.streaming and self.answers == "mismatched":
            raise UserError("model.loss kto compares each answer with that of another row, which data.streaming does "
                            "not support: set it to false, or use apo_zero_unpaired")
        return super().train_batches()

    # Log-probabilities under a reference model that is not loaded during training ------------------------------------

    keeps_references = False  # True if batches hold `reference_logps`

    def begin_references(self, stage: str) -> list[Role]:
        """Add `reference_logps` to batches from now on. Returns the sets that need a call of `adopt_references`.

        Raises:
            UserError: Rows of a stream are not known before training.
        """
        if self.streaming and stage == "fit":
            raise UserError("model.reference cache goes through all rows before training, which data.streaming does "
                            "not allow: set it to false, or leave model.reference out")
        self.keeps_references = True
        return [role for role in STAGE_ROLES[stage] if role in self._splits.sets and role != "predict"]

    def reference_store(self, role: Role, network: dict[str, Any]) -> ReferenceStore:
        """The store of a set's log-probabilities under a reference model.

        Args:
            network: All that determines the reference model's numbers.
        """
        rows, items = self._rows(role), self._loaders.items(role)
        # The second answer is another row's: drawn by the seed, cut to max_length.
        lent = {"seed": self.seed, "max_length": self.max_length} if self.answers == "mismatched" else {}
        key = fingerprint({"network": network, "answers": self.answers, **lent,
                           "stores": [store.name for store in rows.stores], "rows": fingerprints.of_array(rows.chosen)})
        return ReferenceStore(cache_folder(self.cache_dir) / f"{REFERENCE}-{key}", (len(items), items.num_answers))

    def reference_loader(self, role: Role) -> EvaluationLoader:
        """Each row of a set once over all ranks, with its number as `index`."""
        return self._loaders.evaluation(role, self._shard(), replace(self._loaders.collator(), keys=("index",)))

    def adopt_references(self, role: Role, logps: np.ndarray) -> None:
        """Set the log-probabilities [rows, answers] for the batches of a set."""
        self._loaders.items(role).items.references = logps

    # Rows ------------------------------------------------------------------------------------------------------------

    def _choices(self) -> Choices:
        return Choices("responses", "all", self.reasoning, self.system_prompt, self.replace_system_prompt)

    def _encoding_settings(self) -> dict[str, Any]:
        return {**super()._encoding_settings(), "is_paired": self.answers == "pair"}

    def _encoder(self, source: Source, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        layout = source.format or self.dataset_format or conversation_layout(
            first.values, f"{first.file}:{first.line}", prompts_only)
        conversations, info = self._conversations(layout, prompts_only)
        return PreferenceEncoder(conversations, "pair" if self.answers == "pair" else "single"), info

    def _texts(self, row: dict[str, Any], info: dict[str, Any]) -> list[str]:
        answers = read_answers(info["format"], row, self.roles, self.turn_fields)
        # The turns before both answers are there twice.
        return list(dict.fromkeys(text for answer in answers for text in self._spoken(answer.conversation.messages)))

    def _context(self, row: dict[str, Any], info: dict[str, Any]) -> str:
        answers = read_answers(info["format"], row, self.roles, self.turn_fields)
        return "\n".join(dict.fromkeys(self._surroundings(answer.conversation) for answer in answers))

    @property
    def sequences_per_row(self) -> int:
        """Answers of a row; 2 also where another row lends one."""
        return 1 if self.answers == "single" else 2

    def _arrange(self, rows: RowSet) -> AnswerSet:
        if self.answers == "mismatched":
            return MismatchedSet(rows, self.seed, self.max_length)
        return AnswerSet(rows, 2 if self.answers == "pair" else 1)

    def _batch_collator(self, collator: Collator) -> Callable[[list], dict[str, Any]]:
        return AnswerCollator(collator, num_answers=self.sequences_per_row, is_paired=self.answers == "pair",
                              keys=("reference_logps",) if self.keeps_references else ())
