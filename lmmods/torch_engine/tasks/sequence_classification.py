"""Classification of texts or pairs of texts: one label, several, or a value."""

import torch
from torch import Tensor

from lmmods.recipe.tasks.sequence_classification import SequenceClassificationFields
from lmmods.torch_engine.nn.classifier import has_values
from lmmods.torch_engine.nn.loss import IGNORED
from lmmods.torch_engine.tasks.classifier_task import LabelModule


class SequenceClassification(SequenceClassificationFields, LabelModule):
    """Classify texts; the labels' type and shape choose the loss."""

    auto_class = "AutoModelForSequenceClassification"
    task_type = "SEQ_CLS"

    def scored_rows(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        return has_values(labels) if torch.is_floating_point(labels) else labels != IGNORED
