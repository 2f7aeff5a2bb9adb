"""Classification of texts: one label, several labels, or a number."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from lmmods.core.settings import require
from lmmods.recipe.tasks.base import LabelDataFields, LabelFields

ProblemType = Literal["single_label", "multi_label", "regression"]


class SequenceClassificationFields(LabelFields):
    """Predict labels, or a number, for a text or a pair of texts."""

    takes = "SequenceClassificationData"
    auto_class = "AutoModelForSequenceClassification"
    pipeline_tag = "text-classification"
    accuracy = "val/accuracy"


@dataclass(kw_only=True, eq=False, repr=False)
class SequenceClassificationDataFields(LabelDataFields):
    """Texts, or pairs of texts, with labels; one row of a batch is one of them.

    Args:
        source: Training rows: file, folder, glob, URL, hub id, a mapping {path, name, split, revision, columns, limit,
            weight}, or a list of these. Rows have one or two text columns and a label.
        text_columns: One or two columns with the texts. Default: the usual ones (sentence1 and sentence2, premise and
            hypothesis, question and sentence, text, sentence ...), otherwise the first two text columns.
        label_column: Column with the label. Default: label or labels, otherwise class, category, target or score.
        problem_type: single_label, multi_label (a row has a list of labels) or regression (a number). Default: by the
            training rows: lists are multi_label, fractional numbers regression.
    """

    kind: ClassVar[str] = "SequenceClassificationData"

    text_columns: list[str] | None = None
    label_column: str | None = None
    problem_type: ProblemType | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.text_columns is None or len(self.text_columns) in (1, 2), "data.text_columns", self.text_columns,
                "null or a list of one or two columns")
        require(self.labels is None or self.problem_type != "regression", "data.labels", self.labels,
                "null with data.problem_type regression, which learns numbers", "data.problem_type")
