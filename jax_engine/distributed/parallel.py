"""How a step is spread over devices: replicas, or shards on a mesh, behind one interface.

A step takes one micro-batch of the loader per share. With replicas a share is a device; on a mesh it is a place along
`data` x `fsdp`, and the devices along `tensor` work on it together. Arrays of a step are of three kinds:

    state    parameters, optimiser state, sums: replicated, or sharded by `TABLE`
    batch    [num_shares, B, ...]: each share its own
    scalar   the same everywhere

With several processes each holds the shares of its own devices.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_engine.distributed.tree import Tree
from lmmods.core.console import say
from lmmods.core.errors import UserError

Kind = Literal["state", "batch", "scalar"]
SHARE_AXES = ("data", "fsdp")
_REPLICA_AXIS = "replica"

# Path pattern -> mesh axes of the last dimensions; dimensions in front (stacked layers) and all else are replicated.
# Matrices are [out, in], as in torch. Along fsdp a table of embeddings is cut by rows: cut by columns, XLA rebuilds the
# looked-up rows in full to bring them into the layout of the activations.
TABLE: tuple[tuple[str, tuple[Any, ...]], ...] = (
    (r"exp_avg_sq_(row|col)|norm|bias|magnitude", ()),
    (r"embed\.\w+\.weight$|\bhead\.weight$", ("fsdp", "tensor")),
    (r"weight\.(nested|row_absmax)", ()),
    (r"attn\.(o|out)\.weight\b|mlp\.down\.weight\b", ("fsdp", "tensor")),
    (r"lora_A$", (None, "fsdp")),
    (r"lora_B$", ("fsdp", None)),
    (r"\.weight\b", ("tensor", "fsdp")),
)


class Parallel(ABC):
    """One interface for both ways.

    Attributes:
        num_shares: Micro-batches that a step takes, over all processes.
        num_devices: Devices that work on them.
        local_shares: Numbers of those that this process feeds.
    """

    num_shares: int
    num_devices: int
    local_shares: tuple[int, ...]

    # Steps -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def compile(self, function: Callable, inputs: tuple[Kind, ...], outputs: tuple[Kind, ...],
                donate: tuple[int, ...] = ()) -> "Compiled":
        """A compiled step.

        Args:
            function: Called with local arrays: a batch is [shares seen, B, ...], where `num_shares_here` are seen.
                Returns a tuple.
            inputs: Kind of each argument.
            outputs: Kind of each result. State is born in its layout: no device ever holds more than its part.
            donate: Arguments whose memory the results may take.
        """

    def sum(self, tree: Any) -> Any:
        """Inside a step: add up what the devices have each summed."""
        return tree

    # Host to devices and back ----------------------------------------------------------------------------------------

    @abstractmethod
    def put_state(self, tree: Tree) -> Tree:
        """Host arrays, the same in all processes, as state."""

    @abstractmethod
    def put_batch(self, batch: dict[str, np.ndarray]) -> dict[str, Array]:
        """Stacked micro-batches [len(local_shares), ...] of this process as a batch."""

    @abstractmethod
    def put_scalars(self, scalars: Any) -> Any:
        """Numbers as scalars."""

    @abstractmethod
    def fetch_state(self, tree: Tree) -> Tree:
        """State as host arrays of their own, whole, in every process; all processes must call it."""

    def replica(self, tree: Tree) -> Tree:
        """State as plain arrays that a program of this process alone can use; all processes must call it."""
        if jax.process_count() > 1:
            return jax.device_put(self.fetch_state(tree), jax.local_devices()[0])
        return tree

    def shapes(self, tree: Tree) -> Tree:
        """Shape and dtype of each array of a state, as it is on the host."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    @abstractmethod
    def fetch_rows(self, tree: Any) -> Any:
        """Results of kind batch of this process's shares as host arrays [len(local_shares), ...]."""

    def put_sums(self, tree: Tree) -> Tree:
        """Undo `fetch_sums`."""
        return self.put_state(tree)

    def fetch_sums(self, tree: Tree) -> Tree:
        """State that devices have summed each for themselves, added up, as host arrays in every process."""
        return self.fetch_state(tree)


