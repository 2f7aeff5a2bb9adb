"""How much memory work takes in a process of its own (`tests.forks`), at the worst moment."""

import ctypes
import gc
from collections.abc import Callable

M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1


def give_back() -> None:
    """From now on every larger array is mapped, and unmapped when it is freed: what is resident is in use."""
    for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        ctypes.CDLL(None).mallopt(parameter, 1 << 16)


def taken(work: Callable[[], None]) -> int:
    """Bytes that are resident at most while this runs, more than before."""
    gc.collect()
    before = _status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forgets the most
    work()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1024
