"""Measure the peak memory of a function in its own process (`tests.forks`)."""

import ctypes
import gc
from collections.abc import Callable

M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1


def give_back() -> None:
    """Return the memory of freed arrays to the system from now on, so that resident memory is memory in use."""
    for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        ctypes.CDLL(None).mallopt(parameter, 1 << 16)


def taken(work: Callable[[], None]) -> int:
    """Return the peak resident bytes while `work` runs, minus those before."""
    gc.collect()
    before = _status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    work()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1024
