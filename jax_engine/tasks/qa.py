"""Extractive question answering on JAX."""

import numpy as np
from jax import Array

from jax_engine.distributed.loss import LossSums, span_loss
from jax_engine.tasks.by_row import RowTask
from lmmods.recipe.tasks.qa import QAFields


class QA(QAFields, RowTask):
    """Find the span of a context that answers a question. A window's loss is the mean of start and end loss."""

    head = "qa"
    auto_class = "AutoModelForQuestionAnswering"

    def loss(self, scores: Array, rows: dict[str, Array]) -> LossSums:
        return span_loss(scores, rows)

    def row_output(self, scores: np.ndarray, row: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return start and end logits [T] of a window, without the padding after it."""
        end = np.flatnonzero(row["attention_mask"])[-1] + 1
        return scores[:end, 0], scores[:end, 1]
