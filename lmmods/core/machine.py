"""What is known of this machine without any library: processor, memory, caches, variables that change numbers."""

import os
import platform
import re
import sys
from contextlib import suppress
from pathlib import Path

from lmmods.core.errors import UserError
from lmmods.core.redaction import redacted

# Variables that choose devices, threads, kernels or precision; not those that only say where files lie.
_CHANGES_NUMBERS = re.compile(
    r"(?:CUDA_(?:VISIBLE_DEVICES|LAUNCH_BLOCKING|DEVICE_ORDER)|ROCR_VISIBLE_DEVICES|CUBLAS\w*|CUDNN\w*"
    r"|NVIDIA_TF32_OVERRIDE|TORCH_(?:ALLOW_TF32|BLAS|DETERMINISTIC)\w*|TORCHINDUCTOR\w*"
    r"|(?:OMP|MKL|KMP|GOMP|OPENBLAS|DNNL|ATEN|BLIS)_\w+|ONEDNN_(?!PRIMITIVE_CACHE)\w+"
    r"|XLA_\w+|LIBTPU_\w+|NCCL_(?:ALGO|PROTO)|BNB_CUDA_VERSION|JAX_(?!COMPILATION_CACHE|PERSISTENT_CACHE)\w+|PYTHONHASHSEED)")
COMPILED = "xla"  # in the cache folder: programs that XLA has compiled
REFERENCE = "reference"  # there, with a key: log-probabilities under the reference of preference optimisation
_NO_NUMBERS = re.compile(r"\w+_(?:DIR|PATH|HOME|CACHE|LOG|LOGS|VERBOSE|DUMP_TO)")


def processor() -> str:
    """The name of the processor."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def variables() -> dict[str, str]:
    """Variables of the environment that change numbers, without secrets."""
    return redacted({name: value for name, value in sorted(os.environ.items())
                     if _CHANGES_NUMBERS.fullmatch(name) and not _NO_NUMBERS.fullmatch(name)})


def memory_limit() -> int | None:
    """Bytes that a container leaves to its processes (cgroups 1 and 2); None where nothing limits them."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 2**60:  # cgroups 1 write a number near 2^63 for none
            return int(text)
    return None


def cache_folder(named: str | None = None) -> Path:
    """Where tokenised data and compiled programs are kept: as named, else $LMMODS_CACHE, else lmmods in ~/.cache.

    Raises:
        UserError: No path can be called so.
    """
    named = named or os.environ.get("LMMODS_CACHE")
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lmmods"
    try:
        path = Path(named or default).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):  # it is made, or refused, when something is written
            path.stat()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{named!r} cannot be a folder for the cache ({error}); set data.cache_dir or LMMODS_CACHE "
                        "to one that can be read and written") from error
    return path
