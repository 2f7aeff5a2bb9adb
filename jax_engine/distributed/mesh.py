"""Fully sharded data, context, tensor and expert parallelism: state and batches sharded over a mesh, by a table."""

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_engine.distributed.interface import (
    DATA_AXES,
    SEQUENCE,
    Compiled,
    Parallel,
    local_positions,
    on_mesh,
    place_leaves,
)
from jax_engine.distributed.target import lowering_platforms
from jax_engine.distributed.tree import Tree
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.hardware import Target
from lmmods.runs.checkpoint import Shards, slice_for_process

# Parameters are also sharded over `expert` and `sequence`, so that devices along these axes store no copies.
_FSDP = ("fsdp", "expert", SEQUENCE)
# Pattern in a parameter's dotted path -> the mesh axes over which each of its trailing dimensions is sharded; () or no
# match: replicated. The first match counts. Leading dimensions (stacked layers) are never sharded. Matrices are
# [out, in], as in torch. Optimiser state is sharded like its parameter, because its path ends with the parameter's. An
# axis listed for two dimensions shards the first one that it divides: rows before columns, since shards of whole rows
# are contiguous, and a TPU gathers columns only in multiples of its 128 lanes.
SHARDING: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    # Vectors, and convolutions by feature: too small to be worth sharding.
    (r"exp_avg_sq_(row|col)|norm|bias|magnitude|A_log|linear_attn\.conv", ()),
    # By rows only: if a table is sharded by columns, XLA either materialises the looked-up rows in full to reshard them
    # to the activations' layout, or gathers the activations along `tensor` in every layer.
    (r"embed\.\w+\.weight$|\bhead\.weight$", (("tensor", *_FSDP), ())),
    (r"\.(nested|row_absmax)", ()),  # scales of quantised weights
    (r"attn\.(o|out)\.weight\b|mlp\.down\.weight\b", (_FSDP, ("tensor", *_FSDP))),  # row-parallel: inputs are split
    (r"experts\.\w+_proj$", (("expert", "tensor"), _FSDP, _FSDP)),  # whole experts, each for its tokens
    (r"experts\.\w+_proj\.", (("expert", "tensor", "fsdp", SEQUENCE), _FSDP)),  # 4-bit codes, concatenated by rows
    # LoRA matrices are sharded like the weight they adapt: otherwise XLA would reshard their output, which is as wide
    # as the layer's.
    (r"(attn\.(o|out)|mlp\.down)\.lora_A$", ((), ("tensor", *_FSDP))),
    (r"(attn\.(o|out)|mlp\.down|experts\.\w+)\.lora_B$", (_FSDP, ())),
    (r"lora_A$", ((), _FSDP)),
    (r"lora_B$", (("tensor", *_FSDP), ())),
    (r"\.weight\b", (("tensor", *_FSDP), _FSDP)),  # all other matrices, column-parallel: split over outputs
)


