"""Base class of tasks with a classification head and labels from a fixed set."""

from typing import Any

import torch
from torch import Tensor

from lmmods.torch_engine.nn.classifier import Classifier, class_weights, has_values, label_loss
from lmmods.torch_engine.nn.loss import IGNORED, LossSums
from lmmods.torch_engine.tasks.by_row import RowModule


class ClassifierModule(RowModule):
    """Base class of tasks on a network with a classification head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.classifier: Classifier | None = None

    def on_model_ready(self) -> None:
        self.classifier = Classifier(self.model)

    def outputs(self, batch: dict[str, Tensor]) -> Tensor:
        return self.classifier(batch)


class LabelModule(ClassifierModule):
    """Base class of tasks whose rows or tokens have labels; classes may be weighted in the loss."""

    class_weights: Any  # a field of the subclasses

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weights: torch.Tensor | None = None  # class weights, [K]

    def on_model_ready(self) -> None:
        super().on_model_ready()
        self.weights = class_weights(self.trainer.datamodule, self.class_weights, self.device)

    def target_weight(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        if labels.is_floating_point():
            return has_values(labels).sum()
        is_target = (labels != IGNORED).float()
        return (is_target if self.weights is None else is_target * self.weights[labels.clamp(min=0)]).sum()

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> LossSums:
        return label_loss(outputs, batch["labels"], self.weights)
