"""Trees of a run's arrays on the devices: plain nested dicts, no classes.

    state  = {"trainable": params, "optimizer": {slot: tree like params}}    donated to each update
    frozen = params                                                          of the same network; never donated
    accumulation = {"gradients": float32 tree like trainable, "sums": {name: scalar}}    since the last optimiser step

Where only some layers of a stacked leaf train, `trainable` has their rows, and `frozen` the others, under a first key
with their positions in the stack: layers@0,1 (see `Names.split`).

Among the sums, a task's metric is a pair, [2] float32: sum and weight. If the loss depends on all rows of a step, an
accumulation also has `statistics`, such pairs by name, which are complete before the first gradient is computed.

Slots are named as in torch's optimisers (`exp_avg`, ...); a slot holds only the leaves that need it.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = dict[str, Any]
Path = tuple[str, ...]

IMAGE_LAYERS, IMAGE_MERGERS = "image_layers", "image_mergers"
IMAGE_PARTS = ("images", IMAGE_LAYERS, IMAGE_MERGERS)
STACKS = ("layers", IMAGE_LAYERS, IMAGE_MERGERS)  # stacks of layers: their leaves have a leading layer axis
AT = "@"  # in a key, before the positions of layers

SUMS = {"total": jnp.float32, "weight": jnp.float32, "num_tokens": jnp.int32, "num_rows": jnp.int32}


def flatten(tree: Tree, prefix: Path = ()) -> dict[Path, Any]:
    """Return the leaves of nested dicts by path, in dict order."""
    flat: dict[Path, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, (*prefix, key)) if isinstance(value, dict) else {(*prefix, key): value}
    return flat


def is_stacked(path: Path) -> bool:
    """Return True for the path of a leaf or module in a stack of layers."""
    return path[0] in STACKS


def unflatten(flat: dict[Path, Any]) -> Tree:
    """Return nested dicts from leaves by path, the inverse of `flatten`."""
    tree: Tree = {}
    for (*parents, last), value in flat.items():
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def merge(first: Tree, second: Tree) -> Tree:
    """Return one tree with the leaves of both; stacks of layers get their rows from both."""
    merged = flatten(first)
    for path, leaf in flatten(second).items():
        name, _, positions = path[0].partition(AT)
        merged_path = (name, *path[1:])
        if positions:
            leaf = _interleave(merged[merged_path], leaf, [int(position) for position in positions.split(",")])
        merged[merged_path] = leaf
    return unflatten(merged)


def _interleave(first: Any, second: Any, positions: list[int]) -> Any:
    """Return a stack of layers with the rows of `second` at these positions, and the rows of `first` at the others."""
    total = first.shape[0] + second.shape[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((total, *first.shape[1:]), first.dtype)
    parts, next_row = [], {True: 0, False: 0}
    for is_second, run in groupby(range(total), set(positions).__contains__):
        source, start, length = second if is_second else first, next_row[is_second], len(list(run))
        parts.append(source[start:start + length])
        next_row[is_second] += length
    # Arrays on the host stay there, and so do arrays on the devices.
    return (jnp if isinstance(first, jax.Array) else np).concatenate(parts)


def new_state(trainable: Tree, init_optimizer: Callable[[Tree], Tree]) -> Tree:
    """Return the initial state of a run. Compile with `Parallel.compile`, so that arrays are created sharded."""
    return {"trainable": trainable, "optimizer": init_optimizer(trainable)}


def new_accumulation(trainable: Tree, metric_names: Sequence[str] = (), statistic_names: Sequence[str] = ()
                     ) -> Tree:
    """Return an accumulation of zeros. Gradients are float32, whatever the dtype of the parameters.

    Args:
        metric_names: Names of the task's metrics.
        statistic_names: Names of the statistics over all rows of a step that the loss needs.
    """
    sums = {name: jnp.zeros((), dtype) for name, dtype in SUMS.items()}
    pairs = {name: jnp.zeros(2, jnp.float32) for name in (*metric_names, *statistic_names)}
    return {"gradients": jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trainable),
            "sums": sums | {name: pairs[name] for name in metric_names},
            **({"statistics": {name: pairs[name] for name in statistic_names}} if statistic_names else {})}
