"""train/tokens_per_second: tokens and seconds of the same steps, on both engines, with simulated clocks."""

import csv
import json
import math

import numpy as np
import pytest

from jax_engine.trainer import COMPILE_EVENTS, CompileClock
from lmmods.cli import main
from lmmods.core import throughput
from lmmods.core.errors import UserError
from lmmods.core.throughput import Pace, Stopwatch
from lmmods.runs.folder import RunFolder
from lmmods.runs.step_metrics import MAX_PENDING, SMOOTHING, StepMetrics

TOKENS = [10, 20, 30, 40, 50, 60, 70]
SECONDS = [1.0, 2.0, 1.0, 3.0, 2.0, 1.0, 4.0]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class OnDevice:
    """Results that a device has from some time on; fetching them waits until then."""

    def __init__(self, num_tokens: int, ready: float, clock: Clock):
        self.num_tokens, self.ready, self.clock = num_tokens, ready, clock

    def is_ready(self) -> bool:
        return self.clock.now >= self.ready

    def fetch(self) -> dict[str, float]:
        self.clock.now = max(self.clock.now, self.ready)
        return step_results(self.num_tokens)


def step_results(num_tokens: int = 1, loss: float = 1.0) -> dict[str, float]:
    return {"loss": loss, "weight": num_tokens, "lr": 0.1, "grad_norm": 1.0, "num_tokens": num_tokens, "num_rows": 1}


def expected_speeds(every: int) -> dict[int, float]:
    ends = range(every, len(TOKENS) + 1, every)
    return {end: sum(TOKENS[end - every:end]) / sum(SECONDS[end - every:end]) for end in ends}


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("evaluated", [(), (3,), (2, 4, 7)], ids=str)
@pytest.mark.parametrize("is_synchronous", [True, False], ids=["the_call_computes", "the_device_runs_behind"])
def test_each_metrics_row_has_the_speed_of_its_own_steps(every, evaluated, is_synchronous):
    """Steps take SECONDS; an evaluation of 50 seconds follows some of them, and a fetch the last."""
    clock, speeds = Clock(), {}
    stopwatch = Stopwatch(clock)
    metrics = StepMetrics(stopwatch, every,
                          report=lambda row, step: speeds.update({step: row["train/tokens_per_second"]}))
    stopwatch.start()
    ready = clock.now
    for step, (tokens, seconds) in enumerate(zip(TOKENS, SECONDS, strict=True), 1):
        metrics.look()
        ready = max(ready, clock.now) + seconds
        if is_synchronous:
            clock.now = ready
        on_device = OnDevice(tokens, ready, clock)
        metrics.add(step, 0.0, on_device.fetch, on_device.is_ready)
        if step in evaluated:
            metrics.fetch()
            with stopwatch.paused():
                clock.now += 50.0
    metrics.fetch()
    assert speeds == pytest.approx(expected_speeds(every))


def test_a_nan_loss_ends_the_run_and_names_its_step():
    """Of several steps fetched at once, the first bad one is named; 16-mixed skips such steps."""
    for skips in (False, True):
        metrics = StepMetrics(Stopwatch(Clock()), every=10, skips_overflows=skips)
        for step, loss in ((1, 1.0), (2, math.nan), (3, math.nan)):
            metrics.add(step, step / 2, lambda loss=loss: step_results(loss=loss))
        if skips:
            assert metrics.fetch() == {} and metrics.num_rows == 3
        else:
            with pytest.raises(UserError, match="Step 2 .epoch 0.: loss is nan"):
                metrics.fetch()


def test_the_reward_of_the_latest_rollout_is_shown():
    lines, clock = [], Clock()
    stopwatch = Stopwatch(clock)
    metrics = StepMetrics(stopwatch, show=lambda step, text: lines.append(text))
    stopwatch.start()
    for step, reward in ((1, None), (2, 0.25)):
        if reward is not None:
            metrics.log({"train/reward": reward}, step - 1)
        metrics.add(step, 0.0, step_results)
        clock.now += 1
        metrics.fetch()
    assert "reward" not in lines[0] and "  reward 0.25  " in lines[1]


def test_pending_steps_are_limited():
    fetched = []
    metrics = StepMetrics(Stopwatch(Clock()), every=10**9)
    for step in range(2 * MAX_PENDING + 1):
        metrics.add(step + 1, 0.0, lambda step=step: fetched.append(step) or step_results())
    assert len(fetched) == metrics.num_rows == 2 * MAX_PENDING


