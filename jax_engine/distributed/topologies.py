"""Devices that are not here, for XLA to compile for: of TPUs (jax[tpu]), of GPUs (jax[cuda12]), or simulated ones."""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec

import jax
from jax.experimental import topologies

from lmmods.core.errors import UserError
from lmmods.core.hardware import Target

# What XLA must know of a GPU beside its memory, from the vendor's tables: multiprocessors, float32 lanes of one, KiB of
# shared memory of one and of a block, MiB of cache, GHz, compute capability.
GPUS = {"H100": (132, 128, 228, 227, 50, 1.98, (9, 0)), "H200": (132, 128, 228, 227, 50, 1.98, (9, 0)),
        "H100-PCIe": (114, 128, 228, 227, 50, 1.755, (9, 0)), "A100": (108, 64, 164, 163, 40, 1.41, (8, 0)),
        "A100-80GB": (108, 64, 164, 163, 40, 1.41, (8, 0)), "A100-PCIe": (108, 64, 164, 163, 40, 1.41, (8, 0)),
        "L4": (58, 128, 100, 99, 48, 2.04, (8, 9)), "L40S": (142, 128, 100, 99, 96, 2.52, (8, 9)),
        "A10": (72, 128, 100, 99, 6, 1.695, (8, 6)), "RTX4090": (128, 128, 100, 99, 72, 2.52, (8, 9))}


def plugin(on: Target) -> str | None:
    """The package of JAX that compiles for a target; None: what is here does, or nothing."""
    if on.platform == "tpu":
        return "libtpu"
    return "jax_cuda12_plugin" if on.kind is not None and on.kind.name in GPUS else None


def has(package: str) -> bool:
    """Whether this environment has it."""
    return find_spec(package) is not None


def devices_of(on: Target) -> tuple[Sequence[jax.Device], bool]:
    """Devices to lower and compile for, and whether they are simulated ones of this machine's processor.

    Raises:
        UserError: JAX has started already, with fewer devices than are to be simulated.
    """
    jax.config.update("jax_platforms", "cpu")
    package = plugin(on)
    if package is None or not has(package):
        with suppress(RuntimeError):  # they are there already; their number is checked
            jax.config.update("jax_num_cpu_devices", on.num_devices)
        found = jax.devices("cpu")[:on.num_devices]
        if len(found) < on.num_devices:
            raise UserError(f"--on: JAX has started with {len(found)} devices, so {on.num_devices} cannot be "
                            "simulated. Plan in a process of its own.")
        return found, on.platform != "cpu"
    if on.platform == "gpu":
        found = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=_description(on),
                                             topology=f"1x1x{on.num_devices}")
    else:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no server to ask what is attached
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several plans at once: none uses a chip
        bounds = tpu_shape(on)
        # As one host, so that this process counts as that of all devices.
        found = topologies.get_topology_desc(
            platform="tpu", chips_per_host_bounds=bounds, wrap=tpu_rings(bounds, on.kind.cores == 1),
            topology_name=f"{on.kind.name}:" + "x".join(map(str, bounds[:2] if on.kind.cores == 1 else bounds)))
    return found.devices[:on.num_devices], False


def tpu_shape(on: Target) -> tuple[int, int, int]:
    """Chips of a slice along each axis: v5e and v6e lie in a plane, v4 and v5p in space; as even as it goes.

    Raises:
        UserError: Their number is no power of two.
    """
    bits = on.num_devices.bit_length() - 1
    if on.num_devices != 1 << bits:
        raise UserError(f"--on: no slice of {on.kind.name} has {on.num_devices} chips: take a power of two.")
    axes = 2 if on.kind.cores == 1 else 3
    shape = [1 << ((bits + place) // axes) for place in range(axes)]
    assert math.prod(shape) == on.num_devices
    return (*shape, 1)[:3] if axes == 2 else tuple(shape)


def tpu_rings(shape: tuple[int, int, int], is_plane: bool) -> tuple[bool, bool, bool]:
    """Along which axes the last chip of a slice is linked with the first: of whole pods of v5e and v6e, 16 x 16 chips,
    and of slices of v4 and v5p that are made of cubes of 4 x 4 x 4.
    """
    if is_plane:
        return (shape == (16, 16, 1),) * 2 + (False,)
    return (all(size % 4 == 0 for size in shape),) * 3


def _description(on: Target) -> str:
    """A GPU in the words of XLA's GpuTargetConfigProto."""
    cores, lanes, shared, block, cache, clock, (major, minor) = GPUS[on.kind.name]
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
          shared_memory_per_core: {shared * 1024} threads_per_core_limit: {2048 if minor == 0 else 1536}
          core_count: {cores} fpus_per_core: {lanes} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
          block_dim_limit_z: 65535 memory_bandwidth: {int(on.kind.bandwidth)} l2_cache_size: {cache * 2**20}
          clock_rate_ghz: {clock} device_memory_size: {int(on.memory)} shared_memory_per_block_optin: {block * 1024}
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 28 }}
        runtime_version {{ major: 12 minor: 9 patch: 0 }}
        device_description_str: "NVIDIA {on.device}"
    """
