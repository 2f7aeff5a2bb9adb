"""Logits, loss and gradient of rows on JAX, for comparison with torch."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_engine.distributed.tree import Tree, flatten, is_stacked, merge, unflatten
from jax_engine.models.network import Network
from jax_engine.tasks.base import Task
from lmmods.core.parity import Row, compared_positions, moved_adapter, sequences, write
from lmmods.data.base import DataModule


def measure(task: Task, datamodule: DataModule, rows: list[Row], folder: Path) -> None:
    """Write loss, logits and gradient of rows [1, ...] to a folder, without dropout; see `core.parity`.

    Args:
        task: The task, not built yet.
        datamodule: Provides the tokenizer.
    """
    with jax.default_matmul_precision("highest"):
        trainable, frozen = task.build("32-true", datamodule, datamodule.run_seed)
        task.network.drops = False  # the loss is computed in training mode, but without dropout
        trainable = jax.device_put(_move_adapters(task.network, jax.tree.map(np.asarray, trainable)))
        frozen = jax.device_put(jax.tree.map(np.asarray, frozen))
        _measure(task, trainable, frozen, rows, folder)


def _measure(task: Task, trainable: Tree, frozen: Tree, rows: list[Row], folder: Path) -> None:
    network = task.network

    def loss(trainable: Tree, frozen: Tree, row: dict[str, Array], statistics: tuple) -> tuple[Array, Array]:
        sums = task.batch_loss(merge(trainable, frozen), row, True, False, *statistics)
        return sums.total, sums.weight

    @partial(jax.jit, donate_argnums=2)
    def add_row(trainable: Tree, frozen: Tree, sums: tuple, row: dict[str, Array], statistics: tuple) -> tuple:
        (total, weight), gradients = jax.value_and_grad(loss, has_aux=True)(trainable, frozen, row, statistics)
        return jax.tree.map(jnp.add, sums, (total, weight, gradients))

    @jax.jit
    def logits(trainable: Tree, frozen: Tree, row: dict[str, Array], positions: Array) -> Array:
        params = merge(trainable, frozen)
        if network.pools:
            return network.scores(params, row).reshape(-1, 1)  # all scores of the row
        hidden = network.hidden(params, row)
        return network.logits(params, hidden.reshape(-1, hidden.shape[-1])[positions])

    # As in training: statistics of all rows first, then sums, divided once at the end.
    batches, statistics = [_on_device(row) for row in rows], ()
    if task.survey is not None:
        survey = jax.jit(lambda trainable, frozen, row: task.survey(merge(trainable, frozen), row))
        by_row = [survey(trainable, frozen, batch) for batch in batches]
        statistics = (jax.tree.map(lambda *parts: sum(parts), *by_row),)
    sums = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, trainable))
    for batch in batches:
        sums = add_row(trainable, frozen, sums, batch, statistics)
    row_logits = [logits(trainable, frozen, _on_device(sequences(row)), compared_positions(row, len(rows)))
                  for row in rows]
    total, weight, gradients = sums
    mean = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf / jnp.where(weight > 0, weight, 1), tree),
                   donate_argnums=0)
    write(folder, float(total / weight), float(weight), np.concatenate(jax.device_get(row_logits)),
          network.to_torch(jax.device_get(mean(gradients))))


def _on_device(row: Row) -> dict[str, Array]:
    return {name: jnp.asarray(values.astype(np.float32 if values.dtype.kind == "f" else np.int32))
            for name, values in row.items()}


def _move_adapters(network: Network, trainable: Tree) -> Tree:
    """Return the trainable parameters with adapters moved away from zero, so that all gradients are non-zero."""
    leaves = flatten(trainable)
    for path, leaf in leaves.items():
        if path[-1] == "lora_B":
            names = [network.name(path, layer) for layer in (range(len(leaf)) if is_stacked(path) else [None])]
            layers = leaf if is_stacked(path) else leaf[None]
            moved = np.stack([moved_adapter(*pair) for pair in zip(names, layers, strict=True)])
            leaves[path] = moved.reshape(leaf.shape)
    return unflatten(leaves)
