"""Reward models: pairs of answers of which one is better; predict scores answers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lmmods.core.errors import UserError
from lmmods.data.batch.collate import Collator
from lmmods.data.batch.numbered import NumberedSet
from lmmods.data.batch.sequences import RowColumn, SequenceCollator, SequenceSet, SingleSequences
from lmmods.data.codec import Codec, NumbersCodec, Predictions
from lmmods.data.conversations import ConversationData, ConversationSettings
from lmmods.data.encode.conversations import SFTEncoder
from lmmods.data.encode.encoder import Encoder, RowError
from lmmods.data.encode.preferences import PreferenceEncoder
from lmmods.data.encode.rewards import RewardEncoder
from lmmods.data.preference import AnswersCodec
from lmmods.data.read.conversation import Conversation
from lmmods.data.read.formats import find_format, format_of, read_conversation
from lmmods.data.read.preferences import Judged, conversation_layout, holds_pair
from lmmods.data.read.readers import Row
from lmmods.data.read.source_reader import SourceReader
from lmmods.data.store.rows import RowSet
from lmmods.recipe.tasks.reward import RewardDataFields

CHOSEN, REJECTED = "chosen", "rejected"


class RewardSettings(RewardDataFields, ConversationSettings):
    """See `Settings`."""


class RewardCodec(NumbersCodec, AnswersCodec):
    """Pairs of answers to a prompt, or of texts; one row of a batch is a pair, in predict one answer.

    `index` of a batch counts the pairs of its set, in predict the answers.
    """

    settings: RewardSettings

    # From records to rows

    def make_encoder(self, reader: SourceReader, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        usual = format_of(first.values)
        layout = reader.source.format or self.settings.dataset_format or (
            usual if usual == "text-pair" else conversation_layout(
                first.values, f"{first.file}:{first.line}", prompts_only))
        # Rows of predict are also whole: they end in the answer to score.
        conversations, info = self.encoder_and_facts(layout, prompts_only=False)
        answers = PreferenceEncoder(conversations, "single" if prompts_only else "pair")
        return RewardEncoder(answers, self.settings.margin_column, self.tokenizer.pad_token_id), info

    def conversation_encoder(self, layout: str, prompts_only: bool) -> SFTEncoder:
        encoder = super().conversation_encoder(layout, prompts_only)
        # A plain text has no prompt to lose anything, so it loses its end.
        if self.settings.on_overflow is None and find_format(layout).template is not None:
            encoder.limits = replace(encoder.limits, on_overflow="truncate")
        return encoder

    def encoding_settings(self) -> dict[str, Any]:
        return {**super().encoding_settings(), "margin_column": self.settings.margin_column}

    def encode_answers(self, answers: list[str | Conversation]) -> list[np.ndarray | None]:
        """Return the token ids of texts, and of conversations that end in an answer, as predict scores them; None for
        one that cannot be scored: it is empty, too long, or rejected by the template.

        Raises:
            UserError: One is too long under data.on_overflow: error.
        """
        ids_of: list[np.ndarray | None] = [None] * len(answers)
        for layout, answer_type in (("text", str), ("messages", Conversation)):
            indices = [index for index, answer in enumerate(answers) if isinstance(answer, answer_type)]
            if not indices:
                continue
            encoder = PreferenceEncoder(self.conversation_encoder(layout, prompts_only=False), "single")
            try:
                encoded = encoder.encode([answers[index] for index in indices],
                                         partial(_to_judged, encoder.conversations))
            except RowError as error:
                raise UserError(f"an answer cannot be encoded for scoring: {error.args[1]}") from error
            ids = encoded.columns["input_ids"]
            rows = np.split(ids.values, np.cumsum(ids.lengths)[:-1])
            for index, row in zip(encoded.positions, rows, strict=False):  # `split` makes one row of none
                ids_of[indices[index]] = row
        return ids_of

    # From rows to batches

    def make_items(self, rows: RowSet, by_source: bool) -> SequenceSet:
        return SequenceSet(rows, _name_of)

    def sequences_per_row(self, sets: Sequence[RowSet]) -> int:
        """Return 2, the answers of a pair."""
        return 2

    def batch_columns(self, sets: Sequence[RowSet]) -> tuple[str, ...]:
        return ("input_ids",)

    def make_collator(self, collator: Collator, sets: Sequence[RowSet], added: Sequence[str] = ()) -> SequenceCollator:
        return SequenceCollator(super().make_collator(collator, sets, added), self.sequences_per_row(sets),
                                {"margin": RowColumn("margin", np.nan, np.float32)})

    def make_prompts(self, rows: RowSet) -> NumberedSet:
        return NumberedSet(self._single(rows), redrawn=False)

    def _single(self, rows: RowSet) -> SingleSequences:
        return SingleSequences(self.make_items(rows, by_source=False))

    def make_prompt_collator(self, collator: Collator, sets: Sequence[RowSet]) -> SequenceCollator:
        # There is nothing to compare a single answer with.
        return replace(self.make_collator(collator, sets), num_sequences=1, columns={})

    # From outputs to predictions

    def evaluate(self, role: str, rows: RowSet, outputs: dict[int, np.ndarray]) -> Predictions:
        """Return metrics and records of an evaluation or of predict.

        Args:
            outputs: Scores [2] of the chosen and the rejected answer by pair; of predict [1] by answer.

        Returns:
            Records with the `score` of their answer, or with the `scores` of a pair, the chosen answer's first (None if
            it was dropped). Metrics: of all scores `reward_min`, `reward_mean`, `reward_max`; if all records are pairs,
            `accuracy`, the fraction whose chosen answer has the higher score (as in TRL, equal scores are not right),
            and `margin`, by how much it is higher on average.
        """
        single = self._single(rows) if role == "predict" else None
        scores_of: dict[int, dict[int, float]] = {}  # by record: scores, of the chosen answer at 1
        for index, scores in sorted(outputs.items()):
            if single is not None:
                row = rows[int(single.row_of[index])]
                is_chosen = _name_of(row, int(single.place_of[index])) == CHOSEN
                row_scores = {int(is_chosen): float(scores[0])}
            else:
                row = rows[index]
                row_scores = {1: float(scores[0]), 0: float(scores[1])}
            scores_of.setdefault(row["index"], {}).update(row_scores)
        records, pairs = [], []
        for index, row_scores in scores_of.items():
            record = rows.source_row(index)
            if holds_pair(record):
                pairs.append([row_scores.get(1), row_scores.get(0)])
                records.append({**record, "scores": pairs[-1]})
            else:
                records.append({**record, "score": row_scores[1]})
        num_whole = sum(None not in pair for pair in pairs)
        warnings = (f"{role} has no accuracy and margin: {len(scores_of) - num_whole} of {len(scores_of)} rows are not "
                    "pairs of answers that both have a score.",) if 0 < num_whole < len(scores_of) else ()
        return Predictions(records, _metrics(scores_of, pairs), {}, warnings)

    def example(self, rows: RowSet, index: int) -> dict[str, Any]:
        """Return the record of the answer behind `index` of a predict batch."""
        row = rows[int(self._single(rows).row_of[index])]
        assert row is not None
        return rows.source_row(row["index"])

    # As the task generates no text
    encode_prompts = Codec.encode_prompts


class RewardData(RewardDataFields, ConversationData):
    """Pairs of answers to a prompt, or of texts."""

    codec_class = RewardCodec

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        return "the rows have better and worse answers" if holds_pair(row.values) else None

    def connect(self, **settings: Any) -> None:
        """See `DataModule`. With tokenizers of BERT's kind, [CLS] and [SEP] start and end a row."""
        super().connect(**settings)
        if self._tokenizer.path is not None and self.tokenizer.eos_token is None and self.tokenizer.sep_token:
            self._tokenizer = replace(
                self._tokenizer, eos_token=self.tokenizer.sep_token,
                bos_token=self._tokenizer.bos_token or self.tokenizer.bos_token or self.tokenizer.cls_token)


