"""The numbers of a run's steps, in both engines: what loggers, the progress bar and metrics.json get."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmmods.core.errors import UserError
from lmmods.core.throughput import Laps, Stopwatch

# So many steps are noted at most before they are counted: each holds a few numbers on a device.
MOST_PENDING = 100


@dataclass
class PendingStep:
    """An optimiser step that is under way, or done, but not counted yet.

    Args:
        epoch: Epochs done with it, a fraction within an epoch.
        figures: Fetches its `loss`, `lr`, `grad_norm`, `num_tokens` and `num_rows`; waits for the device.
        is_done: Whether the device has computed them; waits for nothing.
        seconds: What the stopwatch showed when the step was first seen to be done.
    """

    step: int
    epoch: float
    figures: Callable[[], dict[str, float]]
    is_done: Callable[[], bool]
    seconds: float | None = None


class StepMetrics:
    """Count what steps have seen, and report every so many of them and each evaluation.

    Args:
        stopwatch: Runs while the run trains.
        every: Optimiser steps between reported rows.
        flops_share: What a token per second is of all devices' peak, for train/mfu; None where the peak is not known.
    """

    def __init__(self, stopwatch: Stopwatch, every: int = 1, flops_share: float | None = None):
        self.every, self.flops_share = every, flops_share
        # Gives metrics, and the step they belong to, to the loggers; set once there are any.
        self.report: Callable[[dict[str, float], int], None] = lambda metrics, step: None
        self.latest: dict[str, float] = {}
        self.num_tokens = self.num_rows = 0
        self.laps = Laps()
        # 16-mixed skips a step whose gradient overflows; only what is saved or evaluated must be finite there.
        self.skips_overflows = False
        self._stopwatch = stopwatch
        self._pending: list[PendingStep] = []

    def state_dict(self) -> dict[str, Any]:
        return {"num_tokens": self.num_tokens, "num_rows": self.num_rows, "latest": dict(self.latest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_tokens, self.num_rows, self.latest = state["num_tokens"], state["num_rows"], state["latest"]

    def add(self, step: int, epoch: float, figures: Callable[[], dict[str, float]],
            is_done: Callable[[], bool] = lambda: False) -> None:
        """Note a step; arguments as of `PendingStep`.

        Those before it are counted while it runs, so that the device never waits, unless `fetch` has done so.
        """
        if self._pending and (self._pending[-1].step % self.every == 0 or len(self._pending) >= MOST_PENDING):
            self.fetch()
        self._pending.append(PendingStep(step, epoch, figures, is_done))
        self.look()

    def look(self) -> None:
        """Note the time if the last step is done by now; waits for nothing.

        Devices may run behind, or, as CPUs do, within the call that starts a step: neither the time of that call nor
        that of fetching the figures, when the next step has been started, says when a step was done.
        """
        if self._pending and self._pending[-1].seconds is None and self._pending[-1].is_done():
            self._pending[-1].seconds = self._stopwatch.seconds()

    def fetch(self) -> dict[str, float]:
        """Count what the noted steps have seen. Waits for the device.

        Returns:
            The row reported of the last step, if it was its turn.

        Raises:
            UserError: A loss or gradient is not a number.
        """
        if not self._pending:
            return {}
        fetched = [(pending, pending.figures()) for pending in self._pending]
        last, self._pending = self._pending[-1], []
        seconds = self._stopwatch.seconds() if last.seconds is None else last.seconds
        for pending, figures in fetched:
            if not self.skips_overflows:
                check_finite(figures, pending.step, max(math.ceil(pending.epoch) - 1, 0))
            self.num_tokens += int(figures["num_tokens"])
            self.num_rows += int(figures["num_rows"])
            self.laps.add(int(figures["num_tokens"]), seconds)
        if last.step % self.every:
            return {}
        row = self._row(last.epoch, figures)
        self.log(row, last.step)
        return row

    def _row(self, epoch: float, figures: dict[str, float]) -> dict[str, float]:
        speed = self.laps.tokens_per_second()
        row = {**{name: figures[name] for name in ("loss", "lr", "grad_norm")}, "epoch": epoch,
               "tokens": self.num_tokens, "tokens_per_second": speed}
        if self.flops_share is not None:
            row["mfu"] = self.flops_share * speed
        return {f"train/{name}": value for name, value in row.items()}

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Report metrics, and keep them for the final numbers."""
        self.latest |= metrics
        self.report(metrics, step)

    def final(self, step: int) -> dict[str, float]:
        """What metrics.json says of a run that has ended at `step`."""
        return {**self.latest, "train/tokens": self.num_tokens, "train/rows": self.num_rows,
                "trainer/global_step": step}


def check_evaluated(metrics: Any) -> None:
    """Raise UserError where `validate` has measured nothing."""
    if not metrics:
        raise UserError("There is no validation set: set data.val_source or data.val_size.")


def check_finite(figures: dict[str, float], step: int, epoch: int) -> None:
    """Raise UserError when `loss` or `grad_norm` of optimiser step `step` is not a number.

    Call it before what comes of the step is saved.
    """
    if not (math.isfinite(figures["loss"]) and math.isfinite(figures["grad_norm"])):
        raise UserError(
            f"Step {step} (epoch {epoch}): loss is {figures['loss']}, gradient norm {figures['grad_norm']}. Training "
            "stops and no checkpoint of this step is written. Go on from the last checkpoint with a lower "
            "optimizer.lr, a smaller trainer.gradient_clip_val or precision 32-true; inspect shows the rows.")
