"""Hardware of a run: a table of devices with their vendors' figures, and a target, present or described by its name.

    8xH100  64xA100-80GB  L4        a number of GPUs of a kind
    v5e-16  v5p-64                  a TPU slice by its cloud name: v4 and v5p count cores, two per chip
    cpu  4xcpu                      this machine's processor, as one device or as several simulated ones
"""

import os
import platform
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from lmmods.core.errors import UserError
from lmmods.core.redaction import redacted

Platform = Literal["cpu", "gpu", "tpu"]  # as JAX calls them

GIGA, TERA = 10**9, 10**12
# Fraction of a GPU's memory for a run on either engine. The rest is for memory that the engines' allocators do not
# count: the CUDA context (half a GiB on an H100), kernels, workspaces of cuBLAS and cuDNN, and NCCL's buffers.
USABLE = 0.9


@dataclass(frozen=True)
class DeviceKind:
    """A device with the figures of its data sheet.

    Args:
        name: Name in a target's name.
        driver: Part of the name that its driver reports.
        memory: Bytes.
        peak: Dense FLOP/s by dtype: `bfloat16`, `float16`, `float32` (TF32, or one pass of bfloat16 on a TPU, if that
            is the device's default for products).
        bandwidth: Bytes/s of its memory.
        link: Bytes/s in each direction to devices of its node; for a TPU, of its slice.
        network: Bytes/s of the node's network per device, as in the vendor's own servers.
        per_node: Number of linked devices.
        cores: Cores per chip that the name of a TPU slice counts.
    """

    name: str
    platform: Platform
    driver: str
    memory: float
    peak: dict[str, float] = field(hash=False)
    bandwidth: float
    link: float
    network: float
    per_node: int = 8
    cores: int = 1

    @property
    def flops(self) -> float:
        """Dense FLOP/s in 16 bits."""
        return self.peak.get("bfloat16", self.peak.get("float16", 0.0))


def _gpu(name: str, driver: str, gigabytes: float, tera: float, tera32: float, bandwidth: float, link: float,
         network: float, per_node: int = 8, bfloat16: bool = True) -> DeviceKind:
    """Build the entry of a GPU: memory in GB, arithmetic in TFLOP/s, the rest in GB/s."""
    narrow = {"float16": tera * TERA} | ({"bfloat16": tera * TERA} if bfloat16 else {})
    return DeviceKind(name, "gpu", driver, gigabytes * GIGA, narrow | {"float32": tera32 * TERA}, bandwidth * GIGA,
                      link * GIGA, network * GIGA, per_node)


def _tpu(name: str, driver: str, gibibytes: int, tera: float, bandwidth: float, link: float, cores: int = 1
         ) -> DeviceKind:
    """Build the entry of a TPU, like `_gpu`, but with memory in GiB."""
    return DeviceKind(name, "tpu", driver, gibibytes * 2**30, dict.fromkeys(("bfloat16", "float32"), tera * TERA),
                      bandwidth * GIGA, link * GIGA, 3.125 * GIGA, 10**6, cores=cores)


