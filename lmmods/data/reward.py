"""Reward models: pairs of answers of which one is better; predict scores answers."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from lmmods.core.errors import UserError
from lmmods.data.base import NumberedSet
from lmmods.data.batches.collate import Collator
from lmmods.data.batches.loader import EvaluationLoader
from lmmods.data.batches.sampler import evaluation_order
from lmmods.data.batches.sequences import RowColumn, SequenceCollator, SequenceSet, SingleSequences
from lmmods.data.encode.conversations import Choices, SFTEncoder
from lmmods.data.encode.encoder import Encoder, RowError
from lmmods.data.encode.preferences import PreferenceEncoder
from lmmods.data.encode.rewards import RewardEncoder
from lmmods.data.scoring import Predictions
from lmmods.data.sft import ConversationData
from lmmods.data.sources.conversation import Conversation
from lmmods.data.sources.formats import find_format, format_of, read_conversation
from lmmods.data.sources.preferences import Judged, conversation_layout, holds_pair, read_answers
from lmmods.data.sources.readers import Row
from lmmods.data.splits import Role
from lmmods.data.store.rows import RowSet
from lmmods.recipe.source import Source
from lmmods.recipe.tasks.reward import RewardDataFields

CHOSEN, REJECTED = "chosen", "rejected"


class RewardData(RewardDataFields, ConversationData):
    """Pairs of answers to a prompt, or of texts; one row of a batch is a pair, in predict one answer.

    `index` of a batch counts the pairs of its set, in predict the answers.
    """

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        return "the rows hold better and worse answers" if holds_pair(row.values) else None

    def connect(self, **settings: Any) -> None:
        """As of `DataModule`. With tokenizers of BERT's kind, [CLS] and [SEP] begin and end a row."""
        super().connect(**settings)
        if self._tokenizer.path is not None and self.tokenizer.eos_token is None and self.tokenizer.sep_token:
            self._tokenizer = replace(
                self._tokenizer, eos_token=self.tokenizer.sep_token,
                bos_token=self._tokenizer.bos_token or self.tokenizer.bos_token or self.tokenizer.cls_token)

    def encode_prompts(self, texts: list[str]) -> list[list[int]]:
        """Raise UserError: the task generates no text."""
        return super(ConversationData, self).encode_prompts(texts)

    def encode_answers(self, answers: list[str | Conversation]) -> list[np.ndarray | None]:
        """Token ids of texts, and of conversations that end in an answer, as predict scores them; None for one that
        cannot be scored: it is empty, too long, or refused by the template.

        Raises:
            UserError: One is too long under data.on_overflow: error.
        """
        found: list[np.ndarray | None] = [None] * len(answers)
        for layout, kind in (("text", str), ("messages", Conversation)):
            places = [place for place, answer in enumerate(answers) if isinstance(answer, kind)]
            if not places:
                continue
            encoder = PreferenceEncoder(self._sft_encoder(layout, prompts_only=False), "single")
            try:
                encoded = encoder.encode([answers[place] for place in places], _as_judged)
            except RowError as error:
                raise UserError(f"an answer to be scored cannot be encoded: {error.args[1]}") from error
            ids = encoded.columns["input_ids"]
            rows = np.split(ids.values, np.cumsum(ids.lengths)[:-1])
            for place, row in zip(encoded.positions, rows, strict=False):  # `split` makes one row of none
                found[places[place]] = row
        return found

    # Batches ---------------------------------------------------------------------------------------------------------

    def predict_dataloader(self) -> EvaluationLoader:
        """Answers of this rank, [B, 1, T], with `index`. Raises UserError without rows to predict."""
        items = NumberedSet(self._answers_to_predict, redrawn=False)
        order = evaluation_order(items.lengths, self.eval_batch_size)
        # `_side` and the columns are those of evaluation; there is nothing to compare a single answer with.
        collator = replace(self._loaders.collator(), num_sequences=1, columns={})
        return EvaluationLoader(items, order, collator, replace(self._shard(), num_workers=0))

    @cached_property
    def _answers_to_predict(self) -> SingleSequences:
        return SingleSequences(self._arrange(self._rows("predict")))

    def _texts(self, row: dict[str, Any], info: dict[str, Any]) -> list[str]:
        answers = read_answers(info["format"], row, self.roles, self.turn_fields)
        # The turns before both answers are there twice.
        return list(dict.fromkeys(text for answer in answers for text in self._spoken(answer.conversation.messages)))

    def _context(self, row: dict[str, Any], info: dict[str, Any]) -> str:
        answers = read_answers(info["format"], row, self.roles, self.turn_fields)
        return "\n".join(dict.fromkeys(self._surroundings(answer.conversation) for answer in answers))

    @property
    def sequences_per_row(self) -> int:
        """The answers of a pair."""
        return 2

    def _arrange(self, rows: RowSet) -> SequenceSet:
        return SequenceSet(rows, _name_of)

    def _batch_keys(self) -> tuple[str, ...]:
        return ("input_ids",)

    def _batch_collator(self, collator: Collator) -> Callable[[list], dict[str, Any]]:
        return SequenceCollator(collator, self.sequences_per_row, {"margin": RowColumn("margin", np.nan, np.float32)})

    # Scores ----------------------------------------------------------------------------------------------------------

    def answer(self, role: Role, outputs: dict[int, np.ndarray]) -> Predictions:
        """Metrics and rows of an evaluation or of predict.

        Args:
            outputs: Scores [2] of the chosen and the rejected answer by pair; of predict [1] by answer.

        Returns:
            Rows with the `score` of their answer, or with the `scores` of a pair, the chosen answer's first (None if it
            was dropped). Metrics: of all scores `reward_min`, `reward_mean`, `reward_max`; if all rows are pairs,
            `accuracy`, the share whose chosen answer has the higher score (as in TRL, equal scores are not right), and
            `margin`, by how much it is higher on average.
        """
        rows = self._rows(role)
        found: dict[int, dict[int, float]] = {}  # by row as read: scores, of the chosen answer at 1
        for number, scores in sorted(outputs.items()):
            if role == "predict":
                place = int(self._answers_to_predict.row_of[number])
                row = rows[place]
                is_chosen = _name_of(row, int(self._answers_to_predict.place_of[number])) == CHOSEN
                judged = {int(is_chosen): float(scores[0])}
            else:
                row = rows[number]
                judged = {1: float(scores[0]), 0: float(scores[1])}
            found.setdefault(row["index"], {}).update(judged)
        written, pairs = [], []
        for index, judged in found.items():
            row = rows.source_row(index)
            if holds_pair(row):
                pairs.append([judged.get(1), judged.get(0)])
                written.append({**row, "scores": pairs[-1]})
            else:
                written.append({**row, "score": judged[1]})
        num_whole = sum(None not in pair for pair in pairs)
        if 0 < num_whole < len(found):
            self._warn_once(f"{role} has no accuracy and margin: {len(found) - num_whole} of {len(found)} rows are not "
                            "pairs of answers that both have a score.")
        return Predictions(written, _metrics(found, pairs), {})

    def outputs_by_index(self, batch: dict[str, Any], outputs: Any) -> dict[int, Any]:
        """Scores by `index`; the network already returns them so."""
        return outputs

    def predictions(self, outputs: dict[int, Any]) -> Predictions:
        """Scores of all answers of predict."""
        return self.answer("predict", outputs)

    def example(self, index: int) -> dict[str, Any]:
        """The row of the answer behind `index` of a predict batch."""
        row = self._rows("predict")[int(self._answers_to_predict.row_of[index])]
        assert row is not None
        return self._rows("predict").source_row(row["index"])

    # Rows ------------------------------------------------------------------------------------------------------------

    def _choices(self) -> Choices:
        return Choices("responses", "all", self.reasoning, self.system_prompt, self.replace_system_prompt)

    def _encoding_settings(self) -> dict[str, Any]:
        return {**super()._encoding_settings(), "margin_column": self.margin_column}

    def _encoder(self, source: Source, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        found = format_of(first.values)
        layout = source.format or self.dataset_format or (found if found == "text-pair" else conversation_layout(
            first.values, f"{first.file}:{first.line}", prompts_only))
        # Rows of predict are whole, too: they end in the answer to be scored.
        conversations, info = self._conversations(layout, prompts_only=False)
        answers = PreferenceEncoder(conversations, "single" if prompts_only else "pair")
        return RewardEncoder(answers, self.margin_column, self.tokenizer.pad_token_id), info

    def _sft_encoder(self, layout: str, prompts_only: bool) -> SFTEncoder:
        encoder = super()._sft_encoder(layout, prompts_only)
        # A plain text has no prompt to lose anything, so it loses its end.
        if self.on_overflow is None and find_format(layout).template is not None:
            encoder.limits = replace(encoder.limits, on_overflow="truncate")
        return encoder


def _as_judged(answer: str | Conversation) -> list[Judged]:
    """An answer as `PreferenceEncoder` takes it. Raises RowProblem for an empty text."""
    return [Judged(read_conversation("text", {"text": answer}, {}) if isinstance(answer, str) else answer, True)]


def _name_of(row: dict[str, Any], place: int) -> str:
    """Which answer of a pair a sequence is; a single answer counts as chosen."""
    return CHOSEN if row["wanted"] and place == 0 else REJECTED


def _metrics(found: dict[int, dict[int, float]], pairs: list[list[float | None]]) -> dict[str, float]:
    """Metrics of scores by row, and of the pairs among these, (chosen, rejected)."""
    if not found:
        return {}
    scores = np.array([score for judged in found.values() for score in judged.values()])
    metrics = {"reward_min": float(scores.min()), "reward_mean": float(scores.mean()),
               "reward_max": float(scores.max())}
    # Figures of some of the rows would be taken for those of all.
    if len(pairs) < len(found) or any(None in pair for pair in pairs):
        return metrics
    differences = np.array([chosen - rejected for chosen, rejected in pairs])
    return {"accuracy": float((differences > 0).mean()), "margin": float(differences.mean()), **metrics}
