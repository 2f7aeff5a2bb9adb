"""Protocol of a benchmark worker: it reports after its warm-up and after each round, then waits for the driver.

This module imports only the standard library, as workers run in their own environments.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path


class Rounds:
    """Counter of optimiser steps that sends a JSON line to the driver after each round and waits for a line back.

    The process exits when the driver closes its standard input. Create the counter after importing the libraries, as it
    records their memory.

    Args:
        settings: Settings: `warm_up`, steps before the first report; `steps` per round; `launched`, when the driver
            started this process, in seconds of the monotonic clock.
        stride: Number of steps per call of `record_step`; `warm_up` and `steps` are multiples of it.
        peak: Function that returns the peak memory in GiB, by default that of the process and its children.
    """

    def __init__(self, settings: dict, stride: int = 1, peak: Callable[[], float] | None = None):
        if settings["warm_up"] % stride or settings["steps"] % stride:
            raise ValueError(f"{settings['warm_up']} and {settings['steps']} steps are not multiples of {stride}")
        self._steps_left, self._steps, self._stride = settings["warm_up"], settings["steps"], stride
        self._tokens, self._launched, self._libraries = 0, settings["launched"], _peak()
        self._peak = peak or _peak
        self._spent: dict[str, float] = {}
        self._reports = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print must not reach the driver
        self._start()

    def record_ready(self) -> None:
        """Record that everything but the loss of the check batch is ready for training."""
        self._ready = time.monotonic() - self._launched

    def record_loss(self, loss: float) -> None:
        """Record the loss per target token of the check batch before training."""
        self._loss = loss

    def record_time(self, part: str, seconds: float) -> None:
        """Add to the time of a part of the round."""
        self._spent[part] = self._spent.get(part, 0.0) + seconds

    def record_step(self, tokens: int) -> None:
        """Record `stride` optimiser steps with this total number of real tokens.

        The number may be a tensor on a GPU, which is read at the end of the round.
        """
        self._tokens += tokens
        self._steps_left -= self._stride
        if self._steps_left == 0:
            self._report()
            self._steps_left, self._tokens, self._spent = self._steps, 0, {}
            self._start()

    @property
    def is_last_step(self) -> bool:
        """True if the next `record_step` ends a round, so that the caller must wait for work on the device."""
        return self._steps_left == self._stride

    def _start(self) -> None:
        self._cpu, self._wall = _cpu(), time.perf_counter()

    def _report(self) -> None:
        cpu, wall = _cpu() - self._cpu, time.perf_counter() - self._wall
        print(json.dumps({"tokens": int(self._tokens), "cpu": cpu, "wall": wall, "peak": self._peak(),
                          "loss": self._loss, "libraries": self._libraries, "ready": self._ready,
                          "spent": self._spent}), file=self._reports, flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # exits from within a library's loop


def _cpu() -> float:
    """Return the CPU seconds of this process and its children."""
    ticks = sum(sum(map(int, fields[11:15])) for fields in _children().values())
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _peak() -> float:
    """Return the peak memory of this process plus the current memory of its children, in GiB."""
    # Not `ru_maxrss`, which starts at the memory of the driver that started this process.
    kibibytes = _kibibytes(Path("/proc/self/status"), "VmHWM")
    return (kibibytes + sum(_kibibytes(child / "smaps_rollup", "Pss") for child in _children())) / 2**20


def _kibibytes(path: Path, name: str) -> int:
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return int(lines[name].split()[0]) if name in lines else 0  # a process that has just exited has none


def _children() -> dict[Path, list[str]]:
    """Return the /proc folders of running child processes, with the fields of `stat` after the name."""
    children = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has exited
            fields = path.read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == os.getpid():
                children[path.parent] = fields
    return children


def read_settings() -> dict:
    """Return the driver's settings: the JSON on the command line."""
    return json.loads(sys.argv[1])


def read_rows(folder: str) -> list[dict[str, list[int]]]:
    """Return the training rows as token ids, as our data module encodes them."""
    return [json.loads(line) for line in (Path(folder) / "rows.jsonl").open()]


def read_check(folder: str) -> dict[str, list]:
    """Return the check batch, with arrays as nested lists."""
    return json.loads((Path(folder) / "check.json").read_text())
