"""What is measured while training: one place that feeds every logger, the progress bar and metrics.json."""

from collections.abc import Callable
from typing import Any

import jax

from jax_engine.steps import check_finite, window_figures
from lmmods.loggers import Logger
from lmmods.progress import Bar, describe
from lmmods.throughput import Stopwatch


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
        self._pending: list[tuple[int, float, dict[str, jax.Array]]] = []
        self._lap_tokens = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_tokens": self.num_tokens, "num_rows": self.num_rows, "latest": dict(self.latest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_tokens, self.num_rows, self.latest = state["num_tokens"], state["num_rows"], state["latest"]

    def add(self, step: int, epoch: float, figures: dict[str, jax.Array]) -> None:
        """Note a step. Figures of the steps before are fetched while this one runs: the device never waits."""
        if self._pending and self._pending[-1][0] % self._every == 0:
            self.fetch()
        self._pending.append((step, epoch, figures))
        self._bar.update(step)

    def fetch(self) -> None:
        """Count what the noted steps have seen, and log the last if it is its turn. Waits for the device.

        Raises:
            UserError: A loss or gradient is not a number.
        """
        if not self._pending:
            return
        fetched = [(step, epoch, window_figures(figures)) for step, epoch, figures in self._pending]
        self._pending = []
        for step, epoch, figures in fetched:
            check_finite(figures, step, int(epoch))
            self.num_tokens += figures["num_tokens"]
            self.num_rows += figures["num_rows"]
            self._lap_tokens += figures["num_tokens"]
        if step % self._every == 0:
            self._log_step(step, epoch, figures)

    def _log_step(self, step: int, epoch: float, figures: dict[str, float]) -> None:
        speed, self._lap_tokens = self._lap_tokens / self._stopwatch.lap(), 0
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
