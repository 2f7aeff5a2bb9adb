"""Extractive question answering on JAX."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_engine.distributed.devices import gather
from jax_engine.distributed.loss import IGNORED, LossSums, span_loss
from jax_engine.distributed.prefetch import GlobalBatch
from jax_engine.distributed.steps import Steps
from jax_engine.distributed.tree import Tree
from jax_engine.tasks.base import Task, Weights
from lmmods.recipe.tasks.qa import QAFields


class QA(QAFields, Task):
    """Find the span of a context that answers a question; a window's loss is the mean of start and end losses."""

    head = "qa"
    auto_class = "AutoModelForQuestionAnswering"

    def __post_init__(self) -> None:
        super().__post_init__()
        # Results of the current evaluation for this process's ranks, by window: start and end logits; losses.
        self._logits: dict[int, tuple] = {}
        self._losses: dict[int, float] = {}

    def batch_loss(self, params: Tree, rows: dict[str, Array], training: bool, count_correct: bool) -> LossSums:
        return span_loss(self._spans(params, rows, training), rows)

    def _spans(self, params: Tree, rows: dict[str, Array], training: bool = False) -> Array:
        """Return start and end logits [N, T, 2]."""
        return self.network.logits(params, self.network.hidden(params, rows, training))

    def predict(self, params: Tree, rows: dict[str, Array]) -> dict[str, Array]:
        """Return logits [N, T, 2] and, if the rows have answer positions, the loss [N] of each window."""
        logits = self._spans(params, rows)
        if "start_positions" not in rows:
            return {"logits": logits}
        # `span_loss` returns sums: apply it to one window at a time, as a batch of one.
        scored = {name: rows[name] for name in ("start_positions", "end_positions", "attention_mask")}
        losses = jax.vmap(lambda x, row: span_loss(x[None], jax.tree.map(lambda leaf: leaf[None], row)).total)(
            logits, scored)
        return {"logits": logits, "loss": losses.astype(jnp.float32)}

    def evaluate(self, steps: Steps, weights: Weights, batch: GlobalBatch) -> None:
        found = steps.fetch_rows(steps.predict_step(weights.trainable, weights.frozen, batch.arrays))
        # Neither padding rows nor windows without labels.
        scored = (batch.host["index"] >= 0) & (batch.host["start_positions"] != IGNORED)
        self._losses |= dict(zip(batch.host["index"][scored].tolist(), found["loss"][scored].tolist()))
        self._logits |= _by_window(batch, found["logits"])

    def eval_results(self, role: str, datamodule: Any) -> tuple[dict[str, float], dict[str, Any]]:
        """Return loss, exact match and F1 over all processes, and the answers' files."""
        losses, logits = gather(self._losses), gather(self._logits)
        self._losses, self._logits = {}, {}
        # An exact sum, whatever the order in which processes add their windows.
        loss = math.fsum(losses.values()) / len(losses) if losses else math.nan
        found = datamodule.answer(role, logits)
        return {"loss": loss, **found.scores}, found.files

    def outputs(self, steps: Steps, weights: Weights, batch: GlobalBatch, datamodule: Any, seed: int) -> dict[int, Any]:
        found = steps.fetch_rows(steps.predict_step(weights.trainable, weights.frozen, batch.arrays))
        return _by_window(batch, found["logits"])


def _by_window(batch: GlobalBatch, logits: Any) -> dict[int, tuple]:
    """Return start and end logits [T] by window index, for this process's part of a global batch, without padding."""
    found = {}
    for rank, indices in enumerate(batch.host["index"].tolist()):
        for row, index in enumerate(indices):
            if index >= 0:
                end = np.flatnonzero(batch.host["attention_mask"][rank, row])[-1] + 1
                found[index] = (logits[rank, row, :end, 0], logits[rank, row, :end, 1])
    return found
