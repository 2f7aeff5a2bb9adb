"""Data parallelism: a full copy of the state on every device."""

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_engine.distributed.interface import Compiled, Parallel, own_positions, placed
from jax_engine.distributed.target import lowering_platforms
from lmmods.runs.checkpoint_pieces import Pieces, own_part

_AXIS = "replica"


class Replicas(Parallel):
    """`jax.pmap`: every device holds the whole state and works on its own micro-batch.

    Args:
        devices: Devices to use, of all processes; None takes all there are.
    """

    def __init__(self, devices: Sequence[jax.Device] | None = None) -> None:
        devices = list(devices or jax.devices())
        self.data_parallel_size = self.num_devices = len(devices)
        self.local_ranks = own_positions(devices)
        self._devices = devices
        self._mesh = Mesh(np.array([devices[rank] for rank in self.local_ranks]), (_AXIS,), axis_types=(AxisType.Auto,))

    def compile(self, function, inputs, outputs, donate=()):
        def local(_, *args):
            args = [jax.tree.map(lambda x: x[None], arg) if kind == "batch" else arg
                    for kind, arg in zip(inputs, args, strict=True)]
            results = function(*args)
            return tuple(jax.tree.map(lambda x: x[0], result) if kind == "batch" else result
                         for kind, result in zip(outputs, results, strict=True))

        if lowering_platforms() is not None:
            return self._outlined(local, inputs, outputs, donate)
        step = jax.pmap(local, axis_name=_AXIS, devices=self._devices,
                        donate_argnums=tuple(place + 1 for place in donate),
                        in_axes=(0, *(None if kind == "scalar" else 0 for kind in inputs)),
                        out_axes=tuple(None if kind == "scalar" else 0 for kind in outputs))
        # pmap needs at least one mapped argument, and a step may have none: hence the first one
        first = self._place(np.array(self.local_ranks))
        return Compiled(partial(step, first), partial(step.lower, first), self.data_parallel_size)

    def _outlined(self, local, inputs, outputs, donate):
        """The program of `jax.pmap`, to be lowered for devices that are not here, which pmap cannot do."""
        mesh = Mesh(np.array(self._devices), (_AXIS,), axis_types=(AxisType.Auto,))
        specs, results = ([PartitionSpec() if kind == "scalar" else PartitionSpec(_AXIS) for kind in kinds]
                          for kinds in (inputs, outputs))

        def step(*args):
            mapped = local(None, *(arg if kind == "scalar" else jax.tree.map(lambda x: x[0], arg)
                                   for kind, arg in zip(inputs, args, strict=True)))
            return tuple(result if kind == "scalar" else jax.tree.map(lambda x: x[None], result)
                         for kind, result in zip(outputs, mapped, strict=True))

        sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=tuple(specs), out_specs=tuple(results),
                                        check_vma=False), donate_argnums=donate)

        def lower(*args):
            return sharded.trace(*args).lower(lowering_platforms=lowering_platforms())

        return Compiled(sharded, lower, self.data_parallel_size)

    def sum(self, tree):
        return jax.lax.psum(tree, _AXIS)

    def outline(self, tree, kind):
        lead = (self.data_parallel_size,) if kind == "state" else ()
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), tree)

    def put_state(self, tree):
        return placed(lambda x: self._place(np.broadcast_to(x, (len(self.local_ranks), *np.shape(x)))), tree)

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
        # The very first device gets the whole sum, all others zeros: adding up over devices gives the same again.
        is_first = np.array(self.local_ranks) == 0
        return jax.tree.map(lambda x: self._place(np.where(
            is_first.reshape(-1, *[1] * np.ndim(x)), x, np.zeros(np.shape(x), x.dtype))), tree)

    def add_up(self, tree):
        return self.compile(lambda tree: (self.sum(tree),), ("state",), ("state",))(tree)[0]

    def pieces(self, tree):
        return jax.tree.map(lambda x: Pieces(x.shape[1:], own_part(
            (0,) * (x.ndim - 1), x.addressable_shards[0].data[0], jax.process_index(), jax.process_count())), tree)

    def _place(self, x: np.ndarray) -> Array:
        sharding = NamedSharding(self._mesh, PartitionSpec(_AXIS))
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
