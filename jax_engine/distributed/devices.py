"""Devices and processes of a run: selection, start-up, and collective calls on the host."""

import atexit
import ctypes
import os
import pickle
import platform
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import Any

import jax
import numpy as np
from jax import Array
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_engine.distributed.interface import Compiled, Parallel, own_positions, place_leaves
from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.pool import larger_pool
from jax_engine.distributed.target import lowering_platforms, target
from lmmods.core.errors import UserError, first_line
from lmmods.core.hardware import COMPILED, Target, cache_folder, no_device
from lmmods.core.peers import Peers, cannot_meet
from lmmods.runs.checkpoint import Shards, own_shard

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # constants of malloc.h
VIRTUAL_DEVICES = "xla_force_host_platform_device_count"


@dataclass
class MeshSharding:
    """A mesh of devices over which parameters, optimiser state and batches are sharded.

    Args:
        data: Number of copies of the parameters.
        fsdp: Devices over which a copy is sharded, each with a micro-batch of its own. -1: all remaining devices.
        sequence: Devices that share a micro-batch, each with a part of every row: for rows too long for one device.
        tensor: Devices that share a micro-batch, each with a part of every matrix.
        expert: Devices over which the experts of a layer are sharded, each with a micro-batch of its own.
    """

    data: int = 1
    fsdp: int = -1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1


def start(accelerator: str, devices: int | str, num_nodes: int, strategy: str | MeshSharding, detect_anomaly: bool,
          heartbeat_timeout: int | None = None) -> Parallel:
    """Connect to the other processes, if any, select the devices and distribute the run over them.

    Several processes are started by SLURM, torchrun or by hand (docs/cluster.md).

    Raises:
        UserError: There are fewer devices or processes than requested, or no device of this accelerator.
    """
    if accelerator != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(accelerator, accelerator))
    # JAX without a plug-in for other devices can only run on CPUs. It must not be asked: that would initialise it,
    # after which the settings below have no effect.
    on_cpu = jax.config.jax_platforms == "cpu" or accelerator == "auto" and not entry_points(group="jax_plugins")
    if VIRTUAL_DEVICES not in os.environ.get("XLA_FLAGS", ""):
        if devices not in ("auto", -1, 1):
            with suppress(RuntimeError):  # the backend is initialised already; the number of devices is checked below
                jax.config.update("jax_num_cpu_devices", int(devices))
        elif on_cpu:
            keep_freed_memory()
    if detect_anomaly:
        jax.config.update("jax_debug_nans", True)
    # Before the first use of a device, too.
    _join(num_nodes, heartbeat_timeout)
    _keep_compiled()
    try:
        with larger_pool():
            local = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError if no JAX plug-in supports the platform
        reason = first_line(error).partition(" (set JAX_PLATFORMS")[0]
        raise no_device(accelerator, "JAX", reason) from error
    wanted = len(local) if devices in ("auto", -1) else int(devices)
    if not 1 <= wanted <= len(local):
        raise UserError(f"trainer.devices is {devices}, but this machine has {len(local)} ({local[0].platform}). "
                        "Lower it, or set it to auto.")
    # The first `wanted` devices of each process, so that every process takes part.
    by_process: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device)
    chosen = [device for process in sorted(by_process) for device in by_process[process][:wanted]]
    return spread(strategy, chosen)


def spread(strategy: str | MeshSharding, devices: Sequence[jax.Device], on: Target | None = None) -> Parallel:
    """Return the distribution over these devices that `trainer.strategy` asks for.

    Args:
        on: The target that steps are only lowered for; None if they run on the devices.
    """
    if strategy in ("auto", "ddp"):
        return Replicas(devices, on)
    mesh = strategy if isinstance(strategy, MeshSharding) else MeshSharding()
    return ShardedMesh(mesh.data, mesh.fsdp, mesh.sequence, mesh.tensor, mesh.expert, devices, on)


def keep_freed_memory() -> None:
    """Let glibc reuse freed memory instead of returning it to the system after each step.

    XLA on CPUs allocates the activations of each step anew, and the kernel zeroes every page of them, which takes a
    third of the time of a small model. Dispatch becomes synchronous, because only the calling thread's heap can grow
    that large; for the same reason this is for a single device, since several would run in threads of their own. Does
    nothing with another C library, or if the environment sets one of glibc's MALLOC_ variables. Call it before the
    first use of a device.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, -1)
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def choose_precision(on: Target | None = None) -> tuple[str, str]:
    """Return the precision that `trainer.precision: auto` selects on a `target`, and the reason."""
    on = target(on)
    if on.platform == "cpu":
        return "32-true", "the default of JAX on CPUs"
    if on.platform == "gpu" and not (float(jax.local_devices()[0].compute_capability) >= 8 if on.is_here
                                     else "bfloat16" in on.kind.peak):
        return "32-true", "this GPU does not multiply bfloat16"
    return "bf16-mixed", f"this {on.platform.upper()} multiplies bfloat16"


def keep_float32(precision: str, platform: str) -> None:
    """Compute products of float32 in float32 under `32-true`, as torch does; by default GPUs round their factors to 10
    bits (TF32) and TPUs to bfloat16. A choice by JAX_DEFAULT_MATMUL_PRECISION stays. CPUs never round.
    """
    if precision == "32-true" and platform != "cpu" and jax.config.jax_default_matmul_precision is None:
        jax.config.update("jax_default_matmul_precision", "highest")


def describe(parallel: Parallel) -> dict[str, Any]:
    """Return manifest.json's entries for the devices and the settings that affect numerics; keys as on torch."""
    device = jax.devices()[0]
    return {"accelerator": device.platform, "device": device.device_kind, "num_devices": parallel.num_devices,
            "num_processes": jax.process_count(), "strategy": type(parallel).__name__,
            "settings": {"driver": device.client.platform_version, "x64": jax.config.jax_enable_x64,
                         "matmul_precision": jax.config.jax_default_matmul_precision}}