# From vendors' data sheets: without sparsity, 16 bits with float32 accumulation; NVLink and PCIe per direction. More
# specific driver names come first, because the first match counts.
KINDS = (
    _gpu("B200", "B200", 180, 2250, 1125, 8000, 900, 50),
    _gpu("H200", "H200", 141, 989.4, 494.7, 4800, 450, 50),
    _gpu("H100-NVL", "H100 NVL", 94, 835.5, 417.5, 3900, 300, 25, 2),
    _gpu("H100-PCIe", "H100 PCIe", 80, 756, 378, 2000, 64, 25),
    _gpu("H100", "H100", 80, 989.4, 494.7, 3350, 450, 50),
    _gpu("A100-80GB", "A100-SXM4-80GB", 80, 312, 156, 2039, 300, 25),
    _gpu("A100-PCIe", "A100 80GB PCIe", 80, 312, 156, 1935, 32, 12.5),
    _gpu("A100", "A100", 40, 312, 156, 1555, 300, 25),
    _gpu("L40S", "L40S", 48, 362, 183, 864, 32, 12.5),
    _gpu("L4", "L4", 24, 121, 60.5, 300, 32, 1.5625),
    _gpu("A10", "A10", 24, 125, 62.5, 600, 32, 1.5625),
    _gpu("RTX5090", "5090", 32, 209.5, 104.8, 1792, 64, 1.25),
    _gpu("RTX4090", "4090", 24, 165.2, 82.6, 1008, 32, 1.25),
    _gpu("RTX3090", "3090", 24, 71, 35.6, 936, 32, 1.25),
    _gpu("V100", "V100", 32, 125, 15.7, 900, 150, 12.5, bfloat16=False),
    _gpu("T4", "T4", 16, 65, 8.1, 320, 16, 1.5625, bfloat16=False),
    _tpu("v6e", "TPU v6 lite", 32, 918, 1640, 400),
    _tpu("v5e", "TPU v5 lite", 16, 197, 819, 200),
    _tpu("v5p", "TPU v5", 95, 459, 2765, 600, 2),
    _tpu("v4", "TPU v4", 32, 275, 1228, 300, 2),
)


@dataclass(frozen=True)
class Target:
    """The devices of a run, present or only described.

    Args:
        device: Name of a device, as its driver reports it.
        memory: Bytes of one device; on CPUs, of all devices together.
        kind: Its entry in the table; None for processors and unknown devices.
        is_here: True if programs can run on it, so that kernels can be tried before use.
        is_simulated: True if its programs are compiled for CPU devices instead, which lack its kernels.
    """

    platform: Platform
    device: str
    num_devices: int
    memory: float
    kind: DeviceKind | None = None
    is_here: bool = True
    is_simulated: bool = False

    def peak(self, dtype: str) -> float | None:
        """Return the FLOP/s of one device in this dtype; None if unknown."""
        return None if self.kind is None else self.kind.peak.get(dtype)

    def link(self, num_devices: int) -> float | None:
        """Return the bytes/s between one of `num_devices` devices and the others, over the slowest link among them."""
        if self.kind is None:
            return None
        return self.kind.link if num_devices <= self.kind.per_node else min(self.kind.link, self.kind.network)

    def usable_bytes(self, fraction: float) -> float:
        """Return the bytes of one device that are available to a run.

        Args:
            fraction: Fraction of a GPU's memory.
        """
        if self.platform == "cpu":
            return self.memory / self.num_devices
        return self.memory * fraction if self.platform == "gpu" else self.memory

    def access_seconds(self, num_bytes: float) -> float | None:
        """Return the seconds in which one device reads or writes this many bytes of its memory; None if unknown."""
        return None if self.kind is None else num_bytes / self.kind.bandwidth

    def __str__(self) -> str:
        return f"{self.num_devices} x {self.kind.name if self.kind else self.device}"


def no_device(accelerator: str, engine: str, reason: str = "") -> UserError:
    """Build the error for an engine that does not find the device type of `trainer.accelerator`.

    Args:
        reason: Message of the engine's library.
    """
    details = f" ({reason.rstrip('.')})" if reason else ""
    return UserError(f"trainer.accelerator is {accelerator}, but {engine} finds none on this machine{details}. Set it "
                     "to auto, which uses what is available; python train.py doctor lists that.")


def kind_of(device: str) -> DeviceKind | None:
    """Look up a device in the table by the name that its driver reports; None if it is unknown."""
    return next((kind for kind in KINDS if re.search(rf"(?<![A-Za-z0-9]){kind.driver}(?![0-9])", device)), None)


def peak_flops(device: str) -> float | None:
    """Return the peak FLOP/s of a known device in 16 bits, by the name that its driver reports."""
    kind = kind_of(device)
    return None if kind is None else kind.flops