class Replicas(Parallel):
    """`jax.pmap`: every device holds everything and works on its own micro-batch.

    Args:
        devices: Devices of all processes to use; None takes all there are.
    """

    def __init__(self, devices: Sequence[jax.Device] | None = None) -> None:
        devices = list(devices or jax.devices())
        self.num_shares = self.num_devices = len(devices)
        self.local_shares = _own(devices)
        self._devices = devices
        self._mesh = Mesh(np.array([devices[share] for share in self.local_shares]), (_REPLICA_AXIS,),
                          axis_types=(AxisType.Auto,))

    def compile(self, function, inputs, outputs, donate=()):
        def local(_, *args):
            args = [jax.tree.map(lambda x: x[None], arg) if kind == "batch" else arg
                    for kind, arg in zip(inputs, args, strict=True)]
            results = function(*args)
            return tuple(jax.tree.map(lambda x: x[0], result) if kind == "batch" else result
                         for kind, result in zip(outputs, results, strict=True))

        step = jax.pmap(local, axis_name=_REPLICA_AXIS, devices=self._devices,
                        donate_argnums=tuple(place + 1 for place in donate),
                        in_axes=(0, *(None if kind == "scalar" else 0 for kind in inputs)),
                        out_axes=tuple(None if kind == "scalar" else 0 for kind in outputs))
        # pmap must map something, hence the first argument
        first = self._place(np.array(self.local_shares))
        return Compiled(partial(step, first), partial(step.lower, first), self.num_shares)

    def sum(self, tree):
        return jax.lax.psum(tree, _REPLICA_AXIS)

    def put_state(self, tree):
        return jax.tree.map(lambda x: self._place(np.broadcast_to(x, (len(self.local_shares), *np.shape(x)))), tree)

    def put_batch(self, batch):
        return {name: self._place(x) for name, x in batch.items()}

    def put_scalars(self, scalars):
        return jax.device_put(scalars, NamedSharding(self._mesh, PartitionSpec()))

    def fetch_state(self, tree):
        return jax.tree.map(lambda x: np.array(x.addressable_shards[0].data[0]), tree)

    def replica(self, tree):
        return jax.tree.map(lambda x: x.addressable_shards[0].data[0], tree)

    def shapes(self, tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)

    def fetch_rows(self, tree):
        return jax.tree.map(np.array, tree)

    def put_sums(self, tree):
        # The first device of all takes up what all had summed.
        holds = np.array(self.local_shares) == 0
        return jax.tree.map(lambda x: self._place(np.where(holds.reshape(-1, *[1] * np.ndim(x)), x, np.zeros_like(x))),
                            tree)

    def fetch_sums(self, tree):
        added = self.compile(lambda tree: (self.sum(tree),), ("state",), ("state",))(tree)[0]
        return self.fetch_state(added)

    def _place(self, x: np.ndarray) -> Array:
        sharding = NamedSharding(self._mesh, PartitionSpec(_REPLICA_AXIS))
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


