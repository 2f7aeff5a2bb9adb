"""How torch's threads wait for each other on a CPU: spinning, or asleep.

By default a thread that has finished its part of an operation spins until the other threads have finished. That is
fastest while every thread has a core. Next to another busy program it is several times slower: the spinning thread uses
time in which the thread that it waits for could run. OpenMP reads the setting once, when torch is imported.
"""

import os
import time

import psutil

# Variables by which users choose; with one thread there is nothing to wait for.
CHOSEN_BY = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
SECONDS = 0.1  # duration of the measurement; the system counts in hundredths of a second
BUSY_CORES = 0.5  # cores used by other programs from which on threads sleep


def sleep_if_busy() -> str | None:
    """Make torch's threads sleep while they wait, if other programs use the cores. Call before torch is imported.

    Changes nothing if the user has set one of `CHOSEN_BY`, or in a process that a launcher has started: the launcher's
    other processes would count as other programs.

    Returns:
        A line for the console if threads will sleep.
    """
    if "LOCAL_RANK" in os.environ or any(name in os.environ for name in CHOSEN_BY):
        return None
    busy = busy_cores(SECONDS)
    if busy < BUSY_CORES:
        return None
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    return (f"Other programs use {busy:.1f} CPU cores: torch's threads sleep while they wait for each other "
            "(OMP_WAIT_POLICY=PASSIVE).")


def busy_cores(seconds: float) -> float:
    """Sleep for some seconds, and return how many of the cores that this process may use were busy meanwhile."""
    start, busy = time.perf_counter(), _cpu_seconds()
    time.sleep(seconds)
    return (_cpu_seconds() - busy) / (time.perf_counter() - start)


def _cpu_seconds() -> float:
    """Return the CPU time of all programs since the start of the machine, on the cores that this process may use."""
    times = psutil.cpu_times(percpu=True)
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        times = [core for index, core in enumerate(times) if index in allowed]
    # Guests are counted as user time, too. Time stolen by the machine's host counts: nothing runs here meanwhile.
    idle = ("idle", "iowait", "guest", "guest_nice")
    return sum(seconds for core in times for name, seconds in core._asdict().items() if name not in idle)
