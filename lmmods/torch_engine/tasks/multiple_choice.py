"""Multiple choice: the best of several continuations or answers."""

import numpy as np
from torch import Tensor

from lmmods.recipe.tasks.multiple_choice import MultipleChoiceFields
from lmmods.torch_engine.nn.classifier import choice_loss, existing
from lmmods.torch_engine.nn.loss import IGNORED, LossSums
from lmmods.torch_engine.tasks.classifier_task import ClassifierModule


class MultipleChoice(MultipleChoiceFields, ClassifierModule):
    """Choose among the choices of a row; rows may have different numbers of them."""

    auto_class = "AutoModelForMultipleChoice"

    def outputs(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the logits of the choices, [B, C]."""
        return existing(super().outputs(batch), batch)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> LossSums:
        return choice_loss(outputs, batch)

    def row_output(self, output: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return the logits of the row's own choices."""
        return output[output > np.finfo(np.float32).min]

    def scored_rows(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["labels"] != IGNORED
