"""Positions of a batch laid out for the output head: in chunks, labelled ones first, over the devices of a mesh.

On a mesh devices either have the whole head and apply it to their own positions, or share the vocabulary: then
hidden states travel instead of weights, and neither the head, its gradient nor logits are ever whole on a device.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jax_engine.distributed.interface import (
    DATA_AXES,
    SEQUENCE,
    constrain,
    num_sequence_parts,
    num_visible_ranks,
    on_mesh,
)
from jax_engine.distributed.mesh import partition
from jax_engine.distributed.target import target
from lmmods.core.labels import IGNORED

# The float32 logits of one chunk, or its hidden states, take about this many bytes on each device. Each chunk reads the
# head's weights anew, and where they train also their gradient, which on GPUs costs more than the memory.
CHUNK_BYTES = 32 * 2**20
CHUNK_BYTES_GPU = 256 * 2**20


class Way(NamedTuple):
    """How a head is applied.

    Args:
        chunk: C positions of each rank whose logits are made at once.
        axes: Of the mesh, over which devices share the vocabulary: each has rows of the head's table, takes the
            positions of all of them, and keeps its part of the logits. None: each has the whole head and its own
            positions.
    """

    chunk: int
    axes: tuple[str, ...]


class Lines(NamedTuple):
    """Positions of R ranks, each rank's in one line; the line of M is continued to M', a multiple of the chunk.

    Where rows are cut along the sequence, each part of a rank's rows is a line of its own.

    Args:
        hidden: [R, M, D], in the order of the batch.
        params: Of the head.
        targets: [R, M'], the labelled ones first; `weights` likewise.
        order: [R, M'] places in `hidden` of the targets.
        num_chunks: How many chunks hold labels.
    """

    hidden: Array
    params: list[Array]
    targets: Array
    weights: Array
    order: Array
    num_chunks: Array


def convert(head: Callable[[Array], Array], hidden: Array, vocab_size: int) -> tuple[Callable, Way, list[Array]]:
    """The head as a function of positions and of what it closes over; how it is applied; what it closes over."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    pure_head, params = jax.closure_convert(head, flat[:1])
    num_lines, axes = num_visible_ranks() * num_sequence_parts(), _vocabulary_axes(params, vocab_size)
    together = num_lines // num_groups(axes, num_lines)
    chunk_bytes = CHUNK_BYTES if target().platform == "cpu" else CHUNK_BYTES_GPU
    # A device has a chunk's logits, [C, V] or as many, and its hidden states, [together * C, D].
    widest = max(vocab_size, together * flat.shape[1] if axes else 0)
    way = Way(min(max(chunk_bytes // (4 * widest), 1), len(flat) // num_lines), axes)
    pure_head, params = jax.closure_convert(head, flat[:together * way.chunk])
    return pure_head, way, params


def _vocabulary_axes(params: list[Array], vocab_size: int) -> tuple[str, ...]:
    """Those of `Way`: the axes over which the state shards a table, if the head has no other matrix than tables.

    What else a head computes would be computed for all positions on each device.
    """
    if not on_mesh() or any(p.ndim > 1 and p.shape[0] != vocab_size for p in params):
        return ()
    sizes = jax.sharding.get_abstract_mesh().shape
    axes = tuple(axis for axis in partition("head.weight", (vocab_size, 1), sizes)[0] if sizes[axis] > 1)
    return axes if {axis for axis in (*DATA_AXES, SEQUENCE) if sizes[axis] > 1} <= {"data", *axes} else ()


def num_groups(axes: tuple[str, ...], num_lines: int) -> int:
    """Of lines that are taken together."""
    return jax.sharding.get_abstract_mesh().shape["data"] if axes else num_lines


def lines(hidden: Array, params: list[Array], targets: Array, weights: Array, way: Way) -> Lines:
    """Of rows [B, T]; they stay on their rank."""
    hidden, targets, weights = (split_over_ranks(_in_lines(x)) for x in (hidden, targets, weights))
    order = jnp.argsort(targets == IGNORED, axis=1, stable=True)
    pad = ((0, 0), (0, -targets.shape[1] % way.chunk))
    return Lines(hidden, params, jnp.pad(jnp.take_along_axis(targets, order, axis=1), pad, constant_values=IGNORED),
                  jnp.pad(jnp.take_along_axis(weights, order, axis=1), pad), jnp.pad(order, pad),
                  -(-(targets != IGNORED).sum(1).max() // way.chunk))


def _in_lines(x: Array) -> Array:
    """[R, M, ...] of rows [B, T, ...]."""
    parts = num_sequence_parts()
    if parts == 1:
        return x.reshape(num_visible_ranks(), -1, *x.shape[2:])
    rows = x.reshape(num_visible_ranks(), -1, parts, x.shape[1] // parts, *x.shape[2:])
    return rows.swapaxes(1, 2).reshape(num_visible_ranks() * parts, -1, *x.shape[2:])


def in_rows(x: Array, shape: tuple[int, ...]) -> Array:
    """Undo `_in_lines`: [R, M] to [B, T]."""
    parts = num_sequence_parts()
    if parts == 1:
        return x.reshape(shape)
    return x.reshape(num_visible_ranks(), parts, -1, shape[1] // parts).swapaxes(1, 2).reshape(shape)


def split_over_ranks(x: Array) -> Array:
    return constrain(x, PartitionSpec((*DATA_AXES, SEQUENCE) if num_sequence_parts() > 1 else DATA_AXES))


def each_group(way: Way, function: Callable, in_axes: int | tuple = 0) -> Callable:
    """`function` of the positions of a group of lines, for all groups."""
    return jax.vmap(function, in_axes, spmd_axis_name="data" if way.axes else None)


def places(order: Array, hidden: Array) -> Array:
    """[R, M]: where in its line each position of `hidden` [R, M, D] stands."""
    return jnp.argsort(order[:, : hidden.shape[1]], axis=1)


def chunk_of(way: Way, number: Array, hidden: Array, order: Array, *columns: Array) -> list[Array]:
    """Of each group the positions of a chunk, [groups, C, D] and [groups, C]."""
    start = number * way.chunk
    places, *columns = (jax.lax.dynamic_slice_in_dim(column, start, way.chunk, 1) for column in (order, *columns))
    taken = [jnp.take_along_axis(hidden, places[..., None], axis=1), *columns]
    if not way.axes:
        return taken
    groups = num_groups(way.axes, len(hidden))
    return [constrain(x.reshape(groups, -1, *x.shape[2:]), PartitionSpec("data")) for x in taken]


def laid_out(params: list[Array], way: Way) -> list[Array]:
    """Tables in rows over the devices that share the vocabulary; else gathered (all-gather), once before the loop."""
    return [constrain(p, PartitionSpec(way.axes) if way.axes and p.ndim else PartitionSpec()) for p in params]


def sums_laid_out(sums: Array, way: Way) -> Array:
    """Sums over groups [groups, *shape], in the layout of what they are the gradient of."""
    if not way.axes:
        return split_over_ranks(sums)
    return constrain(sums, PartitionSpec("data", way.axes) if sums.ndim > 1 else PartitionSpec("data"))
