"""Extractive question answering."""

from dataclasses import dataclass
from typing import ClassVar

from lmmods.core.errors import UserError
from lmmods.recipe.tasks.base import DataFields, RowsAre, TaskFields, Usual, check_range


class QAFields(TaskFields):
    """Find the span of a context that answers a question."""

    takes = "QAData"
    auto_class = "AutoModelForQuestionAnswering"
    pipeline_tag = "question-answering"
    trains_full_head = True
    usual = Usual(epochs=2, lr=3e-5, small_lr=3e-5)
    own_files = ("predictions.json", "nbest_predictions.json", "null_odds.json")


@dataclass(kw_only=True, eq=False, repr=False)
class QADataFields(DataFields):
    """Questions about contexts.

    Args:
        source: Training questions: file, folder, glob, URL, hub id, a mapping {path, name, split, revision, columns,
            limit, weight}, or a list of these. SQuAD v1 or v2 JSON, or rows {question, context, answers}.
        stride: Number of tokens that neighbouring windows of a context share.
        question_max_length: Maximum question length in tokens; longer questions are truncated and counted.
        version_2_with_negative: Allow questions without an answer (SQuAD v2.0): "" is then an answer, scored as in
            v2.0.
        n_best_size: Number of candidates per window, and per question in nbest_predictions.json.
        max_answer_length: Maximum answer length in tokens.
        null_score_diff_threshold: With version_2_with_negative, give no answer if its score exceeds the best answer's
            by more than this.
    """

    kind: ClassVar[str] = "QAData"
    rows_are: ClassVar[RowsAre] = "questions"
    may_change: ClassVar[tuple[str, ...]] = (
        "n_best_size", "max_answer_length", "null_score_diff_threshold", "version_2_with_negative")

    stride: int = 128
    question_max_length: int = 64
    version_2_with_negative: bool = False
    n_best_size: int = 20
    max_answer_length: int = 30
    null_score_diff_threshold: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing:
            raise UserError("data.packing is not supported for question answering, where each window is a row; remove "
                            "it", "data.packing")
        check_range(stride=(self.stride, 0), question_max_length=(self.question_max_length, 1),
                    n_best_size=(self.n_best_size, 1), max_answer_length=(self.max_answer_length, 1))
