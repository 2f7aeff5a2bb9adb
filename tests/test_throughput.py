"""train/tokens_per_second: the tokens of exactly the steps whose time was measured, on both engines; no clock runs."""

import csv

import numpy as np
import pytest

from lmmods.cli import main
from lmmods.core import throughput
from lmmods.core.throughput import Laps, Stopwatch
from lmmods.runs.folder import RunFolder

TOKENS = [10, 20, 30, 40, 50, 60, 70]
SECONDS = [1.0, 2.0, 1.0, 3.0, 2.0, 1.0, 4.0]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Figure:
    """A number that a device has from some moment on; whoever fetches it waits until then."""

    def __init__(self, value: float, ready: float, clock: Clock):
        self.value, self.ready, self.clock = value, ready, clock

    def is_ready(self) -> bool:
        return self.clock.now >= self.ready

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self.clock.now = max(self.clock.now, self.ready)
        return np.array(self.value, np.float32)


class Sink:
    def __init__(self) -> None:
        self.speeds: dict[int, float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.speeds[step] = metrics["train/tokens_per_second"]

    def update(self, *_) -> None:
        """Of the progress bar."""


def wanted(every: int) -> dict[int, float]:
    ends = range(every, len(TOKENS) + 1, every)
    return {end: sum(TOKENS[end - every:end]) / sum(SECONDS[end - every:end]) for end in ends}


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("evaluated", [(), (3,), (2, 4, 7)], ids=str)
@pytest.mark.parametrize("waits", [True, False], ids=["the_call_computes", "the_device_runs_behind"])
def test_rows_of_jax_hold_the_time_of_their_steps(every, evaluated, waits):
    """Steps take the seconds above. An evaluation of 50 seconds follows some of them, a fetch the last."""
    from jax_engine.metrics import Metrics

    clock, sink = Clock(), Sink()
    stopwatch = Stopwatch(clock)
    metrics = Metrics(every, stopwatch, sink, lambda step: 0.0, None)
    metrics.loggers = [sink]
    stopwatch.start()
    ready = clock.now
    for step, (tokens, seconds) in enumerate(zip(TOKENS, SECONDS, strict=True), 1):
        metrics.look()
        ready = max(ready, clock.now) + seconds
        if waits:
            clock.now = ready
        values = {"total": 1.0, "weight": 1.0, "num_tokens": tokens, "num_rows": 1, "grad_norm": 1.0}
        metrics.add(step, 0.0, {name: Figure(value, ready, clock) for name, value in values.items()})
        if step in evaluated:
            metrics.fetch()
            with stopwatch.paused():
                clock.now += 50.0
    metrics.fetch()
    assert sink.speeds == pytest.approx(wanted(every))


def test_tokens_from_before_a_resume_are_left_out():
    laps = Laps()
    laps.leave_out(60)
    laps.add(100, 4.0)
    assert laps.tokens_per_second() == 10.0
    laps.add(100, 9.0)
    assert laps.tokens_per_second() == 20.0


@pytest.fixture
def micro_batches(monkeypatch):
    """A clock that a micro-batch moves by a second, on either engine."""
    from jax import block_until_ready

    from jax_engine.distributed.steps import Steps
    from lmmods.torch_engine.tasks.base import TaskModule

    clock = Clock()

    def second(function, after=lambda result: result):
        def counted(*args):
            result = after(function(*args))
            clock.now += 1.0
            return result
        return counted

    monkeypatch.setattr(throughput.time, "perf_counter", clock)
    monkeypatch.setattr(Steps, "micro_step", second(Steps.micro_step, block_until_ready))
    monkeypatch.setattr(Steps, "full_step", second(Steps.full_step, block_until_ready))
    monkeypatch.setattr(Steps, "update", lambda self, *args, update=Steps.update: block_until_ready(
        update(self, *args)))
    monkeypatch.setattr(TaskModule, "training_step", second(TaskModule.training_step))


@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_row_of_a_run(recipe, tmp_path, micro_batches, engine, accumulate):
    """Validation after step 4 and at the end, checkpoints after every second step."""
    assert main(["fit", *recipe(engine=engine, trainer__accumulate_grad_batches=accumulate,
                                trainer__val_check_interval=4 * accumulate)]) == 0
    with open(RunFolder(tmp_path / "run").metrics_csv, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["train/tokens"]]
    tokens = np.diff([0, *(float(row["train/tokens"]) for row in rows)])
    assert [float(row["train/tokens_per_second"]) for row in rows] == pytest.approx((tokens / accumulate).tolist())
    assert len(rows) == 6
