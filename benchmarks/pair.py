"""Two workers that step in turn: the same minutes, the same machine, whatever else it does meanwhile."""

import json
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).parent / "workers"
ROOT = Path(__file__).parent.parent


@dataclass
class Side:
    """A worker.

    Args:
        python: Its interpreter.
        program: In workers/.
        asked: Its settings.
        cold: Files that the system's cache must not hold when it starts.
    """

    python: str
    program: str
    asked: dict[str, Any]
    cold: tuple[Path, ...] = ()


@dataclass
class Result:
    """What one side did.

    Args:
        speed: Real tokens per CPU-second of each round.
        wall: Real tokens per second of each round.
        peak: GiB, of the whole process and those that it has started.
        loss: Per scored token, of the check batch before training.
        libraries: GiB of the process before it read anything.
        ready: Seconds from the start of the process to the first step.
        step: Seconds of a step, of each round.
        spent: By part of a step, its share of the time of each round; of the parts that a worker tells apart.
    """

    speed: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    peak: float = 0.0
    loss: float = 0.0
    libraries: float = 0.0
    ready: float = 0.0
    step: list[float] = field(default_factory=list)
    spent: dict[str, list[float]] = field(default_factory=dict)

    def add(self, said: dict[str, Any], steps: int) -> None:
        """Note a round of so many steps as a worker reported it."""
        self.step.append(said["wall"] / steps)
        for name, seconds in said["spent"].items():
            self.spent.setdefault(name, []).append(seconds / said["wall"])
        self.speed.append(said["tokens"] / said["cpu"])
        self.wall.append(said["tokens"] / said["wall"])
        self.peak, self.loss, self.libraries, self.ready = (
            said[name] for name in ("peak", "loss", "libraries", "ready"))


def compare(ours: Side, theirs: Side, rounds: int, together: bool = True) -> tuple[Result, Result]:
    """Run both sides in turn. One warms up while the other waits.

    Args:
        ours: The first.
        theirs: The second.
        rounds: Of each.
        together: False: the second starts when the first has ended, as memory holds only one of them.

    Raises:
        SystemExit: A worker failed; what it said is shown.
    """
    if together:
        first, second = _run([ours, theirs], rounds)
        return first, second
    return _run([ours], rounds)[0], _run([theirs], rounds)[0]


def _run(sides: list[Side], rounds: int) -> list[Result]:
    results = [Result() for _ in sides]
    workers: list[_Worker] = []
    try:
        for side in sides:
            workers.append(_Worker(side))
            workers[-1].read()  # its warm-up
        for _ in range(rounds):
            for side, worker, result in zip(sides, workers, results, strict=True):
                worker.resume()
                result.add(worker.read(), side.asked["steps"])
    finally:
        for worker in workers:
            worker.end()
    return results


def evict(path: Path) -> None:
    """Have the system forget a file's content, so that it is read from the disk the next time."""
    with path.open("rb") as file:
        os.fsync(file.fileno())  # what is not written yet is not forgotten either
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Of the medians."""
    return statistics.median(ours) / statistics.median(theirs)


class _Worker:
    def __init__(self, side: Side):
        for path in side.cold:
            evict(path)
        self._said = tempfile.TemporaryFile("w+")
        self._name = f"{side.program} {side.asked}"
        self._process = subprocess.Popen(
            [side.python, str(WORKERS / side.program), json.dumps(
                {**side.asked, "root": str(ROOT), "launched": time.monotonic()})], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
                 "OMP_WAIT_POLICY": "PASSIVE"})  # else waiting threads burn CPU seconds

    def read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            raise SystemExit(f"{self._name} failed:\n{self._said.read()[-4000:]}")
        return json.loads(line)

    def resume(self) -> None:
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
