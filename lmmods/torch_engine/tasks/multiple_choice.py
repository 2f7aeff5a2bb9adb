"""Multiple choice: which of several continuations or answers is right."""

import numpy as np
import torch
from torch import Tensor

from lmmods.recipe.tasks.multiple_choice import MultipleChoiceFields
from lmmods.torch_engine.nn.classifier import label_loss
from lmmods.torch_engine.nn.loss import IGNORED, LossSums
from lmmods.torch_engine.tasks.classifier_task import ClassifierModule


class MultipleChoice(MultipleChoiceFields, ClassifierModule):
    """Choose among the choices of a row, each scored by itself. Rows are [B, C, T]."""

    auto_class = "AutoModelForMultipleChoice"
    row_columns = ("choices",)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> LossSums:
        return choice_loss(outputs, batch)

    def row_output(self, output: np.ndarray, row: dict[str, np.ndarray]) -> np.ndarray:
        """Return the scores of the row's own choices, [C]."""
        return output[:row["choices"]]

    def scored_rows(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["labels"] != IGNORED


def choice_loss(logits: Tensor, batch: dict[str, Tensor]) -> LossSums:
    """Return the summed cross-entropy of the right choices.

    Args:
        logits: [B, C] float32.
        batch: `labels` [B], IGNORED in rows that do not count; `choices` [B], how many of C a row has.
    """
    # Choices that a row lacks are padding: the smallest finite number, as -inf would give NaN gradients.
    missing = torch.arange(logits.shape[1], device=logits.device) >= batch["choices"].unsqueeze(1)
    return label_loss(logits.masked_fill(missing, torch.finfo(torch.float32).min), batch["labels"])
