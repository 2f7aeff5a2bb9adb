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

from jax_engine.distributed.interface import Compiled, Parallel, local_positions, place_leaves
from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.pool import larger_pool
from jax_engine.distributed.target import lowering_platforms, target
from lmmods.core.errors import UserError, first_line
from lmmods.core.hardware import COMPILED, Target, cache_folder, no_device
from lmmods.core.peers import Peers, cannot_meet
from lmmods.runs.checkpoint import Shards, slice_for_process

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # constants of malloc.h
VIRTUAL_DEVICES = "xla_force_host_platform_device_count"


@dataclass
class MeshSharding:
    """Mesh of devices over which parameters, optimiser state and batches are sharded.

    Args:
        data: Number of copies of the parameters.
        fsdp: Number of devices over which each copy is sharded, each with its own micro-batch. -1: all that remain.
        sequence: Number of devices that share a micro-batch, each with a part of every row, for rows too long for one.
        tensor: Number of devices that share a micro-batch, each with a part of every matrix.
        expert: Number of devices over which each layer's experts are sharded, each with its own micro-batch.
    """

    data: int = 1
    fsdp: int = -1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1


def start(accelerator: str, devices: int | str, num_nodes: int, strategy: str | MeshSharding, detect_anomaly: bool,
          heartbeat_timeout: int | None = None) -> Parallel:
    """Connect to the other processes, if any, select the devices and distribute the run over them.

    SLURM, torchrun or the user starts the processes (docs/cluster.md).

    Raises:
        UserError: There are fewer devices or processes than requested, or no such accelerator.
    """
    if accelerator != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(accelerator, accelerator))
    # JAX without a plug-in for other devices can only run on CPUs. Asking JAX would initialise it, after which the
    # settings below have no effect.
    on_cpu = jax.config.jax_platforms == "cpu" or accelerator == "auto" and not entry_points(group="jax_plugins")
    if VIRTUAL_DEVICES not in os.environ.get("XLA_FLAGS", ""):
        if devices not in ("auto", -1, 1):
            with suppress(RuntimeError):  # already initialised; the number of devices is checked below
                jax.config.update("jax_num_cpu_devices", int(devices))
        elif on_cpu:
            keep_freed_memory()
    if detect_anomaly:
        jax.config.update("jax_debug_nans", True)
    # Before the first use of a device, like the settings above.
    _connect_processes(num_nodes, heartbeat_timeout)
    _enable_compilation_cache()
    try:
        with larger_pool():
            local = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError if no JAX plug-in supports the platform
        reason = first_line(error).partition(" (set JAX_PLATFORMS")[0]
        raise no_device(accelerator, "JAX", reason) from error
    num_local = len(local) if devices in ("auto", -1) else int(devices)
    if not 1 <= num_local <= len(local):
        raise UserError(f"trainer.devices is {devices}, but this machine has {len(local)} ({local[0].platform}). "
                        "Lower it, or set it to auto.")
    # The first `num_local` devices of each process, so that every process takes part.
    by_process: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device)
    chosen = [device for process in sorted(by_process) for device in by_process[process][:num_local]]
    return spread(strategy, chosen)


def spread(strategy: str | MeshSharding, devices: Sequence[jax.Device], on: Target | None = None) -> Parallel:
    """Return the distribution over these devices that `trainer.strategy` requests.

    Args:
        on: Target that steps are only lowered for; None if they run on the devices.
    """
    if strategy in ("auto", "ddp"):
        return Replicas(devices, on)
    mesh = strategy if isinstance(strategy, MeshSharding) else MeshSharding()
    return ShardedMesh(mesh.data, mesh.fsdp, mesh.sequence, mesh.tensor, mesh.expert, devices, on)


