"""Interface of `Replicas` and `ShardedMesh`, the two ways to distribute a run over devices.

A step takes one micro-batch of the loader per data-parallel rank. With replicas a rank is a device. On a mesh it is a
position along `data` x `fsdp` x `expert`, whose devices along `sequence` and `tensor` share the micro-batch. A step has
three kinds of arrays:

    state    parameters, optimiser state, sums: replicated, or sharded by the table in `mesh`
    batch    [data_parallel_size, B, ...]: split over the ranks
    scalar   replicated

With several processes, each one has the ranks of its own devices.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from tqdm import tqdm

from jax_engine.distributed.target import present_target
from jax_engine.distributed.tree import Tree

Kind = Literal["state", "batch", "scalar"]
DATA_AXES = ("data", "fsdp", "expert")  # mesh axes over which the rows of a batch are split
SEQUENCE = "sequence"  # mesh axis over which each row is split (context parallelism)


class Parallel(ABC):
    """Distribution of a run over devices.

    Attributes:
        data_parallel_size: Number of data-parallel ranks over all processes, each with one micro-batch per step.
        num_devices: Number of devices over all processes.
        local_ranks: Ranks whose micro-batches this process supplies.
        context_parallel_size: Number of devices over which each row is split; row lengths are multiples of it.
        expert_size: Number of ranks over which each layer's experts are sharded.
    """

    data_parallel_size: int
    num_devices: int
    local_ranks: tuple[int, ...]
    context_parallel_size: int = 1
    expert_size: int = 1

    # Steps -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def compile(self, function: Callable, inputs: tuple[Kind, ...], outputs: tuple[Kind, ...],
                donate: tuple[int, ...] = ()) -> "Compiled":
        """Compile a step.

        Args:
            function: Called with local arrays: a batch is [`num_visible_ranks()`, B, ...]. Returns a tuple.
            inputs: Kind of each argument.
            outputs: Kind of each result. State is created sharded: no device ever stores more than its shard.
            donate: Arguments whose buffers the results may reuse.
        """

    def sum(self, tree: Any) -> Any:
        """Sum over all data-parallel ranks (all-reduce). Call inside a step."""
        # `Replicas` overrides this.
        return tree  # correct on a mesh, where a step's arrays are global, and sums over rows reduce over ranks

    # Host to devices and back ----------------------------------------------------------------------------------------

    @abstractmethod
    def outline(self, tree: Any, kind: Kind) -> Any:
        """Return abstract arrays of these shapes and dtypes for `Compiled.lower`; needs no devices.

        Args:
            tree: Arrays as on the host: a batch is [`data_parallel_size`, B, ...].
        """

    @abstractmethod
    def put_state(self, tree: Tree) -> Tree:
        """Copy host arrays, equal in all processes, to the devices as state; all processes must call this.

        Each process reads only the parts of lazy arrays that its devices store.
        """

    @abstractmethod
    def put_batch(self, batch: dict[str, np.ndarray]) -> dict[str, Array]:
        """Copy this process's stacked micro-batches [len(local_ranks), ...] to the devices as a batch."""

    @abstractmethod
    def put_scalars(self, scalars: Any) -> Any:
        """Copy numbers to the devices as scalars."""

    @abstractmethod
    def fetch_state(self, tree: Tree) -> Tree:
        """Return the state as host arrays, unsharded and copied, in every process; all processes must call this."""

    def replica(self, tree: Tree) -> Tree:
        """Return the state for a program that only this process runs; all processes must call this."""
        if jax.process_count() > 1:
            return jax.device_put(self.fetch_state(tree), jax.local_devices()[0])
        return tree

    def shapes(self, tree: Tree) -> Tree:
        """Return the shape and dtype of each array of a state on the host."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    @abstractmethod
    def fetch_rows(self, tree: Any) -> Any:
        """Return results of kind batch for this process's ranks, as host arrays [len(local_ranks), ...]."""

    @abstractmethod
    def shards(self, tree: Tree) -> Tree:
        """Return this process's shards of a state for a distributed checkpoint: `Shards` copied to host memory."""


class Compiled:
    """A step, compiled once per combination of argument shapes.

    On several CPU devices, each call completes before the next one is dispatched. The devices share one thread pool, so
    two steps in flight could deadlock, each waiting for the other's threads.

    Args:
        lower: Takes the same arguments and returns the program as `jax.stages.Lowered`.
    """

    def __init__(self, call: Callable, lower: Callable, num_devices: int):
        self._call, self.lower = call, lower
        self._waits = present_target().platform == "cpu" and num_devices > 1

    def __call__(self, *args: Any) -> Any:
        results = self._call(*args)
        return jax.block_until_ready(results) if self._waits else results


def place_leaves(place: Callable[..., Array], tree: Tree, *others: Tree) -> Tree:
    """Apply `place` to each leaf, with a progress bar on terminals after 2 seconds."""
    leaves, structure = jax.tree.flatten(tree)
    bar = tqdm(leaves, "loading", unit=" arrays", disable=None, delay=2)
    return structure.unflatten([place(*args) for args in zip(bar, *map(jax.tree.leaves, others), strict=True)])


def num_visible_ranks() -> int:
    """Return the number of ranks whose rows a step's arrays contain, in rank order: 1 on replicas, all on a mesh.

    Call inside a step.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in DATA_AXES if axis in mesh.axis_names)


def context_parallel_size() -> int:
    """Return the number of devices over which each row is split (context parallelism). Call inside a step."""
    return jax.sharding.get_abstract_mesh().shape.get(SEQUENCE, 1)


def shard_sequence(x: Array) -> Array:
    """Split the rows of x [B, T, ...] along the sequence, if the mesh does so. Call inside a step."""
    return constrain(x, PartitionSpec(DATA_AXES, SEQUENCE)) if context_parallel_size() > 1 else x


def on_mesh() -> bool:
    """Return True inside a step on a mesh."""
    return set(DATA_AXES) <= set(jax.sharding.get_abstract_mesh().axis_names)


def constrain(x: Array, spec: PartitionSpec) -> Array:
    """Constrain the sharding of `x` to `spec` inside a step on a mesh; elsewhere return `x` unchanged."""
    return jax.lax.with_sharding_constraint(x, spec) if on_mesh() else x


def local_positions(devices: Sequence[jax.Device]) -> tuple[int, ...]:
    """Return the indices of this process's devices in `devices`."""
    return tuple(position for position, device in enumerate(devices) if device.process_index == jax.process_index())
