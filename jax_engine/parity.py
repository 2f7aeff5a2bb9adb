"""What JAX computes of given rows, for a comparison with torch: logits of the whole network, loss and gradient."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_engine.checkpoint import Checkpointer
from jax_engine.distributed.tree import Tree, flatten, merge, unflatten
from jax_engine.evaluation import Evaluation
from jax_engine.export import Exporter
from jax_engine.loop import Loop
from jax_engine.models.network import Network
from jax_engine.run import Training
from jax_engine.tasks.base import Task
from lmmods.core.parity import Row, compared_positions, moved_adapter, sequences, write
from lmmods.core.signals import Interruption
from lmmods.evaluation.mmlu import MMLUEvaluator
from lmmods.evaluation.samples import SampleWriter
from lmmods.runs.checkpoint_policy import CheckpointPolicy
from lmmods.runs.events import Events
from lmmods.runs.hub_upload import Publisher
from lmmods.runs.identity import RunIdentity
from lmmods.runs.progress import Cut
from lmmods.runs.step_metrics import StepMetrics


def measure(task: Task, datamodule: Any, rows: list[Row], folder: Path) -> None:
    """Write loss, logits and gradient of rows [1, ...] into a folder, without dropout; see `core.parity`.

    Args:
        task: Not built yet.
        datamodule: For its tokenizer.
    """
    with jax.default_matmul_precision("highest"):
        trainable, frozen = task.build("32-true", datamodule, datamodule.run_seed)
        task.network.drops = False  # else a loss as in training
        trainable = jax.device_put(_moved(task.network, jax.tree.map(np.asarray, trainable)))
        frozen = jax.device_put(jax.tree.map(np.asarray, frozen))
        _measure(task, trainable, frozen, rows, folder)


def _measure(task: Task, trainable: Tree, frozen: Tree, rows: list[Row], folder: Path) -> None:
    network = task.network

    def loss(trainable: Tree, frozen: Tree, row: dict[str, Array], statistics: tuple) -> tuple[Array, Array]:
        sums = task.batch_loss(merge(trainable, frozen), row, True, False, *statistics)
        return sums.total, sums.weight

    @partial(jax.jit, donate_argnums=2)
    def added(trainable: Tree, frozen: Tree, sums: tuple, row: dict[str, Array], statistics: tuple) -> tuple:
        (total, weight), gradients = jax.value_and_grad(loss, has_aux=True)(trainable, frozen, row, statistics)
        return jax.tree.map(jnp.add, sums, (total, weight, gradients))

    @jax.jit
    def logits(trainable: Tree, frozen: Tree, row: dict[str, Array], places: Array) -> Array:
        params = merge(trainable, frozen)
        hidden = network.hidden(params, row)
        return network.logits(params, hidden.reshape(-1, hidden.shape[-1])[places])

    batches, statistics = [_on_device(row) for row in rows], ()
    if task.survey is not None:
        survey = jax.jit(lambda trainable, frozen, row: task.survey(merge(trainable, frozen), row))
        found = [survey(trainable, frozen, batch) for batch in batches]
        statistics = (jax.tree.map(lambda *parts: sum(parts), *found),)
    sums = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, trainable))
    for batch in batches:
        sums = added(trainable, frozen, sums, batch, statistics)
    found = [logits(trainable, frozen, _on_device(sequences(row)), compared_positions(row, len(rows)))
             for row in rows]
    total, weight, gradients = sums
    mean = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf / jnp.where(weight > 0, weight, 1), tree),
                   donate_argnums=0)
    write(folder, float(total / weight), float(weight), np.concatenate(jax.device_get(found)),
          network.to_torch(jax.device_get(mean(gradients))))


def _on_device(row: Row) -> dict[str, Array]:
    return {name: jnp.asarray(values.astype(np.float32 if values.dtype.kind == "f" else np.int32))
            for name, values in row.items()}


def _moved(network: Network, trainable: Tree) -> Tree:
    """What trains with adapters away from zero."""
    leaves = flatten(trainable)
    for path, leaf in leaves.items():
        if path[-1] == "lora_B":
            names = [network.name(path, layer) for layer in (range(len(leaf)) if path[0] == "layers" else [None])]
            layers = leaf if path[0] == "layers" else leaf[None]
            moved = np.stack([moved_adapter(*each) for each in zip(names, layers, strict=True)])
            leaves[path] = moved.reshape(leaf.shape)
    return unflatten(leaves)


# ---------------------------------------------------------------------------------------------------------------------
# Training that leaves nothing: each step's figures are watched, and there is no run folder.

class WatchedSteps(StepMetrics):
    """Hands the figures of each optimiser step to `watch`, which says whether it was the last."""

    def __init__(self, run: Training, watch: Callable[[dict[str, float]], bool]) -> None:
        super().__init__(run.stopwatch)
        self._run, self._watch = run, watch

    def add(self, step: int, epoch: float, figures: Callable[[], dict[str, float]],
            is_done: Callable[[], bool] = lambda: False) -> None:
        if self._watch(figures()):
            self._run.should_stop = True


def rehearse(run: Training, loader: Any, accumulate: int, watch: Callable[[dict[str, float]], bool]) -> None:
    """Train until `watch` says that a step was the last, or to the end of the run.

    Args:
        accumulate: Micro-batches of each rank that make an optimiser step.
    """
    run.metrics = WatchedSteps(run, watch)
    samples, mmlu, publish = SampleWriter(), MMLUEvaluator(), Publisher()
    evaluation = Evaluation(run, samples, mmlu)
    if run.schedule.num_val_batches:
        evaluation.evaluate("val", limit=1, keep=False)
    run.schedule = run.schedule.without_validation()
    cut = Cut(run.data.batch_size, accumulate, run.parallel.data_parallel_size)
    loop = Loop(run, accumulate, Events(None, samples, mmlu, publish, may_stop_early=False), evaluation,
                Checkpointer(run, cut, CheckpointPolicy(), [], RunIdentity()), Exporter(run, publish), [],
                Interruption(saves=False))
    loop.train(loader, resumed=False)
    run.bar.close()
