"""Multiple choice: which of several continuations or answers is right."""

import numpy as np
import torch
from torch import Tensor

from lmmods.recipe.tasks.multiple_choice import MultipleChoiceFields
from lmmods.torch_engine.nn.classifier import label_loss
from lmmods.torch_engine.nn.loss import IGNORED, LossSums
from lmmods.torch_engine.tasks.classifier_task import ClassifierModule


class MultipleChoice(MultipleChoiceFields, ClassifierModule):
    """Select one of a row's choices, which are scored separately. Rows are [B, C, T]."""

    auto_class = "AutoModelForMultipleChoice"
    row_columns = ("choices",)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> LossSums:
        return choice_loss(outputs, batch)

    def row_output(self, output: np.ndarray, row: dict[str, np.ndarray]) -> np.ndarray:
        """Return the scores of the row's choices, without padding, [C]."""
        return output[:row["choices"]]

    def scored_rows(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["labels"] != IGNORED


def choice_loss(logits: Tensor, batch: dict[str, Tensor]) -> LossSums:
    """Return the summed cross-entropy of the correct choices.

    Args:
        logits: [B, C] float32.
        batch: `labels` [B], IGNORED in rows without target; `choices` [B], number of choices of each row.
    """
    # Missing choices get the smallest finite number, as -inf would give NaN gradients.
    is_missing = torch.arange(logits.shape[1], device=logits.device) >= batch["choices"].unsqueeze(1)
    return label_loss(logits.masked_fill(is_missing, torch.finfo(torch.float32).min), batch["labels"])
