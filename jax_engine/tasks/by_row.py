"""Base class of tasks whose metrics are computed once, from the outputs of all rows of an evaluation."""

import math
from abc import abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_engine.distributed.devices import gather
from jax_engine.distributed.loss import LABELS, LossSums, label_loss
from jax_engine.distributed.prefetch import GlobalBatch
from jax_engine.distributed.steps import Steps
from jax_engine.distributed.tree import Tree
from jax_engine.tasks.base import Task, Weights
from lmmods.data.base import DataModule

# Columns that the network reads.
INPUTS = ("input_ids", "attention_mask", "token_type_ids", "token_seeds")


class RowTask(Task):
    """Task with an output per row, from which the data module computes metrics and predictions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # The current evaluation on this process's ranks, by row index: outputs, and pairs of loss and weight.
        self._outputs: dict[int, Any] = {}
        self._losses: dict[int, tuple[float, float]] = {}

    def scores(self, params: Tree, rows: dict[str, Array], training: bool = False) -> Array:
        """Return float32 scores [N, ...] of rows [N, T], or [N, A] of rows of several sequences [N, A, T]."""
        shape = rows["input_ids"].shape
        flat = {name: rows[name].reshape(-1, shape[-1]) for name in INPUTS if name in rows}
        scores = self.network.scores(params, flat, training)
        return scores if len(shape) == 2 else scores.reshape(shape[:-1])

    @abstractmethod
    def loss(self, scores: Array, rows: dict[str, Array]) -> LossSums:
        """Return the summed loss of these scores [N, ...]."""

    def row_output(self, scores: np.ndarray, row: dict[str, np.ndarray]) -> Any:
        """Return the data module's input from a row's scores."""
        return scores

    def has_loss(self, rows: dict[str, Array]) -> bool:
        """Return True if these rows have labels, which rows of predict may lack."""
        return any(name in rows for name in LABELS)

    def batch_loss(self, params: Tree, rows: dict[str, Array], training: bool, count_correct: bool) -> LossSums:
        return self.loss(self.scores(params, rows, training), rows)

    def predict(self, params: Tree, rows: dict[str, Array]) -> dict[str, Array]:
        """Return scores [N, ...] and, if the rows have labels, the loss and weight [N] of each row."""
        scores = self.scores(params, rows)
        if not self.has_loss(rows):
            return {"scores": scores}

        def of_row(scores: Array, row: dict[str, Array]) -> tuple[Array, Array]:
            # `loss` returns sums: apply it to one row at a time, as a batch of one.
            sums = self.loss(scores[None], jax.tree.map(lambda leaf: leaf[None], row))
            return sums.total.astype(jnp.float32), sums.weight.astype(jnp.float32)

        loss, weight = jax.vmap(of_row)(scores, rows)
        return {"scores": scores, "loss": loss, "weight": weight}

    def evaluate(self, steps: Steps, weights: Weights, batch: GlobalBatch) -> None:
        outputs = self._fetch_predictions(steps, weights, batch)
        index = batch.host["index"].ravel().tolist()
        sums = zip(outputs["loss"].ravel().tolist(), outputs["weight"].ravel().tolist(), strict=True)
        self._losses |= {row: pair for row, pair in zip(index, sums, strict=True) if row >= 0}
        self._outputs |= self._by_row(batch, outputs["scores"])

    def eval_results(self, role: str, datamodule: DataModule) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the loss and the data module's metrics over the rows of all processes, and its files."""
        losses, outputs = gather(self._losses), gather(self._outputs)
        self._losses, self._outputs = {}, {}
        # Exact sums, whatever the order of the processes' rows.
        total, weight = (math.fsum(pair[index] for pair in losses.values()) for index in (0, 1))
        answer = datamodule.answer(role, outputs)
        return {"loss": total / weight if weight else math.nan, **answer.scores}, answer.files

    def outputs(self, steps: Steps, weights: Weights, batch: GlobalBatch, datamodule: DataModule, seed: int
                ) -> dict[int, Any]:
        return self._by_row(batch, self._fetch_predictions(steps, weights, batch)["scores"])

    def _fetch_predictions(self, steps: Steps, weights: Weights, batch: GlobalBatch) -> dict[str, np.ndarray]:
        return steps.fetch_rows(steps.predict_step(weights.trainable, weights.frozen, batch.arrays))

    def _by_row(self, batch: GlobalBatch, scores: np.ndarray) -> dict[int, Any]:
        """Return `row_output` by row index, for this process's part of a global batch, without padding rows."""
        return {index: self.row_output(scores[rank, row], {name: part[rank, row] for name, part in batch.host.items()})
                for rank, indices in enumerate(batch.host["index"].tolist())
                for row, index in enumerate(indices) if index >= 0}


class LabelTask(RowTask):
    """Task with labels from a fixed set, which may have weights in the loss."""

    class_weights: Any  # a field of these tasks

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weights: np.ndarray | None = None  # class weights, [K] float32

    def build(self, precision: str, datamodule: DataModule, *args: Any, **kwargs: Any) -> tuple[Tree, Tree]:
        self.weights = datamodule.class_weights(self.class_weights)
        return super().build(precision, datamodule, *args, **kwargs)

    def loss(self, scores: Array, rows: dict[str, Array]) -> LossSums:
        return label_loss(scores, rows["labels"], self.weights)
