"""A worker's side of a benchmark: it reports after its warm-up and after each round, and waits to be told to go on.

Nothing but the standard library is imported here, as workers live in environments of their own.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path


class Rounds:
    """Counts optimiser steps; at the end of a round one JSON line goes to the driver, one line comes back.

    The process ends when the driver closes its standard input. Make it once the libraries are imported: what memory
    they take is noted here.

    Args:
        asked: Settings: `warm_up`, steps before the first report; `steps`, of a round; `launched`, when the driver
            started this process, in seconds of the monotonic clock.
        stride: Steps that each call of `step` stands for; `warm_up` and `steps` are multiples of it.
    """

    def __init__(self, asked: dict, stride: int = 1):
        if asked["warm_up"] % stride or asked["steps"] % stride:
            raise ValueError(f"{asked['warm_up']} and {asked['steps']} steps are not multiples of {stride}")
        self._left, self._steps, self._stride = asked["warm_up"], asked["steps"], stride
        self._tokens, self._launched, self._libraries = 0, asked["launched"], _peak()
        self._spent: dict[str, float] = {}
        self._reports = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print must not reach the driver
        self._start()

    def ready(self) -> None:
        """Note that training could begin now, had it not to wait for the check batch."""
        self._ready = time.monotonic() - self._launched

    def start_loss(self, loss: float) -> None:
        """Note the loss per scored token of the check batch before training."""
        self._loss = loss

    def spend(self, what: str, seconds: float) -> None:
        """Note a part of the round's time."""
        self._spent[what] = self._spent.get(what, 0.0) + seconds

    def step(self, tokens: int) -> None:
        """Note `stride` optimiser steps, together over so many real tokens."""
        self._tokens += tokens
        self._left -= self._stride
        if self._left == 0:
            self._report()
            self._left, self._tokens, self._spent = self._steps, 0, {}
            self._start()

    @property
    def closing(self) -> bool:
        """Whether the next call of `step` ends a round: what still runs on a device must then be waited for."""
        return self._left == self._stride

    def _start(self) -> None:
        self._cpu, self._wall = _cpu(), time.perf_counter()

    def _report(self) -> None:
        cpu, wall = _cpu() - self._cpu, time.perf_counter() - self._wall
        print(json.dumps({"tokens": self._tokens, "cpu": cpu, "wall": wall, "peak": _peak(), "loss": self._loss,
                          "libraries": self._libraries, "ready": self._ready, "spent": self._spent}),
              file=self._reports, flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # in the midst of a library's loop


def _cpu() -> float:
    """CPU seconds of this program and of the processes that it has started."""
    ticks = sum(sum(map(int, fields[11:15])) for fields in _children().values())
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _peak() -> float:
    """Largest memory of this program so far, with what the processes that it has started take now, in GiB."""
    # `ru_maxrss` begins with the memory of the driver that started this process.
    kibibytes = _kibibytes(Path("/proc/self/status"), "VmHWM")
    return (kibibytes + sum(_kibibytes(child / "smaps_rollup", "Pss") for child in _children())) / 2**20


def _kibibytes(path: Path, name: str) -> int:
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return int(lines[name].split()[0]) if name in lines else 0  # a process that has just ended has none


def _children() -> dict[Path, list[str]]:
    """Folders in /proc of the living processes that this one has started, and their `stat` after the name."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ends meanwhile
            fields = path.read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == os.getpid():
                found[path.parent] = fields
    return found


def settings() -> dict:
    """What the driver asks for: the JSON on the command line."""
    return json.loads(sys.argv[1])


def read_rows(folder: str) -> list[dict[str, list[int]]]:
    """The training rows as token ids, as our own data module makes them."""
    return [json.loads(line) for line in (Path(folder) / "rows.jsonl").open()]


def read_check(folder: str) -> dict[str, list]:
    """The check batch: arrays as nested lists."""
    return json.loads((Path(folder) / "check.json").read_text())
