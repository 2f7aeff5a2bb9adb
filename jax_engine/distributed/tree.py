"""Trees of arrays that a run keeps on the devices: plain nested dicts, no classes.

    state  = {"trainable": params, "optimizer": {slot: tree like params}}    donated to each update
    frozen = params                                                          of the same network; never donated
    accumulation = {"gradients": float32 tree like trainable, "sums": {name: scalar}}    since the last optimiser step

A task's metric among the sums is a pair, [2] float32: sum and weight. If the loss depends on all rows of a step, an
accumulation also has `statistics`, such pairs by name, which are complete before the first gradient is computed.

Slots are named as in torch's optimisers (`exp_avg`, ...); a slot holds only the leaves that need it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Tree = dict[str, Any]
Path = tuple[str, ...]

SUMS = {"total": jnp.float32, "weight": jnp.float32, "num_tokens": jnp.int32, "num_rows": jnp.int32}


def flatten(tree: Tree, prefix: Path = ()) -> dict[Path, Any]:
    """Return the leaves of nested dicts by path, in dict order."""
    flat: dict[Path, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, (*prefix, key)) if isinstance(value, dict) else {(*prefix, key): value}
    return flat


def unflatten(flat: dict[Path, Any]) -> Tree:
    """Inverse of `flatten`."""
    tree: Tree = {}
    for (*parents, last), value in flat.items():
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def split(tree: Tree, chosen: Tree) -> tuple[Tree, Tree]:
    """Return the leaves where `chosen` is true, and the others; `merge` is the inverse."""
    flat, marks = flatten(tree), flatten(chosen)
    parts = ({path: leaf for path, leaf in flat.items() if marks[path] == side} for side in (True, False))
    return tuple(unflatten(part) for part in parts)


def merge(first: Tree, second: Tree) -> Tree:
    """Return one tree with the leaves of both."""
    return unflatten({**flatten(first), **flatten(second)})


def new_state(trainable: Tree, init_optimizer: Callable[[Tree], Tree]) -> Tree:
    """Return the initial state of a run. Compile with `Parallel.compile`, so that arrays are created sharded."""
    return {"trainable": trainable, "optimizer": init_optimizer(trainable)}


def new_accumulation(trainable: Tree, metric_names: Sequence[str] = (), statistic_names: Sequence[str] = ()
                     ) -> Tree:
    """Return an accumulation of zeros. Gradients are float32, whatever the dtype of the parameters.

    Args:
        metric_names: Names of the task's metrics.
        statistic_names: Names of the statistics that the loss needs of all rows of a step.
    """
    sums = {name: jnp.zeros((), dtype) for name, dtype in SUMS.items()}
    pairs = {name: jnp.zeros(2, jnp.float32) for name in (*metric_names, *statistic_names)}
    return {"gradients": jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trainable),
            "sums": sums | {name: pairs[name] for name in metric_names},
            **({"statistics": {name: pairs[name] for name in statistic_names}} if statistic_names else {})}