def peak_memory() -> int | None:
    """Return the peak bytes in use on the first device; None if it does not report them, as on CPUs."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _join(num_nodes: int, heartbeat_timeout: int | None) -> None:
    """Connect the processes of several machines (jax.distributed)."""
    launched = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", "1")))
    if num_nodes == 1 and launched == 1 or jax.distributed.is_initialized():
        return
    # JAX kills a process that waits for a lost one. Its timeout must be longer than that of `Peers`, which reports why.
    asked: dict[str, Any] = {"heartbeat_timeout_seconds": max(100, 2 * (heartbeat_timeout or 0))}
    host, size, rank = (os.environ.get(name) for name in ("MASTER_ADDR", "WORLD_SIZE", "RANK"))
    port = int(os.environ.get("MASTER_PORT", "29500")) + 1
    if host:  # torchrun, which uses MASTER_PORT itself (hence the next port), or the same variables set by hand
        if not (size and rank):
            raise UserError("MASTER_ADDR is set in the environment, but WORLD_SIZE or RANK is not. Set all three for "
                            "each process (docs/cluster.md), or none for a single one.")
        asked |= {"coordinator_address": f"{host}:{port}", "num_processes": int(size), "process_id": int(rank)}
        if rank == "0":
            _check_free(host, port)
    try:
        jax.distributed.initialize(**asked)
    except ValueError as error:  # no coordinator address in the environment
        raise UserError(f"trainer.num_nodes is {num_nodes}, but nothing in the environment says where the other "
                        f"processes are ({first_line(error).rstrip('.')}). Start one on each machine by torchrun or "
                        "srun (docs/cluster.md).") from error
    except RuntimeError as error:
        raise cannot_meet(host or "the first machine", port, first_line(error)) from error
    atexit.register(_part_after_failure)  # registered last, so it runs before JAX's own handler
    if jax.process_count() % num_nodes:
        raise UserError(f"trainer.num_nodes is {num_nodes}, but {jax.process_count()} processes were started.")


def _part_after_failure() -> None:
    """If this process has failed, keep JAX from waiting five minutes at exit for a joint shutdown."""
    if Peers.end_alone():
        forget_the_others()


def _check_free(host: str, port: int) -> None:
    """Raise UserError if another program uses the coordinator's port; gRPC would share it without an error."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise cannot_meet(host, port, error.strerror) from error


def _keep_compiled() -> None:
    """Enable the persistent compilation cache, next to the data cache."""
    if jax.config.jax_compilation_cache_dir is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / COMPILED))


def barrier(name: str) -> None:
    """Wait for all processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def from_first(value: Any) -> Any:
    """Return the first process's `value` on every process (broadcast). All processes must call this."""
    return gather({0: value} if jax.process_index() == 0 else {})[0]


def any_of(flag: bool) -> bool:
    """Return True if `flag` is true on any process. All processes must call this."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def on_first(function: Callable[[], Any]) -> Any:
    """Call `function` on the first process only; return its result, or raise its UserError, on every process."""
    if jax.process_count() == 1:
        return function()
    outcome: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            outcome["value"] = function()
        except UserError as error:
            outcome["mistake"] = error
    outcome = gather(outcome)
    if "mistake" in outcome:
        raise outcome["mistake"]
    return outcome["value"]


def gather(parts: dict[Any, Any]) -> dict[Any, Any]:
    """Return the union of all processes' mappings, on every process (all-gather)."""
    if jax.process_count() == 1:
        return parts
    # An all-gather takes arrays of one shape: exchange the sizes first, then pad to the largest.
    own = np.frombuffer(pickle.dumps(parts), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(own)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(own)] = own
    everywhere = multihost_utils.process_allgather(padded)
    return {key: value for part, size in zip(everywhere, sizes, strict=True)
            for key, value in pickle.loads(part[:size].tobytes()).items()}


# ---------------------------------------------------------------------------------------------------------------------
# Data parallelism: a full replica of the state on every device.

_AXIS = "replica"


