"""Base class of tasks with a classification head and labels from a fixed set."""

from typing import Any

import torch
from torch import Tensor

from lmmods.torch_engine.nn.classifier import Classifier, class_weights, label_loss, scored_values
from lmmods.torch_engine.nn.loss import IGNORED, LossSums
from lmmods.torch_engine.tasks.by_row import RowModule


class ClassifierModule(RowModule):
    """A task on a network with a classification head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.classifier: Classifier | None = None

    def on_model_ready(self) -> None:
        self.classifier = Classifier(self.model)

    def outputs(self, batch: dict[str, Tensor]) -> Tensor:
        return self.classifier(batch)


class LabelModule(ClassifierModule):
    """A task whose rows or tokens have labels; classes may have weights in the loss."""

    class_weights: Any  # a field of these tasks

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weights: torch.Tensor | None = None  # of the classes, [K]

    def on_model_ready(self) -> None:
        super().on_model_ready()
        self.weights = class_weights(self.trainer.datamodule, self.class_weights, self.device)

    def target_weight(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        if labels.is_floating_point():
            return scored_values(labels).sum()
        scored = (labels != IGNORED).float()
        return (scored if self.weights is None else scored * self.weights[labels.clamp(min=0)]).sum()

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> LossSums:
        return label_loss(outputs, batch["labels"], self.weights)