def _to_judged(encoder: SFTEncoder, answer: str | Conversation) -> list[Judged]:
    """Return an answer as `PreferenceEncoder` takes it. Raises RowProblem for an empty or invalid text."""
    conversation = read_conversation("text", {"text": answer}, {}) if isinstance(answer, str) else answer
    return [Judged(encoder.normalise(conversation), True)]


def _name_of(row: dict[str, Any], index: int) -> str:
    """Return which answer of a pair a sequence is; a single answer counts as chosen."""
    return CHOSEN if row["wanted"] and index == 0 else REJECTED


def _metrics(scores_of: dict[int, dict[int, float]], pairs: list[list[float | None]]) -> dict[str, float]:
    """Return the metrics of scores by row, and of the pairs among these, (chosen, rejected)."""
    if not scores_of:
        return {}
    scores = np.array([score for row_scores in scores_of.values() for score in row_scores.values()])
    metrics = {"reward_min": float(scores.min()), "reward_mean": float(scores.mean()),
               "reward_max": float(scores.max())}
    # Metrics over some of the rows would be mistaken for metrics over all.
    differences = np.array([chosen - rejected for chosen, rejected in pairs
                            if chosen is not None and rejected is not None])
    if len(differences) < len(scores_of):
        return metrics
    return {"accuracy": float((differences > 0).mean()), "margin": float(differences.mean()), **metrics}