def keep_freed_memory() -> None:
    """Let glibc reuse freed memory instead of returning it to the system after each step.

    XLA on CPUs reallocates the activations in each step, and the kernel zeroes all of their pages, which takes a third
    of a small model's time. Dispatch becomes synchronous, because only the calling thread's heap can grow that large.
    For the same reason, use it for a single device: several devices run in separate threads. It does nothing with
    another C library, or if the environment sets one of glibc's MALLOC_ variables. Call it before the first use of a
    device.
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
    """Compute float32 products in float32 under `32-true`, as torch does.

    By default, GPUs round the factors to 10 bits (TF32) and TPUs to bfloat16; CPUs never round. The environment
    variable JAX_DEFAULT_MATMUL_PRECISION overrides this.
    """
    if precision == "32-true" and platform != "cpu" and jax.config.jax_default_matmul_precision is None:
        jax.config.update("jax_default_matmul_precision", "highest")


def describe(parallel: Parallel) -> dict[str, Any]:
    """Return manifest.json's entries on devices and settings that affect numerics, with the same keys as on torch."""
    device = jax.devices()[0]
    return {"accelerator": device.platform, "device": device.device_kind, "num_devices": parallel.num_devices,
            "num_processes": jax.process_count(), "strategy": type(parallel).__name__,
            "settings": {"driver": device.client.platform_version, "x64": jax.config.jax_enable_x64,
                         "matmul_precision": jax.config.jax_default_matmul_precision}}


def peak_memory() -> int | None:
    """Return the peak bytes in use on the first device; None if it does not report them, as on CPUs."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _connect_processes(num_nodes: int, heartbeat_timeout: int | None) -> None:
    """Connect the processes of several machines (jax.distributed)."""
    launched = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", "1")))
    if num_nodes == 1 and launched == 1 or jax.distributed.is_initialized():
        return
    # JAX kills a process that waits for a lost one. Its timeout must exceed that of `Peers`, which reports the reason.
    options: dict[str, Any] = {"heartbeat_timeout_seconds": max(100, 2 * (heartbeat_timeout or 0))}
    host, size, rank = (os.environ.get(name) for name in ("MASTER_ADDR", "WORLD_SIZE", "RANK"))
    port = int(os.environ.get("MASTER_PORT", "29500")) + 1
    if host:  # from torchrun, which uses MASTER_PORT itself (hence the next port), or set by hand
        if not (size and rank):
            raise UserError("MASTER_ADDR is set in the environment, but WORLD_SIZE or RANK is not. Set all three in "
                            "each process (docs/cluster.md), or none for a single process.")
        options |= {"coordinator_address": f"{host}:{port}", "num_processes": int(size), "process_id": int(rank)}
        if rank == "0":
            _check_port_free(host, port)
    try:
        jax.distributed.initialize(**options)
    except ValueError as error:  # no coordinator address in the environment
        raise UserError(f"trainer.num_nodes is {num_nodes}, but the environment does not contain the address of the "
                        f"first process ({first_line(error).rstrip('.')}). Start a process on each machine with "
                        "torchrun or srun (docs/cluster.md).") from error
    except RuntimeError as error:
        raise cannot_meet(host or "the first machine", port, first_line(error)) from error
    atexit.register(_detach_after_failure)  # registered last, so it runs before JAX's own handler
    if jax.process_count() % num_nodes:
        raise UserError(f"trainer.num_nodes is {num_nodes}, but {jax.process_count()} processes were started. Start "
                        "one on each machine with torchrun or srun (docs/cluster.md).")


def _detach_after_failure() -> None:
    """If this process has failed, prevent JAX from waiting five minutes at exit for a joint shutdown."""
    if Peers.end_alone():
        detach_process()


def _check_port_free(host: str, port: int) -> None:
    """Raise UserError if another program uses the coordinator's port, which gRPC would silently share."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise cannot_meet(host, port, error.strerror) from error


def _enable_compilation_cache() -> None:
    """Enable the persistent compilation cache, next to the data cache."""
    if jax.config.jax_compilation_cache_dir is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / COMPILED))


def barrier(name: str) -> None:
    """Wait for all processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def broadcast(value: Any) -> Any:
    """Return the first process's `value` on every process (broadcast). All processes must call this."""
    return gather({0: value} if jax.process_index() == 0 else {})[0]


