"""A worker's side of a benchmark: it reports after its warm-up and after each round, and waits to be told to go on.

Nothing but the standard library is imported here, as workers live in environments of their own.
"""

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
        self._reports = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print must not reach the driver
        self._start()

    def ready(self) -> None:
        """Note that training could begin now, had it not to wait for the check batch."""
        self._ready = time.monotonic() - self._launched

    def start_loss(self, loss: float) -> None:
        """Note the loss per scored token of the check batch before training."""
        self._loss = loss

    def step(self, tokens: int) -> None:
        """Note `stride` optimiser steps, together over so many real tokens."""
        self._tokens += tokens
        self._left -= self._stride
        if self._left == 0:
            self._report()
            self._left, self._tokens = self._steps, 0
            self._start()

    @property
    def closing(self) -> bool:
        """Whether the next call of `step` ends a round: what still runs on a device must then be waited for."""
        return self._left == self._stride

    def _start(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def _report(self) -> None:
        cpu, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        print(json.dumps({"tokens": self._tokens, "cpu": cpu, "wall": wall, "peak": _peak(), "loss": self._loss,
                          "libraries": self._libraries, "ready": self._ready}), file=self._reports, flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # in the midst of a library's loop


def _peak() -> float:
    """Largest memory of this program so far, in GiB."""
    # `ru_maxrss` begins with the memory of the driver that started this process.
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 2**20


def settings() -> dict:
    """What the driver asks for: the JSON on the command line."""
    return json.loads(sys.argv[1])


def read_rows(folder: str) -> list[dict[str, list[int]]]:
    """The training rows as token ids, as our own data module makes them."""
    return [json.loads(line) for line in (Path(folder) / "rows.jsonl").open()]


def read_check(folder: str) -> dict[str, list]:
    """The check batch: arrays as nested lists."""
    return json.loads((Path(folder) / "check.json").read_text())