class MeshSharding(Parallel):
    """`jax.jit` over a mesh: parameters and optimiser state are sharded by `TABLE`, batches over data x fsdp.

    Args:
        data: Copies of the parameters.
        fsdp: Devices over which a copy is spread, each with a micro-batch of its own. -1: all that are left.
        tensor: Devices that share the work on one micro-batch.
        devices: Devices of all processes to use; None takes all there are.

    Raises:
        UserError: The product is not the number of devices.
    """

    def __init__(self, data: int = 1, fsdp: int = -1, tensor: int = 1, devices: Sequence[jax.Device] | None = None):
        devices = list(devices or jax.devices())
        sizes, count = {"data": data, "fsdp": fsdp, "tensor": tensor}, len(devices)
        wanted = f"strategy: mesh sizes data {data}, fsdp {fsdp}, tensor {tensor}"
        free = [name for name, size in sizes.items() if size == -1]
        if len(free) > 1 or any(size < 1 for size in sizes.values() if size != -1):
            raise UserError(f"{wanted}: each must be 1 or more, or one of them -1 for all devices that are left.")
        if free:
            sizes[free[0]] = count // math.prod(size for size in sizes.values() if size != -1)
        if math.prod(sizes.values()) != count:
            raise UserError(f"{wanted} do not make up the number of devices, which is {count}. Change one of them so "
                            f"that their product is {count}.")
        grid = np.array(devices).reshape(*sizes.values())
        self.mesh = Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
        self.num_shares, self.num_devices = sizes["data"] * sizes["fsdp"], count
        self.local_shares = tuple(sorted({place // sizes["tensor"] for place in _own(devices)}))
        self._replicated = NamedSharding(self.mesh, PartitionSpec())
        self._by_share = NamedSharding(self.mesh, PartitionSpec(SHARE_AXES))
        self._told = False

    def sharding(self, name: str, shape: tuple[int, ...]) -> NamedSharding:
        """Where an array of the state lies, from its dotted path and its shape alone."""
        axes = next((axes for pattern, axes in TABLE if re.search(pattern, name)), ())
        if len(axes) > len(shape):
            return self._replicated
        sizes = [math.prod(self.mesh.shape[a] for a in ([axis] if isinstance(axis, str) else axis or ()))
                 for axis in axes]
        trailing = shape[len(shape) - len(axes):]
        divides = [length % size == 0 for length, size in zip(trailing, sizes, strict=True)]
        if not all(divides) and not self._told:
            self._told = True
            say(f"Some dimensions are not divisible by the mesh {dict(self.mesh.shape)} and stay whole on each device, "
                f"the first of them in {name} {list(shape)}.")
        fitting = [axis if fits else None for axis, fits in zip(axes, divides, strict=True)]
        return NamedSharding(self.mesh, PartitionSpec(*[None] * (len(shape) - len(axes)), *fitting))

    def shardings(self, tree: Tree) -> Tree:
        """`sharding` of each leaf of a state."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self.sharding(jax.tree_util.keystr(path, simple=True, separator="."), leaf.shape), tree)

    def compile(self, function, inputs, outputs, donate=()):
        layouts = {"scalar": self._replicated, "batch": self._by_share}
        compiled: list[Any] = []

        def program(args):
            if not compiled:  # a state's layout depends on its leaves, which only the arguments tell
                results = jax.eval_shape(function, *args)
                out = tuple(self.shardings(result) if kind == "state" else layouts[kind]
                            for kind, result in zip(outputs, results, strict=True))
                compiled.append(jax.jit(function, donate_argnums=donate, out_shardings=out))
            return compiled[0]

        def step(*args):
            with jax.set_mesh(self.mesh):
                return program(args)(*args)

        def lower(*args):
            with jax.set_mesh(self.mesh):
                return program(args).lower(*args)

        return Compiled(step, lower, self.mesh.size)

    def put_state(self, tree):
        return jax.tree.map(_place, tree, self.shardings(jax.tree.map(np.asarray, tree)))

    def put_batch(self, batch):
        return {name: self._place_shares(x) for name, x in batch.items()}

    def _place_shares(self, x: np.ndarray) -> Array:
        first = {share: place for place, share in enumerate(self.local_shares)}

        def part(index):
            shares = range(self.num_shares)[index[0]]
            return x[[first[share] for share in shares]] if len(shares) > 1 else x[first[shares[0]]][None]

        return jax.make_array_from_callback((self.num_shares, *x.shape[1:]), self._by_share, part)

    def put_scalars(self, scalars):
        return jax.device_put(scalars, self._replicated)

    def fetch_state(self, tree):
        return jax.tree.map(_whole, tree)

    def fetch_rows(self, tree):
        return jax.tree.map(self._own_rows, tree)

    def _own_rows(self, x: Array) -> np.ndarray:
        parts = {range(self.num_shares)[shard.index[0]]: shard.data for shard in x.addressable_shards}
        return np.concatenate([np.asarray(parts[shares]) for shares in sorted(parts, key=lambda shares: shares[0])])


def num_shares_here() -> int:
    """Inside a step: how many shares the arrays in sight hold, one after the other."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in SHARE_AXES if axis in mesh.axis_names)


def constrain(x: Array, spec: PartitionSpec) -> Array:
    """Inside a step on a mesh: lay `x` out so. Elsewhere it stays as it is."""
    on_mesh = all(axis in jax.sharding.get_abstract_mesh().axis_names for axis in SHARE_AXES)
    return jax.lax.with_sharding_constraint(x, spec) if on_mesh else x


def _place(x: np.ndarray, sharding: NamedSharding) -> Array:
    return jax.make_array_from_callback(np.shape(x), sharding, lambda index: np.asarray(x)[index])


def _whole(x: Array) -> np.ndarray:
    return np.array(x) if x.is_fully_addressable else np.array(multihost_utils.process_allgather(x, tiled=True))


def _own(devices: Sequence[jax.Device]) -> tuple[int, ...]:
    """Places of this process's devices among all."""
    return tuple(place for place, device in enumerate(devices) if device.process_index == jax.process_index())


class Compiled:
    """A step, compiled for each shape it is called with.

    On several CPU devices each call is finished before the next is sent off: their threads come from one pool, and
    steps in flight that wait for each other's devices stop for ever.

    Args:
        call: The program.
        lower: The same arguments -> the program as jax.stages.Lowered.
        num_devices: How many it runs on.
    """

    def __init__(self, call: Callable, lower: Callable, num_devices: int):
        self._call, self.lower = call, lower
        self._waits = jax.default_backend() == "cpu" and num_devices > 1

    def __call__(self, *args: Any) -> Any:
        results = self._call(*args)
        return jax.block_until_ready(results) if self._waits else results
