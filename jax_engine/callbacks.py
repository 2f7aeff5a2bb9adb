"""What may watch a run on JAX, under the names and fields of Lightning's callbacks."""

import math
from abc import ABC, abstractmethod
from typing import Any, Literal

from lmmods.console import say
from lmmods.errors import UserError


class Callback(ABC):
    """Watches a run."""

    @property
    def state_key(self) -> str:
        return type(self).__name__

    @abstractmethod
    def on_validation_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """After each validation, before its checkpoint is written; `trainer.should_stop = True` ends the run."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to know, as plain data."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""


class EarlyStopping(Callback):
    """Stop when a metric no longer improves; fields and rules of Lightning's EarlyStopping.

    Args:
        monitor: Metric to watch, for example val/loss.
        min_delta: Least change that counts as an improvement.
        patience: Validations without improvement after which the run stops.
        mode: Whether the smaller or the larger value is better.
        check_finite: Stop when the metric is not a number.
        stopping_threshold: Stop when the metric is better than this.
        divergence_threshold: Stop when the metric is worse than this.
    """

    def __init__(self, monitor: str, min_delta: float = 0.0, patience: int = 3, mode: Literal["min", "max"] = "min",
                 check_finite: bool = True, stopping_threshold: float | None = None,
                 divergence_threshold: float | None = None):
        self.monitor, self.min_delta, self.patience, self.mode = monitor, abs(min_delta), patience, mode
        self.check_finite = check_finite
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.wait_count = 0
        self.best = math.inf if mode == "min" else -math.inf

    @property
    def state_key(self) -> str:
        return f"EarlyStopping{ {'monitor': self.monitor, 'mode': self.mode} }"

    def state_dict(self) -> dict[str, Any]:
        return {"wait_count": self.wait_count, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait_count, self.best = state["wait_count"], state["best"]

    def on_validation_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if self.monitor not in metrics:
            raise UserError(f"EarlyStopping.monitor is {self.monitor!r}, which this run does not log "
                            f"({', '.join(sorted(metrics))}).")
        value = metrics[self.monitor]
        reason = self._reason(value)
        if reason:
            trainer.should_stop = True
            say(f"EarlyStopping: {self.monitor} {value:.6g} {reason}.")

    def _better(self, value: float, other: float, by: float = 0.0) -> bool:
        return value < other - by if self.mode == "min" else value > other + by

    def _reason(self, value: float) -> str | None:
        if self.check_finite and not math.isfinite(value):
            return "is not a number"
        if self.stopping_threshold is not None and self._better(value, self.stopping_threshold):
            return f"is better than stopping_threshold {self.stopping_threshold}"
        if self.divergence_threshold is not None and not self._better(value, self.divergence_threshold):
            return f"is worse than divergence_threshold {self.divergence_threshold}"
        if self._better(value, self.best, self.min_delta):
            self.best, self.wait_count = value, 0
            return None
        self.wait_count += 1
        if self.wait_count < self.patience:
            return None
        return f"did not improve in the last {self.wait_count} validations. The best was {self.best:.6g}"
