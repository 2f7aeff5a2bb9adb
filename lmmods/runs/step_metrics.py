"""Metrics of a run's optimiser steps, for loggers, the progress bar and metrics.json of both engines."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmmods.core.errors import UserError
from lmmods.core.throughput import Laps, Stopwatch

# Maximum number of pending steps, each of which keeps a few numbers on a device.
MAX_PENDING = 100
# Decay of the smoothed loss per step: the last 50 steps contribute about two thirds.
SMOOTHING = 0.98


class NotFinite(UserError):
    """A loss or gradient is not finite."""


@dataclass
class PendingStep:
    """An optimiser step that has started, and may be finished, but is not counted yet.

    Args:
        epoch: Number of epochs done after this step, fractional.
        step_metrics: Fetches `loss` and its `weight`, `lr`, `grad_norm`, `num_tokens`, `num_rows` and the task's
            metrics; waits for the device.
        is_done: Returns True if the device has computed them; does not wait.
        seconds: Stopwatch time at which the step was first known to be done.
    """

    step: int
    epoch: float
    step_metrics: Callable[[], dict[str, float]]
    is_done: Callable[[], bool]
    seconds: float | None = None


class SmoothedLoss:
    """Exponential moving average of the steps' losses, weighted by target tokens.

    It is a ratio of two decayed sums, so the first values are not biased towards zero (the bias correction of Kingma
    and Ba 2015). If rows are grouped by length, a single step's loss depends more on the difficulty of its rows than on
    training progress.
    """

    def __init__(self, total: float = 0.0, weight: float = 0.0):
        self.total, self.weight = total, weight

    def add(self, loss: float, weight: float) -> None:
        """Add the loss of a step."""
        if math.isfinite(loss):  # 16-mixed skips steps whose loss is not finite
            self.total = SMOOTHING * self.total + (1 - SMOOTHING) * loss * weight
            self.weight = SMOOTHING * self.weight + (1 - SMOOTHING) * weight

    @property
    def value(self) -> float:
        return self.total / (self.weight or 1)


class StepMetrics:
    """Counter of tokens and rows, which reports every n-th step and each evaluation.

    Args:
        stopwatch: Runs while the run trains.
        every: Optimiser steps between two reports.
        flops_fraction: Returns the fraction of all devices' peak FLOP/s that one token per second takes, for train/mfu;
            None if the peak is unknown. Called at the first report, when the network exists.
        report: Sends metrics and their step to the loggers.
        show: Displays a step with a summary of its metrics.
        skips_overflows: True if steps with an overflowing gradient are skipped, as in 16-mixed. Losses may then be
            infinite.
    """

    def __init__(self, stopwatch: Stopwatch, every: int = 1, flops_fraction: Callable[[], float | None] = lambda: None,
                 report: Callable[[dict[str, float], int], None] = lambda metrics, step: None,
                 show: Callable[[int, str], None] = lambda step, text: None, skips_overflows: bool = False):
        self.every = every
        self._flops_fraction, self._report, self._show = functools.cache(flops_fraction), report, show
        self._skips_overflows = skips_overflows
        self.latest: dict[str, float] = {}
        self.num_tokens = self.num_rows = 0
        self.laps = Laps()
        self.smoothed = SmoothedLoss()
        self._stopwatch = stopwatch
        self._pending: list[PendingStep] = []

    def state_dict(self) -> dict[str, Any]:
        return {"num_tokens": self.num_tokens, "num_rows": self.num_rows, "latest": dict(self.latest),
                "smoothed": [self.smoothed.total, self.smoothed.weight]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_tokens, self.num_rows, self.latest = state["num_tokens"], state["num_rows"], state["latest"]
        self.smoothed = SmoothedLoss(*state.get("smoothed", ()))  # missing in older checkpoints

    def add(self, step: int, epoch: float, step_metrics: Callable[[], dict[str, float]],
            is_done: Callable[[], bool] = lambda: False) -> None:
        """Add a step; see `PendingStep` for the arguments.

        Earlier steps that `fetch` has not counted yet are counted while this step runs, so that the device never waits.
        """
        # If the last step is due for a report, or many are pending, fetch them while the device computes this step.
        if self._pending and (self._pending[-1].step % self.every == 0 or len(self._pending) >= MAX_PENDING):
            self.fetch()
        self._pending.append(PendingStep(step, epoch, step_metrics, is_done))
        self.look()

    def look(self) -> None:
        """Record the time if the last step is done. Does not wait.

        Devices may be later than the call that starts a step or, like CPUs, compute within it, and metrics are fetched
        when the next step has started. So neither the time of the call nor of the fetch is when the step was done.
        """
        if self._pending and self._pending[-1].seconds is None and self._pending[-1].is_done():
            self._pending[-1].seconds = self._stopwatch.seconds()

    def fetch(self) -> dict[str, float]:
        """Count the pending steps. Waits for the device.

        Returns:
            The metrics reported for the last step, if it was due.

        Raises:
            UserError: A loss or gradient is not finite.
        """
        if not self._pending:
            return {}
        # Fetch all values first; the rest does not wait for the device.
        fetched = [(pending, pending.step_metrics()) for pending in self._pending]
        last, self._pending = self._pending[-1], []
        seconds = self._stopwatch.seconds() if last.seconds is None else last.seconds
        for pending, step_metrics in fetched:
            if not self._skips_overflows:
                # From epochs done to the index of the epoch: 1.0 is the end of epoch 0.
                check_finite(step_metrics, pending.step, max(math.ceil(pending.epoch) - 1, 0))
            self.num_tokens += int(step_metrics["num_tokens"])
            self.num_rows += int(step_metrics["num_rows"])
            self.laps.add(int(step_metrics["num_tokens"]), seconds)
            self.smoothed.add(step_metrics["loss"], step_metrics["weight"])
        if last.step % self.every:
            return {}
        row = self._row(last.epoch, step_metrics)
        self.log(row, last.step)
        self._show(last.step, self._summary())
        return row

    def _row(self, epoch: float, step_metrics: dict[str, float]) -> dict[str, float]:
        speed = self.laps.tokens_per_second()
        counts = ("weight", "num_tokens", "num_rows")
        row = {**{name: value for name, value in step_metrics.items() if name not in counts},
               "epoch": epoch, "tokens": self.num_tokens, "tokens_per_second": speed}
        if (fraction := self._flops_fraction()) is not None:
            row["mfu"] = fraction * speed
        return {f"train/{name}": value for name, value in row.items()}

    def _summary(self) -> str:
        """Return a summary of the latest metrics, with the smoothed loss next to the step's loss."""
        names = ("loss", "reward", "lr", "tokens_per_second")
        row = {name: f"{name} {self.latest[f'train/{name}']:.4g}" for name in names if f"train/{name}" in self.latest}
        if "loss" in row:
            row["loss"] += f" (smoothed {self.smoothed.value:.4g})"
        return "  ".join(row.values())

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Report metrics, and keep them for metrics.json."""
        self.latest |= metrics
        self._report(metrics, step)

    def final(self, step: int) -> dict[str, float]:
        """Return the content of metrics.json for a run that has ended at `step`."""
        return {**self.latest, "train/tokens": self.num_tokens, "train/rows": self.num_rows,
                "trainer/global_step": step}


def check_evaluated(metrics: Any) -> None:
    """Raise UserError if `validate` has measured nothing."""
    if not metrics:
        raise UserError("There is no validation set. Set data.val_source or data.val_size.")


def check_finite(step_metrics: dict[str, float], step: int, epoch: int) -> None:
    """Raise NotFinite if `loss` or `grad_norm` of step `step` is not finite. Call it before the step is saved."""
    if not (math.isfinite(step_metrics["loss"]) and math.isfinite(step_metrics["grad_norm"])):
        raise NotFinite(
            f"Step {step} (epoch {epoch}): loss is {step_metrics['loss']}, gradient norm {step_metrics['grad_norm']}. "
            "Training stops without a checkpoint of this step. Resume from the last checkpoint with a lower "
            "optimizer.lr, a smaller trainer.gradient_clip_val or precision 32-true; inspect shows the rows.")
