"""Base class of the causal LM tasks on JAX."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_engine.distributed.distillation import TeacherTopK
from jax_engine.distributed.loss import LossSums, shift_labels, shift_weights
from jax_engine.distributed.prefetch import GlobalBatch
from jax_engine.distributed.steps import Steps
from jax_engine.distributed.tree import Tree
from jax_engine.models.experts import Load
from jax_engine.models.generate import check_supported, generate
from jax_engine.tasks.base import Task, Weights
from jax_engine.tasks.running import Run
from jax_engine.tasks.teacher import TEACHER_IDS, TEACHER_LOGPS, cached_teacher
from lmmods.core.errors import UserError
from lmmods.core.experts import METRICS, check_balance
from lmmods.core.hardware import Target
from lmmods.core.labels import IGNORED, PER_ROW
from lmmods.data.base import DataModule
from lmmods.data.batch.collate import DRAWN, PLACES
from lmmods.data.teacher import NO_PLACES, TeacherTopKTable, num_columns
from lmmods.recipe.tasks.base import CausalFields


class CausalTask(CausalFields, Task):
    """Abstract causal LM task: next-token loss on labelled tokens, and generation in predict."""

    head = "causal"
    auto_class = "AutoModelForCausalLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_supported(self.generation)
        self._top_k: TeacherTopKTable | None = None  # from a teacher with `top_k`
        self._num_columns = 0
        self.choice_ids = np.zeros(0, np.int64)  # tokens whose logits `predict` returns

    def build(self, precision: str, datamodule: DataModule, seed: int, abstract: bool = False, on: Target | None = None
              ) -> tuple[Tree, Tree]:
        built = super().build(precision, datamodule, seed, abstract, on)
        check_balance(self.network.config, self.balance_loss, self._routes)
        if self.precomputes_teacher:
            self._num_columns = num_columns(self.teacher, datamodule.tokenizer, self.network.arch.vocab_size)
        parts = () if self.divergence is None else self.divergence.metric_names
        self.metric_names = (*parts, *(METRICS if self._routes else ()))
        return built

    # A teacher whose most likely tokens are computed before training --------------------------------------------------

    def link(self, datamodule: DataModule) -> None:
        if self.precomputes_teacher:
            datamodule.add_column(PLACES)

    def begin(self, run: Run) -> None:
        if self.precomputes_teacher:
            self._top_k = cached_teacher(run, self._num_columns)

    def complete(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if PLACES not in batch:
            return batch
        positions = batch[PLACES]
        if self._top_k is not None:
            ids, logps = self._top_k(positions)
        else:  # rows that are not trained on
            ids, logps = (np.zeros((*positions.shape, self.teacher.top_k + extra), dtype)
                          for extra, dtype in ((0, np.int32), (1, np.float32)))
        return {**batch, TEACHER_IDS: ids, TEACHER_LOGPS: logps}

    def _top_k_at(self, rows: dict[str, Array]) -> TeacherTopK:
        """Return the teacher's top k for the token that each position predicts, from columns aligned with tokens."""
        if TEACHER_IDS not in rows:
            raise UserError(NO_PLACES)
        return TeacherTopK(*(jnp.pad(rows[name][:, 1:], ((0, 0), (0, 1), (0, 0)))
                             for name in (TEACHER_IDS, TEACHER_LOGPS)), self._num_columns)

    @property
    def _routes(self) -> bool:
        return self.network.arch.experts is not None

    def batch_loss(self, params: Tree, rows: dict[str, Array], training: bool, count_correct: bool) -> LossSums:
        load = None
        # The balance loss and its metrics are for training only.
        if training and self._routes:
            hidden, load = self.network.hidden_and_load(params, rows, training)
        else:
            hidden = self.network.hidden(params, rows, training)
        targets, weights = shift_labels(rows["labels"]), shift_weights(rows.get("loss_weights"))
        teacher = None
        if self.teacher_network is not None:
            teacher = self.teacher_network.states(params, rows)
            if DRAWN in rows:  # [N] -> [N, T]
                teacher = teacher._replace(is_sampled=jnp.broadcast_to(rows[DRAWN][:, None], targets.shape))
        elif self.precomputes_teacher:
            teacher = self._top_k_at(rows)
        sums = self.build_token_loss(teacher, training)(
            hidden, targets, partial(self.network.logits, params), self.network.arch.vocab_size, count_correct,
            not self.fast_kernels, weights, self.built_for)
        if load is None:
            return sums
        counted = (targets != IGNORED) * (1.0 if weights is None else weights)
        return add_load(sums, load, counted.sum(1), self.balance_loss)

    def predict(self, params: Tree, rows: dict[str, Array]) -> Array:
        """Return float32 logits [N, K] of `choice_ids` after the last token of each right-padded row."""
        # [N, T, D] -> [N, D]: the head is applied to one position per row only.
        last = rows["attention_mask"].sum(axis=1) - 1
        hidden = jnp.take_along_axis(self.network.hidden(params, rows), last[:, None, None], axis=1)[:, 0]
        return self.network.logits(params, hidden)[:, self.choice_ids]

    def choice_logits(self, steps: Steps, weights: Weights, batches: Iterable[GlobalBatch]) -> dict[int, np.ndarray]:
        """Return logits [K] of `choice_ids` by row index, for this process's rows. Dispatches all batches first."""
        pending = [(batch.host["index"], steps.predict_step(weights.trainable, weights.frozen, batch.arrays))
                   for batch in batches]
        fetched = ((indices.ravel(), steps.fetch_rows(rows)) for indices, rows in pending)
        # Padding rows have index -1.
        return {index: row for indices, rows in fetched
                for index, row in zip(indices.tolist(), rows.reshape(len(indices), -1)) if index >= 0}

    def outputs(self, steps: Steps, weights: Weights, batch: GlobalBatch, datamodule: DataModule, seed: int
                ) -> dict[int, Any]:
        outputs = {}
        for rank in range(len(batch.host["index"])):
            local = {name: part[rank] for name, part in batch.host.items()}
            rows = np.flatnonzero(local["index"] >= 0)
            # Without padding: `generate` pads to its own widths.
            prompts = [local["input_ids"][row][local["attention_mask"][row] > 0].tolist() for row in rows]
            if not prompts:
                continue
            further = {name: column[rows] for name, column in local.items() if name.startswith(PER_ROW)}
            answers = generate(self.network, weights.replica, prompts, self.generation, datamodule.codec.stop_token_ids,
                               datamodule.tokenizer.pad_token_id, seed, local["index"][rows].tolist(), self.num_answers,
                               further)
            inputs = {name: local[name][rows] for name in ("input_ids", "index")}
            outputs |= datamodule.outputs_by_index(inputs, answers)
        return outputs