class Replicas(Parallel):
    """`jax.pmap`: every device holds the whole state and works on its own micro-batch.

    Args:
        devices: Devices to use, of all processes; None takes all devices.
        on: The target that steps are only lowered for; None if they run on the devices.
    """

    def __init__(self, devices: Sequence[jax.Device] | None = None, on: Target | None = None) -> None:
        self._on, devices = on, list(devices or jax.devices())
        self.data_parallel_size = self.num_devices = len(devices)
        self.local_ranks = own_positions(devices)
        self._devices = devices
        self._mesh = Mesh(np.array([devices[rank] for rank in self.local_ranks]), (_AXIS,), axis_types=(AxisType.Auto,))

    def compile(self, function, inputs, outputs, donate=()):
        def local(_, *args):
            # `pmap` has taken the rank axis off; steps see the one visible rank as [1, B, ...].
            args = [jax.tree.map(lambda x: x[None], arg) if kind == "batch" else arg
                    for kind, arg in zip(inputs, args, strict=True)]
            results = function(*args)
            return tuple(jax.tree.map(lambda x: x[0], result) if kind == "batch" else result
                         for kind, result in zip(outputs, results, strict=True))

        if self._on is not None:
            return self._outline(local, inputs, outputs, donate)
        step = jax.pmap(local, axis_name=_AXIS, devices=self._devices,
                        donate_argnums=tuple(place + 1 for place in donate),
                        in_axes=(0, *(None if kind == "scalar" else 0 for kind in inputs)),
                        out_axes=tuple(None if kind == "scalar" else 0 for kind in outputs))
        # pmap needs at least one mapped argument, and a step may have none: pass the ranks as an unused first one
        first = self._place(np.array(self.local_ranks))
        return Compiled(partial(step, first), partial(step.lower, first), self.data_parallel_size)

    def _outline(self, local, inputs, outputs, donate):
        """Build the equivalent of `jax.pmap` with `shard_map`, which can be lowered for devices that are absent."""
        mesh = Mesh(np.array(self._devices), (_AXIS,), axis_types=(AxisType.Auto,))
        specs, results = ([PartitionSpec() if kind == "scalar" else PartitionSpec(_AXIS) for kind in kinds]
                          for kinds in (inputs, outputs))

        def step(*args):
            # `shard_map` keeps the axis, with length 1, where `pmap` removes it.
            mapped = local(None, *(arg if kind == "scalar" else jax.tree.map(lambda x: x[0], arg)
                                   for kind, arg in zip(inputs, args, strict=True)))
            return tuple(result if kind == "scalar" else jax.tree.map(lambda x: x[None], result)
                         for kind, result in zip(outputs, mapped, strict=True))

        sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=tuple(specs), out_specs=tuple(results),
                                        check_vma=False), donate_argnums=donate)

        def lower(*args):
            return sharded.trace(*args).lower(lowering_platforms=lowering_platforms(self._on))

        return Compiled(sharded, lower, self.data_parallel_size)

    def sum(self, tree):
        return jax.lax.psum(tree, _AXIS)

    def outline(self, tree, kind):
        # A replica of the state per device. Batches have their rank axis already, scalars need none.
        lead = (self.data_parallel_size,) if kind == "state" else ()
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), tree)

    def put_state(self, tree):
        # A broadcast view: one copy on the host serves all devices.
        return place_leaves(lambda x: self._place(np.broadcast_to(x, (len(self.local_ranks), *np.shape(x)))), tree)

    def put_batch(self, batch):
        return {name: self._place(x) for name, x in batch.items()}

    def put_scalars(self, scalars):
        return jax.device_put(scalars, NamedSharding(self._mesh, PartitionSpec()))

    def fetch_state(self, tree):
        # All replicas are equal. A copy, because the next step reuses the buffers of the state.
        return jax.tree.map(lambda x: np.array(x.addressable_shards[0].data[0]), tree)

    def replica(self, tree):
        return jax.tree.map(lambda x: x.addressable_shards[0].data[0], tree)

    def shapes(self, tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)

    def fetch_rows(self, tree):
        return jax.tree.map(np.array, tree)

    def shards(self, tree):
        # Every process holds everything, and writes its share of it.
        return jax.tree.map(lambda x: Shards(x.shape[1:], own_shard(
            (0,) * (x.ndim - 1), x.addressable_shards[0].data[0], jax.process_index(), jax.process_count())), tree)

    def _place(self, x: np.ndarray) -> Array:
        sharding = NamedSharding(self._mesh, PartitionSpec(_AXIS))
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


# ---------------------------------------------------------------------------------------------------------------------
# Private JAX APIs, checked against JAX 0.10 to 0.12. Each use is covered by tests/compat/test_jax.py.

def forget_the_others() -> None:
    """Detach this process from `jax.distributed`, so that it can exit without the others.

    JAX waits five minutes at exit for all processes to shut down together, and no argument or public function changes
    that.
    """
    state = distributed.global_state
    for connected in (state.preemption_sync_manager, state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connected))  # leak them: their destructors would wait, too
    state.preemption_sync_manager = state.client = state.service = None
