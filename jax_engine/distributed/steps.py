"""The compiled steps of a run: gradients are summed over micro-batches, divided once by the weight, and applied.

With gradient accumulation a step is `new_accumulation`, `accumulate` for each micro-batch, and `update`; without, it is
`full_step`. The calls are separate because micro-batches may differ in length. None of them waits for a device. Where a
loss depends on all rows of a step, each micro-batch goes through `survey` before the first of them is accumulated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jax_engine.distributed.interface import Parallel, num_visible_ranks
from jax_engine.distributed.loss import LossSums, scored_rows
from jax_engine.distributed.tree import Tree, merge, new_accumulation, new_state

Batch = dict[str, Array]
# (parameters, rows, with dropout, count argmax hits) -> sums; after a survey also gets the statistics of the step
Loss = Callable[..., LossSums]
# (parameters, rows) -> statistics by name: sum and weight, [2] float32
Survey = Callable[[Tree, Batch], dict[str, Array]]


@dataclass(frozen=True)
class Clipping:
    """`trainer.gradient_clip_val` (None or 0 is off) and `trainer.gradient_clip_algorithm`."""

    value: float | None = None
    algorithm: Literal["norm", "value"] = "norm"

    def __post_init__(self):
        if self.value is not None:  # programs take whole numbers up to 2^31 - 1
            object.__setattr__(self, "value", float(self.value))


class Steps:
    """The steps of one run; each is compiled once for each shape of batch.

    Batches are what `Prefetcher` yields: arrays [ranks, B, ...].

    Args:
        loss: The task's loss of rows [N, T].
        predict: (parameters, rows) -> tree of arrays [N, ...].
        metric_names: Of the metrics that `loss` gives.
        survey: What `loss` must know of all rows of a step; None: nothing.
        statistic_names: Of what it gives.
    """

    def __init__(self, parallel: Parallel, loss: Loss, optimizer: optax.GradientTransformationExtraArgs,
                 clipping: Clipping = Clipping(), predict: Callable[[Tree, Batch], Any] | None = None,
                 metric_names: Sequence[str] = (), survey: Survey | None = None, statistic_names: Sequence[str] = ()):
        self._parallel, self._loss, self._optimizer = parallel, loss, optimizer
        self._clipping, self._predict, self._survey_rows = clipping, predict, survey
        self.surveys = survey is not None
        compile = parallel.compile
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

    # What the trainer calls ------------------------------------------------------------------------------------------

    def new_state(self, trainable: Tree) -> Tree:
        """State with these initial parameters, which it consumes."""
        return self._new_state(trainable)[0]

    def new_accumulation(self, state: Tree) -> Tree:
        """Sums of no micro-batch."""
        return self._new_accumulation(state["trainable"])[0]

    def survey(self, state: Tree, frozen: Tree, accumulation: Tree, batch: Batch) -> Tree:
        """The sums with the statistics of one more micro-batch of each rank added. Consumes the old ones."""
        return self._survey(state, frozen, accumulation, batch)[0]

    def accumulate(self, state: Tree, frozen: Tree, accumulation: Tree, batch: Batch) -> Tree:
        """The sums with one more micro-batch of each rank added. Consumes the old ones."""
        return self._accumulate(state, frozen, accumulation, batch)[0]

    def update(self, state: Tree, accumulation: Tree, scalars: dict[str, Array]) -> tuple[Tree, dict[str, Array]]:
        """The state after an optimiser step with the accumulated gradients, and its figures. Consumes the state.

        Figures are scalars over all devices: `total`, `weight`, `num_tokens`, `num_rows`, and `grad_norm`, that of the
        averaged gradient before clipping; the task's metrics are pairs [2], sum and weight.

        Args:
            scalars: `optim.step_scalars` of this step, from `Parallel.put_scalars`.
        """
        return self._update(state, accumulation, scalars)

    def full_step(self, state: Tree, frozen: Tree, batch: Batch, scalars: dict[str, Array]
                  ) -> tuple[Tree, dict[str, Array]]:
        """`new_accumulation`, `accumulate` and `update` in one. Consumes the state."""
        return self._full(state, frozen, batch, scalars)

    def eval_step(self, trainable: Tree, frozen: Tree, batch: Batch) -> dict[str, Array]:
        """Scalars `total`, `weight` and, where the task counts it, `correct` over all ranks, without dropout."""
        return self._eval(trainable, frozen, batch)[0]

    def predict_step(self, trainable: Tree, frozen: Tree, batch: Batch) -> Any:
        """What the task predicts, [ranks, B, ...]; `Parallel.fetch_rows` brings it to the host."""
        return self._rows(trainable, frozen, batch)[0]

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks that `fetch_rows` gives the rows of."""
        return self._parallel.local_ranks

    def fetch_rows(self, rows: Any) -> Any:
        """What `predict_step` returned, of this process's ranks, on the host."""
        return self._parallel.fetch_rows(rows)

    def memory(self, state: Tree, frozen: Tree, batch: Batch, scalars: dict[str, Array]) -> dict[str, int]:
        """Bytes on each device that a compiled `full_step` needs: `arguments` (state and batch) and `temporary`."""
        found = self._full.lower(state, frozen, batch, scalars).compile().memory_analysis()
        return {"arguments": found.argument_size_in_bytes, "temporary": found.temp_size_in_bytes}

    def lowered(self, trainable: Tree, frozen: Tree, batch: Batch, scalars: dict[str, Any], accumulates: bool = False
                ) -> dict[str, jax.stages.Lowered]:
        """The programs of a step, for arrays of these shapes and dtypes, of which none need be there.

        Args:
            batch: Of all ranks, [ranks, B, ...].
            accumulates: Give `accumulate` and `update`, which gradient accumulation calls, instead of `full_step`.
        """
        put = self._parallel.outline
        state = jax.eval_shape(lambda trainable: new_state(trainable, self._optimizer.init), trainable)
        state, frozen, rows, scalars = (put(state, "state"), put(frozen, "state"), put(batch, "batch"),
                                        put(scalars, "scalar"))
        if not accumulates and not self.surveys:
            return {"full_step": self._full.lower(state, frozen, rows, scalars)}
        sums = jax.eval_shape(lambda trainable: new_accumulation(trainable, *self._names), trainable)
        sums = put(sums, "state")
        return {"accumulate": self._accumulate.lower(state, frozen, sums, rows),
                "update": self._update.lower(state, sums, scalars)}

    # What is compiled ------------------------------------------------------------------------------------------------

    def _survey_step(self, state, frozen, accumulation, batch):
        found = self._survey_rows(merge(state["trainable"], frozen), _rows_of(batch))
        return ({**accumulation, "statistics": jax.tree.map(jnp.add, accumulation["statistics"], found)},)

    def _accumulate_step(self, state, frozen, accumulation, batch):
        gradients, sums = self._differentiate(state, frozen, batch, accumulation.get("statistics"))
        added = jax.tree.map(lambda old, new: old + new.astype(old.dtype), accumulation["gradients"], gradients)
        return ({**accumulation, "gradients": added, "sums": jax.tree.map(jnp.add, accumulation["sums"], sums)},)

    def _full_step(self, state, frozen, batch, scalars):
        statistics = None
        if self.surveys:
            statistics = self._survey_rows(merge(state["trainable"], frozen), _rows_of(batch))
        gradients, sums = self._differentiate(state, frozen, batch, statistics)
        return self._apply(state, jax.tree.map(lambda g: g.astype(jnp.float32), gradients), sums, scalars)

    def _update_step(self, state, accumulation, scalars):
        return self._apply(state, accumulation["gradients"], accumulation["sums"], scalars)

    def _eval_step(self, trainable, frozen, batch):
        sums = self._loss(merge(trainable, frozen), _rows_of(batch), False, True)._asdict()
        return (self._parallel.sum({name: value for name, value in sums.items() if value is not None}),)

    def _predict_step(self, trainable, frozen, batch):
        predicted = self._predict(merge(trainable, frozen), _rows_of(batch))
        return (jax.tree.map(lambda x: x.reshape(num_visible_ranks(), -1, *x.shape[1:]), predicted),)

    def _differentiate(self, state, frozen, batch, statistics):
        """Gradient of the summed loss, and the sums, of the micro-batches of the visible ranks."""
        rows = _rows_of(batch)
        known = () if statistics is None else (self._parallel.sum(statistics),)

        def summed(trainable):
            sums = self._loss(merge(trainable, frozen), rows, True, False, *known)
            return sums.total, (sums.weight, sums.metrics or {})

        (total, (weight, metrics)), gradients = jax.value_and_grad(summed, has_aux=True)(state["trainable"])
        scored = scored_rows(rows)
        num_tokens = (rows["attention_mask"].reshape(len(scored), -1) * scored[:, None]).sum()
        return gradients, {"total": total, "weight": weight, "num_tokens": num_tokens, "num_rows": scored.sum(),
                           **metrics}

    def _apply(self, state, gradients, sums, scalars):
        """Divide by the weight of all devices, clip, update."""
        gradients, sums = self._parallel.sum((gradients, sums))
        gradients = jax.tree.map(lambda g: g / jnp.where(sums["weight"] > 0, sums["weight"], 1), gradients)
        norm = optax.global_norm(gradients)
        gradients = _clip(gradients, norm, self._clipping)
        trainable, slots = state["trainable"], state["optimizer"]
        updates, slots = self._optimizer.update(gradients, slots, trainable, **scalars)
        return ({"trainable": optax.apply_updates(trainable, updates), "optimizer": slots}, {**sums, "grad_norm": norm})


def fetch_figures(figures: dict[str, Array]) -> dict[str, float]:
    """Figures of an update as plain numbers, with `loss`, the mean. Waits for the device.

    Among them are the means of the task's metrics; one that nothing counts for is left out.
    """
    fetched = jax.device_get(figures)
    plain = {name: value.item() for name, value in fetched.items() if value.ndim == 0}
    metrics = {name: (value[0] / value[1]).item() for name, value in fetched.items() if value.ndim and value[1]}
    return {**plain, "loss": plain["total"] / (plain["weight"] or 1), **metrics}


def _rows_of(batch: Batch) -> Batch:
    """Rows [ranks * B, ...] of what the network and the loss see."""
    return {name: x.reshape(-1, *x.shape[2:]) for name, x in batch.items()}


def _clip(gradients: Tree, norm: Array, clipping: Clipping) -> Tree:
    """The same rules as torch's clip_grad_norm_ and clip_grad_value_."""
    if not clipping.value:
        return gradients
    if clipping.algorithm == "value":
        return jax.tree.map(lambda g: jnp.clip(g, -clipping.value, clipping.value), gradients)
    factor = jnp.minimum(clipping.value / (norm + 1e-6), 1.0)
    return jax.tree.map(lambda g: g * factor, gradients)