# ---------------------------------------------------------------------------------------------------------------------
# Mixture of experts: the balance loss and the load metrics in training.

def add_load(sums: LossSums, load: Load, row_weights: Array, coefficient: float) -> LossSums:
    """Add the balance loss of each row (DeepSeek-V3's sequence-wise form) and `core.experts.METRICS` to the sums.

    For a row and layer the loss is E sum_e f_e P_e, with f_e the number of times a token chooses expert e, averaged
    over tokens, and P_e its mean probability. The mean over layers is weighted by the row's target tokens.

    Args:
        load: Expert load of each layer, [L, B, ...].
        row_weights: [B], each row's part of `sums.weight`.
        coefficient: Coefficient of the balance loss.
    """
    num_experts = load.counts.shape[-1]
    num_tokens = jnp.maximum(load.num_tokens, 1)[..., None]
    chosen = load.counts / num_tokens
    # [L, B, E] -> [L, B] -> [B]
    balance = num_experts * (chosen * load.probabilities / num_tokens).sum(-1).mean(0)
    # Load of each expert relative to an even load, [L, B, E]; the bound only avoids 0 / 0 in padding rows.
    even = load.counts / jnp.maximum(load.counts.mean(-1, keepdims=True), 1 / num_experts)
    # Largest and smallest load, averaged over layers.
    by_row = (balance, even.max(-1).mean(0), even.min(-1).mean(0))
    metrics = {name: jnp.stack([(row_weights * value).sum(), row_weights.sum()])
               for name, value in zip(METRICS, by_row, strict=True)}
    return sums._replace(total=sums.total + coefficient * (row_weights * balance).sum(),
                         metrics=(sums.metrics or {}) | metrics)
