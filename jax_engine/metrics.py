"""What is measured while training: one place that feeds every logger, the progress bar and metrics.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jax_engine.distributed.steps import check_finite, window_figures
from lmmods.core.progress_bar import Bar, describe
from lmmods.core.throughput import Laps, Stopwatch
from lmmods.runs.csv_logger import Logger


@dataclass
class Noted:
    """A step that is under way, or done, but not counted yet.

    Args:
        figures: Of `Steps.update`, on the devices.
        done: What the stopwatch showed when the step was first seen to be done.
    """

    step: int
    epoch: float
    figures: dict[str, jax.Array]
    done: float | None = None


class Metrics:
    """Log every so many optimiser steps and after each evaluation, under the names of the torch engine.

    Args:
        every: Optimiser steps between logged rows.
        lr_at: Learning rate of a step, 0 the first.
        flops_share: What a token per second is of all devices' peak, for train/mfu; None where the peak is not known.
    """

    def __init__(self, every: int, stopwatch: Stopwatch, bar: Bar, lr_at: Callable[[int], float],
                 flops_share: float | None):
        self.loggers: list[Logger] = []
        self.latest: dict[str, float] = {}
        self.num_tokens = self.num_rows = 0
        self._every, self._stopwatch, self._bar = every, stopwatch, bar
        self._lr_at, self._flops_share = lr_at, flops_share
        self._pending: list[Noted] = []
        self.laps = Laps()

    def state_dict(self) -> dict[str, Any]:
        return {"num_tokens": self.num_tokens, "num_rows": self.num_rows, "latest": dict(self.latest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_tokens, self.num_rows, self.latest = state["num_tokens"], state["num_rows"], state["latest"]

    def add(self, step: int, epoch: float, figures: dict[str, jax.Array]) -> None:
        """Note a step. Figures of the steps before are fetched while this one runs: the device never waits."""
        if self._pending and self._pending[-1].step % self._every == 0:
            self.fetch()
        self._pending.append(Noted(step, epoch, figures))
        self.look()
        self._bar.update(step)

    def look(self) -> None:
        """Note the time if the last step is done by now; waits for nothing.

        Devices may run behind, or, as CPUs do, within the call that starts a step: neither the time of that call nor
        that of fetching the figures, when the next step has been started, says when a step was done.
        """
        if self._pending and self._pending[-1].done is None and self._pending[-1].figures["total"].is_ready():
            self._pending[-1].done = self._stopwatch.seconds()

    def fetch(self) -> None:
        """Count what the noted steps have seen, and log the last if it is its turn. Waits for the device.

        Raises:
            UserError: A loss or gradient is not a number.
        """
        if not self._pending:
            return
        fetched = [(noted.step, int(noted.epoch), window_figures(noted.figures)) for noted in self._pending]
        self.look()
        last, self._pending = self._pending[-1], []
        for step, epoch, figures in fetched:
            check_finite(figures, step, epoch)
            self.num_tokens += figures["num_tokens"]
            self.num_rows += figures["num_rows"]
            self.laps.add(figures["num_tokens"], last.done)
        if last.step % self._every == 0:
            self._log_step(last.step, last.epoch, figures)

    def _log_step(self, step: int, epoch: float, figures: dict[str, float]) -> None:
        speed = self.laps.tokens_per_second()
        shown = {"loss": figures["loss"], "lr": self._lr_at(step - 1), "grad_norm": figures["grad_norm"],
                 "epoch": epoch, "tokens": self.num_tokens, "tokens_per_second": speed}
        if self._flops_share is not None:
            shown["mfu"] = self._flops_share * speed
        self.log({f"train/{name}": value for name, value in shown.items()}, step)
        self._bar.update(step, describe(self.latest))

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Give metrics to every logger."""
        self.latest |= metrics
        for logger in self.loggers:
            logger.log_metrics(metrics, step=step)

    def final(self, step: int) -> dict[str, float]:
        """What metrics.json says of a run that has ended at `step`."""
        return {**self.latest, "train/tokens": self.num_tokens, "train/rows": self.num_rows,
                "trainer/global_step": step}
