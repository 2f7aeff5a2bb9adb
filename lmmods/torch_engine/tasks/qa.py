"""Extractive question answering."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lmmods.recipe.tasks.qa import QAFields
from lmmods.torch_engine.nn.loss import IGNORED, LossSums
from lmmods.torch_engine.tasks.by_row import RowModule


class QA(QAFields, RowModule):
    """Find the span of a context that answers a question; the loss of a window is the mean over start and end."""

    auto_class = "AutoModelForQuestionAnswering"
    task_type = "QUESTION_ANS"

    def outputs(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the logits of start and end, [B, T, 2]."""
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}
        # PEFT's wrapper for this task drops token_type_ids; its adapters are inside the network.
        network = self.model.get_base_model() if self.trains_adapter else self.model
        output = network(**inputs)
        return torch.stack([output.start_logits, output.end_logits], -1)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> LossSums:
        return span_loss(*outputs.unbind(-1), batch)

    def target_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return self.scored_rows(batch).sum()

    def row_output(self, output: np.ndarray, row: dict[str, np.ndarray]) -> Any:
        """Return start and end logits [T] of a window."""
        return output[:, 0], output[:, 1]

    def scored_rows(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["start_positions"] != IGNORED


def span_loss(start: Tensor, end: Tensor, batch: dict[str, Tensor]) -> LossSums:
    """Return the sum over windows of the mean of start and end cross-entropy over the window's own tokens.

    Padding is masked; transformers includes it in the softmax, so that the loss depends on the batch's other rows.

    Args:
        start: [B, T] logits.
        end: [B, T] logits.
        batch: `start_positions`, `end_positions` [B], IGNORED for windows without target; `attention_mask` [B, T].
    """
    is_padding = batch["attention_mask"] == 0
    # A finite minimum, as -inf in a row of padding only would give NaN.
    min_logit = torch.finfo(torch.float32).min
    losses = [F.cross_entropy(logits.float().masked_fill(is_padding, min_logit), batch[name], ignore_index=IGNORED,
                              reduction="sum")
              for logits, name in ((start, "start_positions"), (end, "end_positions"))]
    weight = (batch["start_positions"] != IGNORED).sum().float()
    # Both sums are over the same windows, so their mean divided by the weight is the mean of the two losses.
    return LossSums(torch.stack(losses).mean(), weight)