def test_the_smoothed_loss_is_an_exponential_mean_over_tokens():
    """By its definition: each step is weighted by its target tokens and by SMOOTHING for each later step."""
    losses, weights = [3.0, 1.0, 2.0, math.nan, 0.5], [10, 90, 1, 50, 40]
    metrics = StepMetrics(Stopwatch(Clock()), every=10, skips_overflows=True)
    for step, (loss, weight) in enumerate(zip(losses, weights, strict=True), 1):
        metrics.add(step, 0.0, lambda loss=loss, weight=weight: step_results(loss=loss) | {"weight": weight})
    metrics.fetch()
    fractions = np.array([SMOOTHING**(3 - k) for k in range(4)]) * [10, 90, 1, 40]
    assert metrics.smoothed.value == pytest.approx(np.average([3.0, 1.0, 2.0, 0.5], weights=fractions))
    resumed = StepMetrics(Stopwatch(Clock()))
    resumed.load_state_dict(json.loads(json.dumps(metrics.state_dict())))
    assert resumed.smoothed.value == metrics.smoothed.value
    resumed.load_state_dict({name: value for name, value in metrics.state_dict().items() if name != "smoothed"})
    assert resumed.smoothed.value == 0  # from a checkpoint without it


def test_the_time_left_excludes_the_first_step_and_counts_validations_once():
    """12 steps of 2 seconds, the first of 60, and a validation of 7 seconds after every third."""
    clock = Clock()
    pace = Pace(12, clock)
    for step in range(1, 13):
        clock.now += 60.0 if step == 1 else 2.0
        pace.mark(step)
        num_validations = 4 - (step - 1) // 3
        if step == 1:
            assert pace.left(1, num_validations) is None
        elif step <= 3:
            # No validation has been measured yet.
            assert pace.left(step, num_validations) == pytest.approx(2.0 * (12 - step))
        else:
            assert pace.left(step, num_validations) == pytest.approx(2.0 * (12 - step) + 7.0 * num_validations)
        if step % 3 == 0:
            pace.pause()
            clock.now += 7.0
            pace.resume()
    assert pace.measured == (11, pytest.approx(22.0))


def test_the_clock_stops_during_compilation(monkeypatch):
    """Tracing of 2 seconds within a compilation of 5, then one of 3; other events do not count."""
    clock = Clock()
    monkeypatch.setattr(throughput.time, "perf_counter", clock)
    compiling = CompileClock()
    for seconds, event, expected in ((1, "other", 0), (2, COMPILE_EVENTS + "trace", 2), (3, COMPILE_EVENTS + "all", 5),
                                     (4, "x", 5), (3, COMPILE_EVENTS + "all", 8)):
        clock.now += seconds
        compiling.note(event, 5.0 if expected == 5 else seconds)
        assert clock.now - compiling() == expected


@pytest.fixture
def micro_batches(monkeypatch):
    """Replace the clock by one that each micro-batch advances by a second, on both engines."""
    from jax import block_until_ready

    from jax_engine import trainer
    from jax_engine.distributed.steps import Steps
    from lmmods.torch_engine.tasks.base import TaskModule

    clock = Clock()

    def take_a_second(function, after=lambda result: result):
        def call(*args):
            result = after(function(*args))
            clock.now += 1.0
            return result
        return call

    monkeypatch.setattr(throughput.time, "perf_counter", clock)
    monkeypatch.setattr(trainer, "compile_clock", lambda: throughput.now)  # it would subtract real seconds
    monkeypatch.setattr(Steps, "accumulate", take_a_second(Steps.accumulate, block_until_ready))
    monkeypatch.setattr(Steps, "full_step", take_a_second(Steps.full_step, block_until_ready))
    monkeypatch.setattr(Steps, "update", lambda self, *args, update=Steps.update: block_until_ready(
        update(self, *args)))
    monkeypatch.setattr(TaskModule, "manual_backward", take_a_second(TaskModule.manual_backward))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_row_of_a_run_has_the_speed_of_its_own_steps(recipe, tmp_path, micro_batches, engine, accumulate):
    """With validation after step 4 and at the end, and checkpoints after every second step."""
    assert main(["fit", *recipe(engine=engine, trainer__accumulate_grad_batches=accumulate,
                                trainer__val_check_interval=4)]) == 0
    with open(RunFolder(tmp_path / "run").metrics_csv, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["train/tokens"]]
    tokens = np.diff([0, *(float(row["train/tokens"]) for row in rows)])
    assert [float(row["train/tokens_per_second"]) for row in rows] == pytest.approx((tokens / accumulate).tolist())
    assert len(rows) == 6
