"""The metrics of a run's optimiser steps, in both engines, for loggers, the progress bar and metrics.json."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmmods.core.errors import UserError
from lmmods.core.throughput import Laps, Stopwatch

# Largest number of pending steps before they are counted: each holds a few numbers on a device.
MOST_PENDING = 100
# Decay of the smoothed loss per step: the latest 50 steps make up about two thirds of it.
SMOOTHING = 0.98


class NotFinite(UserError):
    """A loss or gradient is not finite."""


@dataclass
class PendingStep:
    """An optimiser step that has been started, and perhaps finished, but not counted yet.

    Args:
        epoch: Epochs done after it, as a fraction within an epoch.
        step_metrics: Fetches its `loss` and the `weight` that it is the mean over, `lr`, `grad_norm`, `num_tokens`,
            `num_rows` and metrics of the task by their names; waits for the device.
        is_done: Returns True if the device has computed them; does not wait.
        seconds: Stopwatch time when the step was first seen to be done.
    """

    step: int
    epoch: float
    step_metrics: Callable[[], dict[str, float]]
    is_done: Callable[[], bool]
    seconds: float | None = None


class SmoothedLoss:
    """Exponential moving average of the steps' losses, weighted by scored tokens.

    A ratio of two decayed sums, so the first values are not biased towards zero (the bias correction of Kingma and Ba
    2015). With rows grouped by length, the loss of one step depends more on how hard its rows are than on the
    progress of training.
    """

    def __init__(self, total: float = 0.0, weight: float = 0.0):
        self.total, self.weight = total, weight

    def add(self, loss: float, weight: float) -> None:
        """Add the loss of a step."""
        if math.isfinite(loss):  # not finite: a step that 16-mixed skips
            self.total = SMOOTHING * self.total + (1 - SMOOTHING) * loss * weight
            self.weight = SMOOTHING * self.weight + (1 - SMOOTHING) * weight

    @property
    def value(self) -> float:
        return self.total / (self.weight or 1)


class StepMetrics:
    """Count tokens and rows of steps, and report every n-th step and each evaluation.

    Args:
        stopwatch: Runs while the run trains.
        every: Optimiser steps between reported rows.
        flops_share: Returns the share of all devices' peak FLOP/s per token per second, for train/mfu; None if the peak
            is unknown. Called for the first row, when the network exists.
        report: Sends metrics and their step to the loggers.
        show: Displays a step and its metrics in short.
        skips_overflows: Steps whose gradient overflows are skipped, as with 16-mixed; only what is saved or evaluated
            must be finite then.
    """

    def __init__(self, stopwatch: Stopwatch, every: int = 1, flops_share: Callable[[], float | None] = lambda: None,
                 report: Callable[[dict[str, float], int], None] = lambda metrics, step: None,
                 show: Callable[[int, str], None] = lambda step, text: None, skips_overflows: bool = False):
        self.every = every
        self._flops_share, self._report, self._show = functools.cache(flops_share), report, show
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
        self.smoothed = SmoothedLoss(*state.get("smoothed", ()))  # missing in older checkpoints: starts again from zero

    def add(self, step: int, epoch: float, step_metrics: Callable[[], dict[str, float]],
            is_done: Callable[[], bool] = lambda: False) -> None:
        """Add a step; see `PendingStep` for the arguments.

        Steps before it are counted while it runs, so that the device never waits, unless `fetch` has counted them
        already.
        """
        # The step before is due for a report, or many are pending: fetch while the device already computes this one.
        if self._pending and (self._pending[-1].step % self.every == 0 or len(self._pending) >= MOST_PENDING):
            self.fetch()
        self._pending.append(PendingStep(step, epoch, step_metrics, is_done))
        self.look()

    def look(self) -> None:
        """Record the time if the last step is done by now. Does not wait.

        Devices may lag behind the call that starts a step or, like CPUs, compute within it. So neither the time of that
        call nor that of fetching the step metrics, when the next step has been started, is when a step was done.
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
        # All values first: from here on nothing waits for the device.
        fetched = [(pending, pending.step_metrics()) for pending in self._pending]
        last, self._pending = self._pending[-1], []
        # The time when the last step was seen to be done; the present if no one looked.
        seconds = self._stopwatch.seconds() if last.seconds is None else last.seconds
        for pending, step_metrics in fetched:
            if not self._skips_overflows:
                # Epochs done to the epoch's index: 1.0 is the end of epoch 0.
                check_finite(step_metrics, pending.step, max(math.ceil(pending.epoch) - 1, 0))
            self.num_tokens += int(step_metrics["num_tokens"])
            self.num_rows += int(step_metrics["num_rows"])
            self.laps.add(int(step_metrics["num_tokens"]), seconds)
            self.smoothed.add(step_metrics["loss"], step_metrics["weight"])
        # Only multiples of `every` are reported: metrics of this step, and the speed since the last row.
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
        if (share := self._flops_share()) is not None:
            row["mfu"] = share * speed
        return {f"train/{name}": value for name, value in row.items()}

    def _summary(self) -> str:
        """Return the latest metrics in short, with the smoothed loss next to the step's own."""
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
        raise UserError("There is no validation set: set data.val_source or data.val_size.")


def check_finite(step_metrics: dict[str, float], step: int, epoch: int) -> None:
    """Raise NotFinite if `loss` or `grad_norm` of optimiser step `step` is not finite.

    Call it before results of the step are saved.
    """
    if not (math.isfinite(step_metrics["loss"]) and math.isfinite(step_metrics["grad_norm"])):
        raise NotFinite(
            f"Step {step} (epoch {epoch}): loss is {step_metrics['loss']}, gradient norm {step_metrics['grad_norm']}. "
            "Training stops and no checkpoint of this step is written. Go on from the last checkpoint with a lower "
            "optimizer.lr, a smaller trainer.gradient_clip_val or precision 32-true; inspect shows the rows.")