def partition(name: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return the mesh axes that shard each dimension, by the table; an axis that divides no dimension is omitted.

    Args:
        name: Dotted path of the array in the state.
        sizes: Size of each mesh axis.
    """
    candidates, used, dimensions = _find_axes(name, shape), set(), []
    for length, axes in zip(shape[len(shape) - len(candidates):], candidates, strict=True):
        chosen: tuple[str, ...] = ()
        for axis in axes:
            # An array can use an axis for one dimension only, and the product of a dimension's axes must divide it.
            if axis not in used and length % math.prod(sizes[other] for other in (*chosen, axis)) == 0:
                chosen += (axis,)
        used |= set(chosen)
        dimensions.append(chosen)
    return [()] * (len(shape) - len(candidates)) + dimensions


def _find_axes(name: str, shape: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    axes = next((axes for pattern, axes in SHARDING if re.search(pattern, name)), ())
    return axes if len(axes) <= len(shape) else ()


def gather(name: str, tree: Tree) -> Tree:
    """All-gather the arrays of `tree` along all axes but `tensor`, inside a step on a mesh; elsewhere return `tree`.

    Their gradients are sharded again (reduce-scatter).

    Args:
        name: Dotted path of the tree in the state.
    """
    if not on_mesh():
        return tree
    mesh = jax.sharding.get_abstract_mesh()

    def gather(path: Any, leaf: Array) -> Array:
        dimensions = partition(".".join(filter(None, (name, _dotted(path)))), leaf.shape, mesh.shape)
        # `tensor` stays: devices along it share a product, each with its part of the matrix.
        whole = PartitionSpec(*[tuple(axis for axis in axes if axis == "tensor") for axes in dimensions])
        if not jnp.issubdtype(leaf.dtype, jnp.floating):  # quantised codes, which have no gradient
            return jax.lax.with_sharding_constraint(leaf, whole)
        return _gather(PartitionSpec(*dimensions), whole, leaf)

    return jax.tree_util.tree_map_with_path(gather, tree)


def look_up(table: Array, ids: Array) -> Array:
    """Return rows [B, T, D] of a table [V, D] for ids [B, T]; ids out of range give NaN.

    On a mesh, a table sharded by rows is resharded by columns, and every device looks up its columns for all ids, with
    an all-to-all before and after. No device ever holds the whole table or its gradient.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    axes = tuple(axis for axis in ("tensor", *_FSDP) if sizes.get(axis, 1) > 1)
    if not on_mesh() or not axes or any(length % math.prod(sizes[axis] for axis in axes) for length in table.shape):
        return jnp.take(table, ids, axis=0)
    # Both constraints also apply to the gradient, which is computed by columns and then resharded by rows. Without
    # them, XLA may materialise the whole gradient on every device.
    for spec in (PartitionSpec(axes), PartitionSpec(None, axes)):
        table = jax.lax.with_sharding_constraint(table, spec)
    rows = jnp.take(table, jax.lax.with_sharding_constraint(ids, PartitionSpec("data")), axis=0)
    # Move the sharding from columns to rows one axis at a time, the innermost first, because shards are nested.
    inner_axes = tuple(axis for axis in axes if axis != SEQUENCE)
    for spec in (("data", None, axes), ("data", SEQUENCE, inner_axes), (DATA_AXES, SEQUENCE, "tensor"),
                 (DATA_AXES, SEQUENCE)):
        rows = jax.lax.with_sharding_constraint(rows, PartitionSpec(*spec))
    return rows


# A custom gradient: a plain constraint would also constrain the gradient to `whole`, with an all-reduce instead of a
# reduce-scatter.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(shards: PartitionSpec, whole: PartitionSpec, x: Array) -> Array:
    return jax.lax.with_sharding_constraint(x, whole)


_gather.defvjp(lambda shards, whole, x: (_gather(shards, whole, x), None),
               lambda shards, whole, _, gradient: (jax.lax.with_sharding_constraint(gradient, shards),))


def _dotted(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


class ShardedMesh(Parallel):
    """Sharding with `jax.jit` over a mesh: parameters and optimiser state by `SHARDING`, batches over `DATA_AXES`.

    Args:
        data: Number of copies of the parameters.
        fsdp: Number of devices over which each copy is sharded, each with its own micro-batch. -1: all that remain.
        sequence: Number of devices that share a micro-batch, each with a part of every row (context parallelism).
        tensor: Number of devices that share a micro-batch, each with a part of every matrix (tensor parallelism).
        expert: Number of devices over which each layer's experts are sharded, each with its own micro-batch (expert
            parallelism). They exchange tokens before and after the experts.
        devices: Devices to use, of all processes. Default: all devices.
        on: Target that steps are only lowered for; None if they run on the devices.

    Raises:
        UserError: The product of the sizes is not the number of devices.
    """

    def __init__(self, data: int = 1, fsdp: int = -1, sequence: int = 1, tensor: int = 1, expert: int = 1,
                 devices: Sequence[jax.Device] | None = None, on: Target | None = None):
        self._on, devices = on, list(devices or jax.devices())
        sizes = {"data": data, "fsdp": fsdp, "expert": expert, SEQUENCE: sequence, "tensor": tensor}
        count = len(devices)
        requested = "trainer.strategy: mesh sizes " + ", ".join(f"{name} {size}" for name, size in sizes.items())
        free = [name for name, size in sizes.items() if size == -1]
        if len(free) > 1 or any(size < 1 for size in sizes.values() if size != -1):
            raise UserError(f"{requested} are not valid. Set each to 1 or more, or one of them to -1 for all remaining "
                            "devices.")
        if free:
            sizes[free[0]] = count // math.prod(size for size in sizes.values() if size != -1)
        if math.prod(sizes.values()) != count:
            raise UserError(f"{requested} do not fit {count} devices. Change one of them so that their product is "
                            f"{count}.")
        # The axes of ranks (DATA_AXES) come first, so the devices that share a rank are consecutive.
        grid = arrange_devices(devices, tuple(sizes.values()))
        self.mesh = Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
        self.data_parallel_size, self.num_devices = math.prod(sizes[axis] for axis in DATA_AXES), count
        self.expert_size, self.context_parallel_size = sizes["expert"], sizes[SEQUENCE]
        devices_per_rank = count // self.data_parallel_size
        # A process that has only some of a rank's devices also supplies the rank's rows.
        self.local_ranks = tuple(sorted({index // devices_per_rank for index in local_positions(list(grid.flat))}))
        self._replicated = NamedSharding(self.mesh, PartitionSpec())
        self._over_ranks = NamedSharding(self.mesh, PartitionSpec(DATA_AXES))
        self._reported = False

    def sharding(self, name: str, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of an array of the state, from its dotted path and shape only."""
        dimensions = partition(name, shape, self.mesh.shape)
        # Report once that an axis of the table shards no dimension of an array.
        if not self._reported and set(chain(*_find_axes(name, shape))) != set(chain(*dimensions)):
            self._reported = True
            say(f"Some dimensions are not divisible by the mesh {dict(self.mesh.shape)} and are not sharded, which "
                f"takes more memory; the first one is in {name} {list(shape)}.")
        return NamedSharding(self.mesh, PartitionSpec(*dimensions))

    def shardings(self, tree: Tree) -> Tree:
        """Return the `sharding` of each leaf of a state."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self.sharding(_dotted(path), leaf.shape), tree)

    def compile(self, function, inputs, outputs, donate=()):
        layouts = {"scalar": self._replicated, "batch": self._over_ranks}
        compiled: list[Any] = []

        def program(args):
            if not compiled:  # a state's shardings depend on its leaves, which are unknown before the first call
                results = jax.eval_shape(function, *args)
                out = tuple(self.shardings(result) if kind == "state" else layouts[kind]
                            for kind, result in zip(outputs, results, strict=True))
                compiled.append(jax.jit(function, donate_argnums=donate, out_shardings=out))
            return compiled[0]

        def step(*args):
            # Tracing needs the mesh as well: `on_mesh` and `constrain` use it.
            with jax.set_mesh(self.mesh):
                return program(args)(*args)

        def lower(*args):
            with jax.set_mesh(self.mesh):
                return program(args).trace(*args).lower(lowering_platforms=lowering_platforms(self._on))

        return Compiled(step, lower, self.mesh.size)

    def outline(self, tree, kind):
        layout = {"batch": self._over_ranks, "scalar": self._replicated}.get(kind)
        layouts = self.shardings(tree) if layout is None else jax.tree.map(lambda _: layout, tree)
        return jax.tree.map(lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), tree, layouts)

    def put_state(self, tree):
        return place_leaves(_place, tree, self.shardings(tree))

    def put_batch(self, batch):
        return {name: self._place_rows(x) for name, x in batch.items()}

    def _place_rows(self, x: np.ndarray) -> Array:
        # x contains only the rows of this process's ranks, [local ranks, B, ...]. A device requests its part by global
        # index.
        local_index = {rank: position for position, rank in enumerate(self.local_ranks)}

        def read_part(index):
            ranks = range(self.data_parallel_size)[index[0]]
            return x[[local_index[rank] for rank in ranks]] if len(ranks) > 1 else x[local_index[ranks[0]]][None]

        return jax.make_array_from_callback((self.data_parallel_size, *x.shape[1:]), self._over_ranks, read_part)

    def put_scalars(self, scalars):
        return jax.device_put(scalars, self._replicated)

    def fetch_state(self, tree):
        return jax.tree.map(_to_host, tree)

    def shards(self, tree):
        return jax.tree.map(_copy_shards, tree)

    def fetch_rows(self, tree):
        return jax.tree.map(self._local_rows, tree)

    def _local_rows(self, x: Array) -> np.ndarray:
        # Devices that share a rank have copies of its rows: keep one of them.
        parts = {range(self.data_parallel_size)[shard.index[0]]: shard.data for shard in x.addressable_shards}
        return np.concatenate([np.asarray(parts[ranks]) for ranks in sorted(parts, key=lambda ranks: ranks[0])])


def arrange_devices(devices: Sequence[jax.Device], sizes: tuple[int, ...]) -> np.ndarray:
    """Arrange devices as a grid of these sizes.

    On a TPU slice, neighbours along an axis are physically linked. In plain device order, host by host, XLA for v5p
    replaces the all-gather of shards with an all-reduce of whole arrays that are mostly zero.
    """
    if devices[0].platform != "tpu" or not _is_box(devices):
        return np.array(devices).reshape(sizes)
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def _is_box(devices: Sequence[jax.Device]) -> bool:
    """Return True if the chips fill a box of coordinates in one slice, with one device per chip."""
    extents = (max(along) - min(along) + 1 for along in zip(*(device.coords for device in devices), strict=True))
    # No two devices on a chip, no gaps, and one slice.
    return (len({tuple(device.coords) for device in devices}) == len(devices) == math.prod(extents)
            and len({getattr(device, "slice_index", 0) for device in devices}) == 1)


def _place(x: np.ndarray, sharding: NamedSharding) -> Array:
    host = np.asarray(x) if isinstance(x, Array) else x  # lazy arrays stay lazy
    parts: dict[str, np.ndarray] = {}  # read once, although several devices may need the same part

    def part(index: tuple[slice, ...]) -> np.ndarray:
        if str(index) not in parts:
            parts[str(index)] = np.asarray(host[index])
        return parts[str(index)]

    return jax.make_array_from_callback(host.shape, sharding, part)


def _copy_shards(x: Array) -> Shards:
    # Devices with copies of a shard divide the writing among them, by the index of their copy.
    different = {str(index) for index in x.sharding.devices_indices_map(x.shape).values()}
    copies = len(x.sharding.device_set) // len(different)
    parts = [slice_for_process(tuple(rows.indices(size)[0] for rows, size in zip(shard.index, x.shape, strict=True)),
                               shard.data, shard.replica_id, copies) for shard in x.addressable_shards]
    return Shards(x.shape, tuple(chain.from_iterable(parts)))


def _to_host(x: Array) -> np.ndarray:
    # A copy, because the next step reuses the buffers of the state.
    return np.array(x) if x.is_fully_addressable else np.array(multihost_utils.process_allgather(x, tiled=True))
