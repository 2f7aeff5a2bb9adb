"""Compiled training steps: gradients are summed over micro-batches, divided once by the total weight, and applied.

With gradient accumulation, an optimiser step is `new_accumulation`, `accumulate` for each micro-batch, and `update`;
without, it is `full_step`. The calls are separate because micro-batches may differ in length. None of them waits for a
device. If the loss depends on all rows of a step, `survey` processes every micro-batch before the first one is
accumulated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jax_engine.distributed.interface import Parallel, num_visible_ranks
from jax_engine.distributed.loss import LABELS, LossSums, no_label, scored_rows
from jax_engine.distributed.tree import Tree, merge, new_accumulation, new_state

Batch = dict[str, Array]
# (parameters, rows, with dropout, count argmax hits) -> sums; a task with a survey also receives the step's statistics
Loss = Callable[..., LossSums]
# (parameters, rows) -> statistics by name: sum and weight, [2] float32
Survey = Callable[[Tree, Batch], dict[str, Array]]


@dataclass(frozen=True)
class Clipping:
    """`trainer.gradient_clip_val` (None or 0 is off) and `trainer.gradient_clip_algorithm`."""

    value: float | None = None
    algorithm: Literal["norm", "value"] = "norm"

    def __post_init__(self):
        if self.value is not None:  # JAX takes a Python int as int32, which ends at 2^31 - 1
            object.__setattr__(self, "value", float(self.value))


class Steps:
    """The compiled steps of one run; each is compiled once per batch shape.

    Batches are what `Prefetcher` yields: arrays [ranks, B, ...].

    Args:
        loss: The task's loss of rows [N, T].
        predict: (parameters, rows) -> tree of arrays [N, ...].
        metric_names: Names of the metrics that `loss` returns.
        survey: Computes the statistics that `loss` needs of all rows of a step; None if it needs none.
        statistic_names: Names of the statistics that `survey` returns.
        chunk_tokens: Tokens of a rank's micro-batch that are differentiated at once (see `split_rows`). 0: all.
    """

    def __init__(self, parallel: Parallel, loss: Loss, optimizer: optax.GradientTransformationExtraArgs,
                 clipping: Clipping = Clipping(), predict: Callable[[Tree, Batch], Any] | None = None,
                 metric_names: Sequence[str] = (), survey: Survey | None = None, statistic_names: Sequence[str] = (),
                 chunk_tokens: int = 0):
        self._parallel, self._loss, self._optimizer = parallel, loss, optimizer
        self._clipping, self._predict, self._survey_rows = clipping, predict, survey
        self.surveys, self._chunk_tokens = survey is not None, chunk_tokens
        compile = parallel.compile
        # The kind of each argument and result (see `interface`). Results reuse donated buffers, so that a device never
        # stores two states. Batches and frozen parameters are not donated.
        self._new_state = compile(lambda trainable: (new_state(trainable, optimizer.init),), ("state",), ("state",),
                                  donate=(0,))
        self._names = (metric_names, statistic_names)
        self._new_accumulation = compile(
            lambda trainable: (new_accumulation(trainable, *self._names),), ("state",), ("state",))
        self._survey = compile(self._survey_step, ("state", "state", "state", "batch"), ("state",), donate=(2,))
        self._accumulate = compile(self._accumulate_step, ("state", "state", "state", "batch"), ("state",), donate=(2,))
        self._update = compile(self._update_step, ("state", "state", "scalar"), ("state", "scalar"), donate=(0,))
        self._full = compile(self._full_step, ("state", "state", "batch", "scalar"), ("state", "scalar"), donate=(0,))
        self._eval = compile(self._eval_step, ("state", "state", "batch"), ("scalar",))
        self._rows = compile(self._predict_step, ("state", "state", "batch"), ("batch",))

    # Public interface ------------------------------------------------------------------------------------------------

    def new_state(self, trainable: Tree) -> Tree:
        """Return the initial state for these parameters, whose buffers are donated."""
        return self._new_state(trainable)[0]

    def new_accumulation(self, state: Tree) -> Tree:
        """Return an accumulation of zeros."""
        return self._new_accumulation(state["trainable"])[0]

    def survey(self, state: Tree, frozen: Tree, accumulation: Tree, batch: Batch) -> Tree:
        """Add the statistics of one micro-batch per rank to `accumulation`, which is donated."""
        return self._survey(state, frozen, accumulation, batch)[0]

    def accumulate(self, state: Tree, frozen: Tree, accumulation: Tree, batch: Batch) -> Tree:
        """Add the gradients and sums of one micro-batch per rank to `accumulation`, which is donated."""
        return self._accumulate(state, frozen, accumulation, batch)[0]

    def update(self, state: Tree, accumulation: Tree, scalars: dict[str, Array]) -> tuple[Tree, dict[str, Array]]:
        """Take an optimiser step with the accumulated gradients; return the new state and the step's metrics.

        The state is donated. Metrics are scalars over all devices: `total`, `weight`, `num_tokens`, `num_rows`, and
        `grad_norm`, the norm of the averaged gradient before clipping. The task's metrics are pairs [2]: sum, weight.

        Args:
            scalars: `optim.step_scalars` of this step, from `Parallel.put_scalars`.
        """
        return self._update(state, accumulation, scalars)

    def full_step(self, state: Tree, frozen: Tree, batch: Batch, scalars: dict[str, Array]
                  ) -> tuple[Tree, dict[str, Array]]:
        """Run `new_accumulation`, `accumulate` and `update` as one program. The state is donated."""
        return self._full(state, frozen, batch, scalars)

    def eval_step(self, trainable: Tree, frozen: Tree, batch: Batch) -> dict[str, Array]:
        """Return scalars `total`, `weight` and, if the task counts it, `correct`, over all ranks, without dropout."""
        return self._eval(trainable, frozen, batch)[0]

    def predict_step(self, trainable: Tree, frozen: Tree, batch: Batch) -> Any:
        """Return the task's predictions [ranks, B, ...], on the devices; `fetch_rows` copies them to the host."""
        return self._rows(trainable, frozen, batch)[0]

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Ranks whose rows `fetch_rows` returns."""
        return self._parallel.local_ranks

    def fetch_rows(self, rows: Any) -> Any:
        """Return the results of `predict_step` for this process's ranks, on the host."""
        return self._parallel.fetch_rows(rows)

    def lower(self, state: Tree, frozen: Tree, batch: Batch, scalars: dict[str, Array],
              accumulation: Tree | None = None) -> dict[str, jax.stages.Lowered]:
        """Lower the programs of a step for these arguments, which may be abstract (ShapeDtypeStruct).

        Args:
            accumulation: Lower `accumulate` and `update` with it; None lowers `full_step`.
        """
        if accumulation is None:
            return {"full_step": self._full.lower(state, frozen, batch, scalars)}
        return {"accumulate": self._accumulate.lower(state, frozen, accumulation, batch),
                "update": self._update.lower(state, accumulation, scalars)}

    def lower_shapes(self, trainable: Tree, frozen: Tree, batch: Batch, scalars: dict[str, Any],
                     accumulates: bool = False) -> dict[str, jax.stages.Lowered]:
        """Lower the programs of a step for the shapes and dtypes of these arguments, which are not on the devices.

        Args:
            batch: Rows of all ranks, [ranks, B, ...].
            accumulates: Lower `accumulate` and `update`, which gradient accumulation uses, instead of `full_step`.
        """
        outline = self._parallel.outline
        state = jax.eval_shape(lambda trainable: new_state(trainable, self._optimizer.init), trainable)
        state, frozen, rows, scalars = (outline(state, "state"), outline(frozen, "state"), outline(batch, "batch"),
                                        outline(scalars, "scalar"))
        sums = None
        if accumulates or self.surveys:
            sums = outline(jax.eval_shape(lambda trainable: new_accumulation(trainable, *self._names), trainable),
                           "state")
        return self.lower(state, frozen, rows, scalars, sums)

    # Functions to compile --------------------------------------------------------------------------------------------

    def _survey_step(self, state, frozen, accumulation, batch):
        # `_differentiate` sums them over ranks.
        statistics = self._survey_rows(merge(state["trainable"], frozen), _rows_of(batch))
        return ({**accumulation, "statistics": jax.tree.map(jnp.add, accumulation["statistics"], statistics)},)

    def _accumulate_step(self, state, frozen, accumulation, batch):
        gradients, sums = self._differentiate(state, frozen, batch, accumulation.get("statistics"))
        # In float32, whatever the parameters' dtype: in 16 bits, small gradients would be lost in the sum.
        added = jax.tree.map(lambda old, new: old + new.astype(old.dtype), accumulation["gradients"], gradients)
        return ({**accumulation, "gradients": added, "sums": jax.tree.map(jnp.add, accumulation["sums"], sums)},)

    def _full_step(self, state, frozen, batch, scalars):
        statistics = None
        if self.surveys:
            statistics = self._survey_rows(merge(state["trainable"], frozen), _rows_of(batch))
        gradients, sums = self._differentiate(state, frozen, batch, statistics)
        # float32 as after `_accumulate_step`, so that both take the same step.
        return self._apply(state, jax.tree.map(lambda g: g.astype(jnp.float32), gradients), sums, scalars)

    def _update_step(self, state, accumulation, scalars):
        return self._apply(state, accumulation["gradients"], accumulation["sums"], scalars)

    def _eval_step(self, trainable, frozen, batch):
        sums = self._loss(merge(trainable, frozen), _rows_of(batch), False, True)._asdict()
        return (self._parallel.sum({name: value for name, value in sums.items() if value is not None}),)

    def _predict_step(self, trainable, frozen, batch):
        predicted = self._predict(merge(trainable, frozen), _rows_of(batch))
        # [ranks * B, ...] -> [ranks, B, ...]
        return (jax.tree.map(lambda x: x.reshape(num_visible_ranks(), -1, *x.shape[1:]), predicted),)

    def _differentiate(self, state, frozen, batch, statistics):
        """Return the gradient of the summed loss, and the sums, over the micro-batches of the visible ranks."""
        rows = _rows_of(batch)
        # Statistics are complete before the first gradient, so they enter it as constants.
        constants = () if statistics is None else (self._parallel.sum(statistics),)
        differentiate = partial(self._differentiate_rows, state["trainable"], frozen, constants)
        chunks = split_rows(rows, self._chunk_tokens)
        if chunks is None:
            return differentiate(rows)

        def add(summed, chunk):
            return jax.tree.map(lambda old, new: old + new.astype(old.dtype), summed, differentiate(chunk)), None

        start = new_accumulation(state["trainable"], *self._names)
        return jax.lax.scan(add, (start["gradients"], start["sums"]), chunks)[0]

    def _differentiate_rows(self, trainable, frozen, constants, rows):
        def summed(trainable):
            sums = self._loss(merge(trainable, frozen), rows, True, False, *constants)
            return sums.total, (sums.weight, sums.metrics or {})

        # Differentiate the sum: the weight of the step's mean is only known after its last micro-batch.
        (total, (weight, metrics)), gradients = jax.value_and_grad(summed, has_aux=True)(trainable)
        has_label = scored_rows(rows)
        # Rows of preference tasks are [N, answers, T]. Padding rows have a mask of 1 at one position, so exclude them.
        num_tokens = (rows["attention_mask"].reshape(len(has_label), -1) * has_label[:, None]).sum()
        return gradients, {"total": total, "weight": weight, "num_tokens": num_tokens, "num_rows": has_label.sum(),
                           **metrics}

    def _apply(self, state, gradients, sums, scalars):
        """Average the gradients, clip them and update the parameters."""
        # The only all-reduce of a step. Dividing by the weight of all ranks afterwards gives the mean over all targets,
        # however unevenly they are spread over ranks and micro-batches.
        gradients, sums = self._parallel.sum((gradients, sums))
        # A step without any label leaves gradients of 0 instead of 0 / 0.
        gradients = jax.tree.map(lambda g: g / jnp.where(sums["weight"] > 0, sums["weight"], 1), gradients)
        norm = optax.global_norm(gradients)
        gradients = _clip(gradients, norm, self._clipping)
        trainable, slots = state["trainable"], state["optimizer"]
        updates, slots = self._optimizer.update(gradients, slots, trainable, **scalars)
        return ({"trainable": optax.apply_updates(trainable, updates), "optimizer": slots}, {**sums, "grad_norm": norm})