def any_of(flag: bool) -> bool:
    """Return True if `flag` is true on any process. All processes must call this."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def call_on_first(function: Callable[[], Any]) -> Any:
    """Call `function` on the first process only; return its result, or raise its UserError, on every process."""
    if jax.process_count() == 1:
        return function()
    outcome: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            outcome["value"] = function()
        except UserError as error:
            outcome["error"] = error
    outcome = gather(outcome)
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def gather(parts: dict[Any, Any]) -> dict[Any, Any]:
    """Return the union of all processes' mappings, on every process (all-gather)."""
    if jax.process_count() == 1:
        return parts
    # An all-gather needs equal shapes: exchange the sizes first, then pad to the largest.
    local = np.frombuffer(pickle.dumps(parts), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(local)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(local)] = local
    gathered = multihost_utils.process_allgather(padded)
    return {key: value for part, size in zip(gathered, sizes, strict=True)
            for key, value in pickle.loads(part[:size].tobytes()).items()}


# ---------------------------------------------------------------------------------------------------------------------
# Data parallelism: a full replica of the state on every device.

_AXIS = "replica"


class Replicas(Parallel):
    """Data parallelism with `jax.pmap`: every device has the whole state and its own micro-batch.

    Args:
        devices: Devices to use, of all processes. Default: all devices.
        on: Target that steps are only lowered for; None if they run on the devices.
    """

    def __init__(self, devices: Sequence[jax.Device] | None = None, on: Target | None = None) -> None:
        self._on, devices = on, list(devices or jax.devices())
        self.data_parallel_size = self.num_devices = len(devices)
        self.local_ranks = local_positions(devices)
        self._devices = devices
        self._mesh = Mesh(np.array([devices[rank] for rank in self.local_ranks]), (_AXIS,), axis_types=(AxisType.Auto,))

    def compile(self, function, inputs, outputs, donate=()):
        def local(_, *args):
            # `pmap` has removed the rank axis; steps see the one visible rank as [1, B, ...].
            args = [jax.tree.map(lambda x: x[None], arg) if kind == "batch" else arg
                    for kind, arg in zip(inputs, args, strict=True)]
            results = function(*args)
            return tuple(jax.tree.map(lambda x: x[0], result) if kind == "batch" else result
                         for kind, result in zip(outputs, results, strict=True))

        if self._on is not None:
            return self._outline(local, inputs, outputs, donate)
        step = jax.pmap(local, axis_name=_AXIS, devices=self._devices,
                        donate_argnums=tuple(index + 1 for index in donate),
                        in_axes=(0, *(None if kind == "scalar" else 0 for kind in inputs)),
                        out_axes=tuple(None if kind == "scalar" else 0 for kind in outputs))
        # `pmap` needs at least one mapped argument, which a step may lack: pass the ranks as an unused first one.
        first = self._place(np.array(self.local_ranks))
        return Compiled(partial(step, first), partial(step.lower, first), self.data_parallel_size)

    def _outline(self, local, inputs, outputs, donate):
        """Build the equivalent of `jax.pmap` with `shard_map`, which can be lowered for absent devices."""
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
        # The state has a replica per device. Batches already have a rank axis, and scalars need none.
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
        # Every process has the whole state and writes a part of it.
        return jax.tree.map(lambda x: Shards(x.shape[1:], slice_for_process(
            (0,) * (x.ndim - 1), x.addressable_shards[0].data[0], jax.process_index(), jax.process_count())), tree)

    def _place(self, x: np.ndarray) -> Array:
        sharding = NamedSharding(self._mesh, PartitionSpec(_AXIS))
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


# ---------------------------------------------------------------------------------------------------------------------
# Private JAX APIs, checked with JAX 0.10 to 0.12. tests/compat/test_jax.py covers each use.

def detach_process() -> None:
    """Detach this process from `jax.distributed`, so that it can exit without the others.

    JAX waits five minutes at exit for all processes to shut down together, and no argument or public function changes
    that.
    """
    state = distributed.global_state
    for connected in (state.preemption_sync_manager, state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connected))  # leak them: their destructors would wait as well
    state.preemption_sync_manager = state.client = state.service = None
