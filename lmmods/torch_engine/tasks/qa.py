"""Extractive question answering."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lmmods.recipe.tasks.qa import QAFields
from lmmods.torch_engine.nn.gradient_accumulation import gather
from lmmods.torch_engine.nn.loss import IGNORED, LossSums
from lmmods.torch_engine.tasks.base import TaskModule


class QA(QAFields, TaskModule):
    """Find the span of a context that answers a question; the loss of a window is the mean over start and end."""

    auto_class = "AutoModelForQuestionAnswering"
    task_type = "QUESTION_ANS"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._logits: dict[int, tuple] = {}  # start and end logits of the current evaluation, by window

    def batch_loss(self, batch: dict[str, Tensor], count_correct: bool = False) -> LossSums:
        return span_loss(*self._forward(batch), batch)

    def _forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}
        # PEFT's wrapper for this task drops token_type_ids; the adapters are inside the network itself.
        network = self.model.get_base_model() if self.trains_adapter else self.model
        output = network(**inputs)
        return output.start_logits, output.end_logits

    def scored_rows(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["start_positions"] != IGNORED

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        start, end = self(self._forward, batch)
        sums = span_loss(start, end, batch)
        self.eval_metrics["loss"].update(sums.total, sums.weight)
        self._logits |= self._by_window(batch, start, end)

    test_step = validation_step

    def eval_results(self, role: str) -> tuple[dict[str, float], dict[str, Any]]:
        """Return loss, exact match and F1 over all ranks, and the files of answers."""
        loss = self.eval_metrics["loss"]
        results = {"loss": loss.compute().item()}
        loss.reset()
        logits, self._logits = gather(self._logits, self.trainer.world_size), {}
        found = self.trainer.datamodule.answer(role, logits)
        return {**results, **found.scores}, found.files

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[int, tuple]:
        """Return start and end logits [T] of each window of the batch, by its index."""
        return self._by_window(batch, *self(self._forward, batch))

    @staticmethod
    def _by_window(batch: dict[str, Tensor], start: Tensor, end: Tensor) -> dict[int, tuple]:
        start, end = start.float().cpu().numpy(), end.float().cpu().numpy()
        return {index: (start[row], end[row]) for row, index in enumerate(batch["index"].tolist()) if index >= 0}


def span_loss(start: Tensor, end: Tensor, batch: dict[str, Tensor]) -> LossSums:
    """Return the sum over windows of the mean of start and end cross-entropy over the window's own tokens.

    Padding is masked; in transformers it takes part in the softmax, so that the loss depends on the batch's other rows.

    Args:
        start: [B, T] logits.
        end: [B, T] logits.
        batch: `start_positions`, `end_positions` [B], IGNORED for windows that are not scored; `attention_mask` [B, T].
    """
    padding = batch["attention_mask"] == 0
    # A finite minimum, as -inf in a row of padding only would give NaN.
    lowest = torch.finfo(torch.float32).min
    losses = [F.cross_entropy(logits.float().masked_fill(padding, lowest), batch[name], ignore_index=IGNORED,
                              reduction="sum")
              for logits, name in ((start, "start_positions"), (end, "end_positions"))]
    weight = (batch["start_positions"] != IGNORED).sum().float()
    # Both sums are over the same windows, so their mean divided by the weight is the mean of the two losses.
    return LossSums(torch.stack(losses).mean(), weight)
