"""Two workers that step in turn: the same minutes, the same machine, whatever else it does meanwhile."""

import json
import os
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).parent / "workers"
ROOT = Path(__file__).parent.parent


@dataclass
class Side:
    """A worker: its Python, its program and what it is asked."""

    python: str
    program: str
    asked: dict[str, Any]


@dataclass
class Result:
    """What one side did.

    Args:
        speed: Real tokens per CPU-second of each round.
        wall: Real tokens per second of each round.
        peak: GiB, of the whole process.
        loss: Per scored token, of the check batch before training.
    """

    speed: list[float]
    wall: list[float]
    peak: float
    loss: float


def compare(ours: Side, theirs: Side, rounds: int) -> tuple[Result, Result]:
    """Run both sides in turn. One warms up while the other waits.

    Raises:
        SystemExit: A worker failed; what it said is shown.
    """
    results = []
    workers = []
    try:
        for side in (ours, theirs):
            workers.append(_Worker(side))
            workers[-1].read()  # its warm-up
            results.append(Result([], [], 0.0, 0.0))
        for _ in range(rounds):
            for worker, result in zip(workers, results, strict=True):
                worker.go_on()
                said = worker.read()
                result.speed.append(said["tokens"] / said["cpu"])
                result.wall.append(said["tokens"] / said["wall"])
                result.peak, result.loss = said["peak"], said["loss"]
    finally:
        for worker in workers:
            worker.end()
    return results[0], results[1]


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Of the medians."""
    return statistics.median(ours) / statistics.median(theirs)


class _Worker:
    def __init__(self, side: Side):
        self._said = tempfile.TemporaryFile("w+")
        self._name = f"{side.program} {side.asked}"
        self._process = subprocess.Popen(
            [side.python, str(WORKERS / side.program), json.dumps({**side.asked, "root": str(ROOT)})], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
                 "OMP_WAIT_POLICY": "PASSIVE"})  # else waiting threads burn CPU seconds

    def read(self) -> dict[str, float]:
        line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            raise SystemExit(f"{self._name} failed:\n{self._said.read()[-4000:]}")
        return json.loads(line)

    def go_on(self) -> None:
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()
