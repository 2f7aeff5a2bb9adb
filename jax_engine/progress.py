"""Where a run stands, and how a checkpoint says it: in the words of Lightning, so that a run can change engine."""

from dataclasses import dataclass
from typing import Any

from lmmods.runs.progress import recount


@dataclass
class Position:
    """Counts since the start of the run. A round is one micro-batch for each share.

    Args:
        epoch: Epochs finished.
        rounds: Rounds of the current epoch done.
        total_rounds: Rounds of all epochs done.
        step: Optimiser steps done.
    """

    epoch: int = 0
    rounds: int = 0
    total_rounds: int = 0
    step: int = 0

    def loops(self, is_last_of_epoch: bool) -> dict[str, Any]:
        """The state of Lightning's loops at this position."""
        none = _batches(0, 0, False)
        steps = {"ready": self.step, "completed": self.step}
        return {
            "fit_loop": {
                "state_dict": {},
                "epoch_loop.state_dict": {"_batches_that_stepped": self.step},
                "epoch_loop.batch_progress": _batches(self.total_rounds, self.rounds, is_last_of_epoch),
                "epoch_loop.scheduler_progress": {"total": dict(steps), "current": dict(steps)},
                "epoch_loop.automatic_optimization.state_dict": {},
                "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {
                    "step": {"total": dict(steps), "current": dict(steps)},
                    "zero_grad": {"total": {**steps, "started": self.step}, "current": {**steps, "started": self.step}},
                }},
                "epoch_loop.manual_optimization.state_dict": {},
                "epoch_loop.manual_optimization.optim_step_progress": {
                    "total": {"ready": 0, "completed": 0}, "current": {"ready": 0, "completed": 0}},
                "epoch_loop.val_loop.state_dict": {},
                "epoch_loop.val_loop.batch_progress": none,
                "epoch_progress": {name: {"ready": self.epoch + 1, "completed": self.epoch, "started": self.epoch + 1,
                                          "processed": self.epoch} for name in ("total", "current")},
            },
            **{f"{name}_loop": {"state_dict": {}, "batch_progress": _batches(0, 0, False)}
               for name in ("validate", "test", "predict")},
        }


def read_position(checkpoint: dict[str, Any], data_key: str, num_shares: int) -> Position:
    """Where a checkpoint of either engine stands, counted in rounds of `num_shares`.

    Args:
        data_key: Under which the DataModule's position lies.

    Raises:
        UserError: It stands inside a round of this many shares.
    """
    fit = checkpoint["loops"]["fit_loop"]
    before, data, progress = checkpoint["world_size"], checkpoint[data_key], fit["epoch_loop.batch_progress"]
    epoch, step = fit["epoch_progress"]["current"]["completed"], checkpoint["global_step"]
    if before == num_shares:
        return Position(epoch, progress["current"]["ready"], progress["total"]["ready"], step)
    return Position(epoch, *recount(progress["current"]["ready"], data, before, num_shares, "devices"), step)


def _batches(total: int, current: int, is_last: bool) -> dict[str, Any]:
    return {**{name: {"ready": count, "completed": count, "started": count, "processed": count}
               for name, count in (("total", total), ("current", current))}, "is_last_batch": is_last}
