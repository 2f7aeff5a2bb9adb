"""Early stopping rule and its checkpointed state, shared by both engines. Imports neither torch nor jax."""

import math
from enum import IntEnum
from typing import Any, Literal

from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.settings import require


class Reason(IntEnum):
    """Reason why a run stopped; values match Lightning's EarlyStoppingReason, as checkpoints store them."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStoppingRule:
    """Stop when a metric no longer improves; fields and rules of Lightning's EarlyStopping.

    Args:
        monitor: Metric to monitor, for example val/loss.
        min_delta: Minimum change that counts as an improvement.
        patience: Number of checks without improvement after which the run stops.
        verbose: Print each improvement.
        mode: `min` if lower values are better, `max` if higher ones are.
        strict: Reject a metric that the run does not log; false waits for it.
        check_finite: Stop when the metric is not finite.
        stopping_threshold: Stop when the metric is better than this.
        divergence_threshold: Stop when the metric is worse than this.
        check_on_train_epoch_end: Check at the end of each epoch instead of after each validation. Default: only if the
            run does not validate.
        log_rank_zero_only: No effect: only the first process prints.
    """

    def __init__(self, monitor: str, min_delta: float = 0.0, patience: int = 3, verbose: bool = False,
                 mode: Literal["min", "max"] = "min", strict: bool = True, check_finite: bool = True,
                 stopping_threshold: float | None = None, divergence_threshold: float | None = None,
                 check_on_train_epoch_end: bool | None = None, log_rank_zero_only: bool = False):
        require(mode in ("min", "max"), "EarlyStopping.mode", mode, "min or max")
        self.monitor, self.min_delta, self.patience, self.verbose, self.mode = (
            monitor, min_delta, patience, verbose, mode)
        self.strict, self.check_finite = strict, check_finite
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.wait_count, self.best_score = 0, math.inf if mode == "min" else -math.inf
        self.reason, self.message = Reason.NOT_STOPPED, ""

    # State -----------------------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint."""
        return f"EarlyStopping{ {'monitor': self.monitor, 'mode': self.mode} }"

    def state_dict(self) -> dict[str, Any]:
        return {"wait_count": self.wait_count, "best_score": self.best_score, "stopping_reason": int(self.reason),
                "stopping_reason_message": self.message}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. Also accept Lightning's, whose best score is a tensor, and states with the key `best`."""
        self.wait_count = int(state["wait_count"])
        self.best_score = float(state["best_score"] if "best_score" in state else state["best"])
        self.message = state.get("stopping_reason_message") or ""
        # Older states do not contain the reason.
        default = Reason.PATIENCE_EXHAUSTED if self.wait_count >= self.patience else Reason.NOT_STOPPED
        self.reason = Reason(state.get("stopping_reason", default))

    def begin(self, validates: bool) -> str:
        """Start or resume. Return why a resumed run stays stopped (unless `patience` was raised), else ""."""
        # Without validations the end of an epoch is the only chance to check.
        if self.check_on_train_epoch_end is None:
            self.check_on_train_epoch_end = not validates
        if self.reason is Reason.PATIENCE_EXHAUSTED and self.wait_count < self.patience:
            self.reason, self.message = Reason.NOT_STOPPED, ""
        if self.reason is Reason.NOT_STOPPED:
            return ""
        return self.message or f"EarlyStopping: {self.monitor} stopped the run."

    # Checking --------------------------------------------------------------------------------------------------------

    def is_due(self, validated: bool, epoch_ends: bool) -> bool:
        """Return True if the metric is to be checked now, before this step's checkpoint is written."""
        return self.reason is Reason.NOT_STOPPED and (epoch_ends if self.check_on_train_epoch_end else validated)

    def check(self, metrics: dict[str, float]) -> bool:
        """Check the metric and return whether the run stops. Raises UserError: the run does not log the metric."""
        if self.monitor not in metrics:
            if self.strict:
                raise UserError(f"EarlyStopping.monitor is {self.monitor!r}, which this run does not log. Set it to "
                                f"one of {', '.join(sorted(metrics))}.")
            return False
        value = float(metrics[self.monitor])
        self.reason, explanation = self._check(value)
        if self.reason is Reason.NOT_STOPPED:
            return False
        self.message = f"EarlyStopping: {self.monitor} {value:.6g} {explanation}."
        say(self.message)
        return True

    def _check(self, value: float) -> tuple[Reason, str]:
        # First, since a comparison with NaN is always false, so the thresholds would not detect it.
        if self.check_finite and not math.isfinite(value):
            return Reason.NON_FINITE_METRIC, "is not finite"
        if self.stopping_threshold is not None and self._is_better(value, self.stopping_threshold):
            return Reason.STOPPING_THRESHOLD, f"is better than stopping_threshold {self.stopping_threshold}"
        # With both signs reversed, better means worse.
        if self.divergence_threshold is not None and self._is_better(-value, -self.divergence_threshold):
            return Reason.DIVERGENCE_THRESHOLD, f"is worse than divergence_threshold {self.divergence_threshold}"
        # An improvement by more than `min_delta`.
        if self._is_better(value - (self.min_delta if self.mode == "max" else -self.min_delta), self.best_score):
            self.best_score, self.wait_count = value, 0
            if self.verbose:
                say(f"EarlyStopping: {self.monitor} {value:.6g} is the best so far.")
            return Reason.NOT_STOPPED, ""
        self.wait_count += 1
        if self.wait_count < self.patience:
            return Reason.NOT_STOPPED, ""
        return Reason.PATIENCE_EXHAUSTED, (f"did not improve in the last {self.wait_count} checks. The best was "
                                           f"{self.best_score:.6g}")

    def _is_better(self, value: float, other: float) -> bool:
        return value < other if self.mode == "min" else value > other
