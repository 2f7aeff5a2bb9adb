"""A worker's side of a benchmark: it reports after its warm-up and after each round, and waits to be told to go on.

Nothing but the standard library is imported here, as workers live in environments of their own.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path


class Rounds:
    """Counts optimiser steps; at the end of a round one JSON line goes to the driver, one line comes back.

    The process ends when the driver closes its standard input.

    Args:
        warm_up: Steps before the first report.
        steps: Steps of a round.
    """

    def __init__(self, warm_up: int, steps: int):
        self._left, self._steps = warm_up, steps
        self._tokens, self._losses = 0, []
        self._reports = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print must not reach the driver
        self._start()

    def start_loss(self, loss: float) -> None:
        """Note the loss per scored token of the check batch before training."""
        self._loss = loss

    def step(self, tokens: int) -> None:
        """Note an optimiser step over so many real tokens."""
        self._tokens += tokens
        self._left -= 1
        if self._left == 0:
            self._report()
            self._left, self._tokens = self._steps, 0
            self._start()

    @property
    def closing(self) -> bool:
        """Whether the next step ends a round: what still runs on a device must then be waited for."""
        return self._left == 1

    def _start(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def _report(self) -> None:
        cpu, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({"tokens": self._tokens, "cpu": cpu, "wall": wall, "peak": peak, "loss": self._loss}),
              file=self._reports, flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # in the midst of a library's loop


def settings() -> dict:
    """What the driver asks for: the JSON on the command line."""
    return json.loads(sys.argv[1])


def read_rows(folder: str) -> list[dict[str, list[int]]]:
    """The training rows as token ids, as our own data module makes them."""
    return [json.loads(line) for line in (Path(folder) / "rows.jsonl").open()]


def read_check(folder: str) -> dict[str, list]:
    """The check batch: arrays as nested lists."""
    return json.loads((Path(folder) / "check.json").read_text())
