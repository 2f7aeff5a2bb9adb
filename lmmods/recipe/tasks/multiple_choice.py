"""Multiple choice: choose which of several texts continues or answers another text."""

from dataclasses import dataclass
from typing import Any, ClassVar

from lmmods.core.errors import UserError
from lmmods.recipe.tasks.base import DataFields, TaskFields, Usual


@dataclass(kw_only=True, eq=False, repr=False)
class MultipleChoiceFields(TaskFields):
    """Train a model to score the choices of a question, the right one highest; predict chooses."""

    takes: ClassVar[str] = "MultipleChoiceData"
    auto_class: ClassVar[str] = "AutoModelForMultipleChoice"
    pipeline_tag: ClassVar[str] = "multiple-choice"
    trains_full_head: ClassVar[bool] = True
    accuracy: ClassVar[str] = "val/accuracy"
    # Encoders of any size are tuned at 2e-5 to 5e-5 (Devlin et al. 2019, section 4.4 and appendix A.3).
    usual: ClassVar[Usual] = Usual(epochs=3, rows=16, lr=2e-5, small_lr=5e-5)

    @classmethod
    def method(cls, settings: dict[str, Any]) -> tuple[list[str], str]:
        return ["multiple-choice"], "Trained to choose among several texts."


@dataclass(kw_only=True, eq=False, repr=False)
class MultipleChoiceDataFields(DataFields):
    """Questions with several choices; one row of a batch is a question.

    Args:
        source: Training questions: file, folder, glob, URL, hub id, a mapping {path, name, split, revision, columns,
            limit, weight}, or a list of these. Rows {context, question, choices, answer}, also under other usual names.
        max_length: Maximum length of a context with one choice, in tokens. The context is truncated, and the choice too
            if it leaves no space. Default: 1024, or the model's limit if that is lower.
        batch_size: Questions per micro-batch and device in training.
    """

    kind: ClassVar[str] = "MultipleChoiceData"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing:
            raise UserError("data.packing is not supported for multiple choice, where a question's choices stay "
                            "together; use data.group_by_length to save most of the padding", "data.packing")
