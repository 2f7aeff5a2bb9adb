"""Two workers that step in turn, so that other load on the machine affects both alike."""

import json
import os
import select
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
    """Worker of one side of a comparison.

    Args:
        python: Python interpreter.
        program: File in workers/.
        settings: Settings sent to the worker.
        cold: Files to evict from the system's cache before the worker starts.
        seconds: Maximum time to wait for the warm-up or a round; None waits for ever.
    """

    python: str
    program: str
    settings: dict[str, Any]
    cold: tuple[Path, ...] = ()
    seconds: float | None = None


@dataclass
class Result:
    """Measurements of one side.

    Args:
        speed: Real tokens per CPU-second of each round.
        wall: Real tokens per second of each round.
        peak: Peak memory of the process and its children in GiB.
        loss: Loss per target token of the check batch before training.
        libraries: Memory of the process after importing its libraries, in GiB.
        ready: Seconds from the start of the process to the first step.
        step: Seconds per step of each round.
        spent: Fraction of each round's time by part of a step, for parts that the worker reports.
    """

    speed: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    peak: float = 0.0
    loss: float = 0.0
    libraries: float = 0.0
    ready: float = 0.0
    step: list[float] = field(default_factory=list)
    spent: dict[str, list[float]] = field(default_factory=dict)

    def add(self, report: dict[str, Any], steps: int) -> None:
        """Record a round of `steps` steps as reported by a worker."""
        self.step.append(report["wall"] / steps)
        for name, seconds in report["spent"].items():
            self.spent.setdefault(name, []).append(seconds / report["wall"])
        self.speed.append(report["tokens"] / report["cpu"])
        self.wall.append(report["tokens"] / report["wall"])
        self.peak, self.loss, self.libraries, self.ready = (
            report[name] for name in ("peak", "loss", "libraries", "ready"))


def compare(ours: Side, peer: Side, rounds: int, together: bool = True) -> tuple[Result, Result]:
    """Run both sides in turn: while one warms up or runs a round, the other waits.

    Args:
        rounds: Number of rounds of each side.
        together: If False, the peer starts after ours has exited, as memory holds only one of them.

    Raises:
        SystemExit: A worker failed; the message has the end of its output.
    """
    if together:
        our_result, peer_result = run_sides([ours, peer], rounds)
        return our_result, peer_result
    return run_sides([ours], rounds)[0], run_sides([peer], rounds)[0]


def run_sides(sides: list[Side], rounds: int) -> list[Result]:
    """Run any number of sides in turn.

    Raises:
        SystemExit: A worker failed; the message has the end of its output.
    """
    results = [Result() for _ in sides]
    workers: list[_Worker] = []
    try:
        for side in sides:
            workers.append(_Worker(side))
            workers[-1].read()  # its warm-up
        for _ in range(rounds):
            for side, worker, result in zip(sides, workers, results, strict=True):
                worker.resume()
                result.add(worker.read(), side.settings["steps"])
    finally:
        for worker in workers:
            worker.end()
    return results


def evict(path: Path) -> None:
    """Evict a file from the system's cache, so that it is read from disk the next time."""
    with path.open("rb") as file:
        os.fsync(file.fileno())  # pages that are not written yet are not evicted
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ratio(ours: list[float], peer: list[float]) -> float:
    """Return the ratio of the medians."""
    return statistics.median(ours) / statistics.median(peer)


class _Worker:
    def __init__(self, side: Side):
        for path in side.cold:
            evict(path)
        self._stderr = tempfile.TemporaryFile("w+")
        self._name, self._seconds = f"{side.program} {side.settings}", side.seconds
        self._process = subprocess.Popen(
            [side.python, str(WORKERS / side.program), json.dumps(
                {**side.settings, "root": str(ROOT), "launched": time.monotonic()})], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
                 "WANDB_MODE": "disabled",  # transformers prints to the standard output if it is `offline`
                 "OMP_WAIT_POLICY": "PASSIVE"})  # otherwise waiting threads use CPU time

    def read(self) -> dict[str, Any]:
        if not select.select([self._process.stdout], [], [], self._seconds)[0]:  # a report is one line
            self._process.kill()
            raise SystemExit(f"{self._name} failed:\nno report within {self._seconds:g} s")
        line = self._process.stdout.readline()
        if not line:
            self._stderr.seek(0)
            raise SystemExit(f"{self._name} failed:\n{self._stderr.read()[-4000:]}")
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
        self._stderr.close()