def target_named(name: str) -> Target:
    """Return the target described by a name like 8xH100, v5e-16 or cpu.

    Raises:
        UserError: The name is not valid, or the device is unknown.
    """
    tpu = re.fullmatch(r"(?:TPU)?(v\d[a-z]*)-(\d+)", name, re.I)
    other = re.fullmatch(r"(?:(\d+)x)?([A-Za-z]\S*)", name)
    device = (tpu[1] if tpu else other[2] if other else "").lower()
    count = int(tpu[2] if tpu else (other and other[1]) or 1)
    if device == "cpu" and count:
        return Target("cpu", "CPU", count, memory_limit() or psutil.virtual_memory().total, is_here=False)
    kind = next((kind for kind in KINDS if kind.name.lower() == device and (kind.platform == "tpu") == bool(tpu)), None)
    if kind is None or not count or count % kind.cores:
        gpus, tpus = (", ".join(kind.name for kind in KINDS if kind.platform == platform)
                      for platform in ("gpu", "tpu"))
        raise UserError(f"--on {name} is not a target. Use a number and a device: 8xH100, v5e-16, cpu. GPUs: {gpus}. "
                        f"TPUs: {tpus}; after the dash comes the number of chips, or for v4 and v5p of cores, two per "
                        "chip.")
    return Target(kind.platform, kind.driver, count // kind.cores, kind.memory, kind, is_here=False)


# ---------------------------------------------------------------------------------------------------------------------
# Facts about this machine that need no library: processor, memory, caches, variables that change numbers.

# Variables that choose devices, threads, kernels or precision; not those that only locate files.
_CHANGES_NUMBERS = re.compile(
    r"(?:CUDA_(?:VISIBLE_DEVICES|LAUNCH_BLOCKING|DEVICE_ORDER)|ROCR_VISIBLE_DEVICES|CUBLAS\w*|CUDNN\w*"
    r"|NVIDIA_TF32_OVERRIDE|TORCH_(?:ALLOW_TF32|BLAS|DETERMINISTIC)\w*|TORCHINDUCTOR\w*"
    r"|(?:OMP|MKL|KMP|GOMP|OPENBLAS|DNNL|ATEN|BLIS)_\w+|ONEDNN_(?!PRIMITIVE_CACHE)\w+"
    r"|XLA_\w+|LIBTPU_\w+|NCCL_(?:ALGO|PROTO)|BNB_CUDA_VERSION|JAX_(?!COMPILATION_CACHE|PERSISTENT_CACHE)\w+|PYTHONHASHSEED)")
COMPILED = "xla"  # subfolder of the cache: programs compiled by XLA
REFERENCE = "reference"  # prefix of folders there: log-probabilities of preference data under the reference model
_NO_NUMBERS = re.compile(r"\w+_(?:DIR|PATH|HOME|CACHE|LOG|LOGS|VERBOSE|DUMP_TO|WAIT_POLICY|SPINCOUNT|BLOCKTIME)")


def processor() -> str:
    """Return the name of the processor."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def variables() -> dict[str, str]:
    """Return the environment variables that change numbers, redacted."""
    return redacted({name: value for name, value in sorted(os.environ.items())
                     if _CHANGES_NUMBERS.fullmatch(name) and not _NO_NUMBERS.fullmatch(name)})


def memory_limit() -> int | None:
    """Return the memory limit of a container in bytes (cgroups 1 and 2); None if there is none."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 2**60:  # cgroups 1 write a number near 2^63 for none
            return int(text)
    return None


def cache_folder(folder: str | None = None) -> Path:
    """Return the folder of tokenised data and compiled programs: `folder`, else $LMMODS_CACHE, else ~/.cache/lmmods.

    Raises:
        UserError: It cannot be a path.
    """
    folder = folder or os.environ.get("LMMODS_CACHE")
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lmmods"
    try:
        path = Path(folder or default).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):  # created, or rejected, at the first write
            path.stat()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder!r} cannot be used as the cache folder ({error}); set data.cache_dir or LMMODS_CACHE "
                        "to a folder that can be read and written") from error
    return path