def fetch_step_metrics(step_metrics: dict[str, Array]) -> dict[str, float]:
    """Return the metrics of an update as Python numbers, with the mean loss as `loss`. Waits for the device.

    The task's metrics become means; a metric with weight 0 is omitted.
    """
    fetched = jax.device_get(step_metrics)
    plain = {name: value.item() for name, value in fetched.items() if value.ndim == 0}
    # Metrics of the task are pairs: sum and weight.
    metrics = {name: (value[0] / value[1]).item() for name, value in fetched.items() if value.ndim and value[1]}
    return {**plain, "loss": plain["total"] / (plain["weight"] or 1), **metrics}


def _rows_of(batch: Batch) -> Batch:
    """Return the batch as rows [ranks * B, ...], the form the network and the loss take."""
    return {name: x.reshape(-1, *x.shape[2:]) for name, x in batch.items()}


def split_rows(rows: Batch, num_tokens: int) -> Batch | None:
    """Split rows [N, ...] into chunks of whole rows, [chunks, rows per chunk, ...]; None if one chunk is enough.

    Activations take memory for one chunk only, but weights are dequantised for each chunk. Chunks have the same number
    of rows: the last one is filled with rows without labels, which do not count.

    Args:
        num_tokens: Maximum number of tokens in a chunk, padding included; a longer row is a separate chunk. 0 does not
            split.
    """
    ids = rows["input_ids"]
    num_rows = len(ids)
    # Rows of preference tasks are [N, answers, T].
    per_chunk = max(num_tokens // (ids.size // num_rows), 1) if num_tokens else num_rows
    num_chunks = -(-num_rows // per_chunk)
    if num_chunks == 1:
        return None
    per_chunk = -(-num_rows // num_chunks)
    num_missing = num_chunks * per_chunk - num_rows

    def split_column(name: str, x: Array) -> Array:
        if num_missing:
            # A row without labels does not count (see `scored_rows`), nor does one with weights of 0.
            if name in LABELS:
                spare = jnp.full_like(x[:1], no_label(x.dtype))
            else:
                spare = jnp.zeros_like(x[:1]) if jnp.issubdtype(x.dtype, jnp.floating) else x[:1]
            x = jnp.concatenate([x, *[spare] * num_missing])
        return x.reshape(num_chunks, per_chunk, *x.shape[1:])

    return {name: split_column(name, x) for name, x in rows.items()}


def _clip(gradients: Tree, norm: Array, clipping: Clipping) -> Tree:
    """Clip like torch's clip_grad_norm_ and clip_grad_value_."""
    if not clipping.value:
        return gradients
    if clipping.algorithm == "value":
        return jax.tree.map(lambda g: jnp.clip(g, -clipping.value, clipping.value), gradients)
    factor = jnp.minimum(clipping.value / (norm + 1e-6), 1.0)
    return jax.tree.map(lambda g: g * factor, gradients)
