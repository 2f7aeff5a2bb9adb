"""The numbers of a run's steps, from the devices to loggers and progress bar."""

from collections.abc import Callable

import jax

from jax_engine.distributed.steps import fetch_figures
from lmmods.core.progress_bar import Bar, describe
from lmmods.core.throughput import Stopwatch
from lmmods.runs.csv_logger import Logger
from lmmods.runs.step_metrics import StepMetrics


class Metrics(StepMetrics):
    """`StepMetrics` of arrays.

    Args:
        lr_at: Learning rate of a step, 0 the first.
    """

    def __init__(self, every: int, stopwatch: Stopwatch, bar: Bar, lr_at: Callable[[int], float],
                 flops_share: float | None):
        super().__init__(stopwatch, self._report, every, flops_share)
        self.loggers: list[Logger] = []
        self._bar, self._lr_at = bar, lr_at

    def add(self, step: int, epoch: float, figures: dict[str, jax.Array]) -> None:
        """Note a step.

        Args:
            figures: Of `Steps.update`.
        """
        super().add(step, epoch, lambda: {**fetch_figures(figures), "lr": self._lr_at(step - 1)},
                    figures["total"].is_ready)
        self._bar.update(step)

    def _report(self, metrics: dict[str, float], step: int) -> None:
        for logger in self.loggers:
            logger.log_metrics(metrics, step=step)
        self._bar.update(step, describe(metrics))
