"""What a training loop may ask of `Replicas` and `ShardedMesh`, the two ways to spread a run over devices.

A step takes one micro-batch of the loader for each data-parallel rank. With replicas a rank is a device; on a mesh it
is a position along `data` x `fsdp` x `expert`, whose devices along `sequence` and `tensor` work on the micro-batch
together. Arrays of a step are of three kinds:

    state    parameters, optimiser state, sums: replicated, or sharded by the table in `mesh`
    batch    [data_parallel_size, B, ...]: split over the ranks
    scalar   the same everywhere

With several processes, each holds the ranks of its own devices.
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

from jax_engine.distributed.target import target
from jax_engine.distributed.tree import Tree

Kind = Literal["state", "batch", "scalar"]
DATA_AXES = ("data", "fsdp", "expert")  # mesh axes over which a batch is split
SEQUENCE = "sequence"  # and the one over which each of its rows is


class Parallel(ABC):
    """How a run is spread over devices.

    Attributes:
        data_parallel_size: Number of data-parallel ranks over all processes: the micro-batches that a step takes.
        num_devices: Devices that work on them.
        local_ranks: The ranks that this process feeds.
        sequence_parts: Parts of a row, each on a device of its own; lengths are multiples of it.
        expert_size: Ranks that share the experts of a layer.
    """

    data_parallel_size: int
    num_devices: int
    local_ranks: tuple[int, ...]
    sequence_parts: int = 1
    expert_size: int = 1

    # Steps -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def compile(self, function: Callable, inputs: tuple[Kind, ...], outputs: tuple[Kind, ...],
                donate: tuple[int, ...] = ()) -> "Compiled":
        """A compiled step.

        Args:
            function: Called with local arrays: a batch is [`num_visible_ranks()`, B, ...]. Returns a tuple.
            outputs: Kind of each result. State is created in its layout: no device ever holds more than its shard.
            donate: Arguments whose memory the results may take.
        """

    def sum(self, tree: Any) -> Any:
        """Inside a step: the sum over all data-parallel ranks (all-reduce)."""
        return tree

    # Host to devices and back ----------------------------------------------------------------------------------------

    @abstractmethod
    def outline(self, tree: Any, kind: Kind) -> Any:
        """What stands for arrays of these shapes and dtypes in `Compiled.lower`; no device need be here.

        Args:
            tree: As on the host: a batch is [`data_parallel_size`, B, ...].
        """

    @abstractmethod
    def put_state(self, tree: Tree) -> Tree:
        """Host arrays, the same in all processes, as state; all processes must call it.

        Of arrays that are read or drawn by parts, each process asks for those of its devices.
        """

    @abstractmethod
    def put_batch(self, batch: dict[str, np.ndarray]) -> dict[str, Array]:
        """Stacked micro-batches [len(local_ranks), ...] of this process's ranks as a batch."""

    @abstractmethod
    def put_scalars(self, scalars: Any) -> Any:
        """Numbers as scalars."""

    @abstractmethod
    def fetch_state(self, tree: Tree) -> Tree:
        """State as host arrays, unsharded and copied, in every process; all processes must call it."""

    def replica(self, tree: Tree) -> Tree:
        """State as arrays for a program that only this process runs; all processes must call it."""
        if jax.process_count() > 1:
            return jax.device_put(self.fetch_state(tree), jax.local_devices()[0])
        return tree

    def shapes(self, tree: Tree) -> Tree:
        """Shape and dtype that each array of a state has on the host."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    @abstractmethod
    def fetch_rows(self, tree: Any) -> Any:
        """Results of kind batch of this process's ranks as host arrays [len(local_ranks), ...]."""

    def put_sums(self, tree: Tree) -> Tree:
        """Undo `add_up`, of host arrays."""
        return self.put_state(tree)

    def add_up(self, tree: Tree) -> Tree:
        """State that each device has summed for itself, added up over devices; all processes must call it."""
        return tree

    @abstractmethod
    def pieces(self, tree: Tree) -> Tree:
        """What this process writes of a state that all processes save together: `Pieces` in host memory, copied."""


class Compiled:
    """A step, compiled for each shape it is called with.

    On several CPU devices each call finishes before the next is dispatched: the devices share one thread pool, and two
    steps in flight could deadlock, each waiting for threads that the other holds.

    Args:
        lower: Takes the same arguments and returns the program as jax.stages.Lowered.
    """

    def __init__(self, call: Callable, lower: Callable, num_devices: int):
        self._call, self.lower = call, lower
        self._waits = target().platform == "cpu" and num_devices > 1

    def __call__(self, *args: Any) -> Any:
        results = self._call(*args)
        return jax.block_until_ready(results) if self._waits else results


def placed(place: Callable[..., Array], tree: Tree, *others: Tree) -> Tree:
    """`place` of each leaf, with a bar on terminals, where there is something to wait for."""
    leaves, structure = jax.tree.flatten(tree)
    bar = tqdm(leaves, "loading", unit=" arrays", disable=None, delay=2)
    return structure.unflatten([place(*each) for each in zip(bar, *map(jax.tree.leaves, others), strict=True)])


def num_visible_ranks() -> int:
    """Inside a step: how many ranks' rows its arrays hold, rank after rank: 1 on replicas, all of them on a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in DATA_AXES if axis in mesh.axis_names)


def num_sequence_parts() -> int:
    """Inside a step: over how many devices each row is cut along the sequence."""
    return jax.sharding.get_abstract_mesh().shape.get(SEQUENCE, 1)


def cut(x: Array) -> Array:
    """Inside a step: x [B, T, ...] with each row cut along the sequence, where the mesh has devices for that."""
    return constrain(x, PartitionSpec(DATA_AXES, SEQUENCE)) if num_sequence_parts() > 1 else x


def on_mesh() -> bool:
    """Whether this is inside a step on a mesh."""
    return set(DATA_AXES) <= set(jax.sharding.get_abstract_mesh().axis_names)


def constrain(x: Array, spec: PartitionSpec) -> Array:
    """Inside a step on a mesh: `x` sharded by `spec`. Elsewhere `x` as it is."""
    return jax.lax.with_sharding_constraint(x, spec) if on_mesh() else x


def own_positions(devices: Sequence[jax.Device]) -> tuple[int, ...]:
    """Positions of this process's devices among `devices`."""
    return tuple(place for place, device in enumerate(devices) if device.process_index == jax.process_index())
