"""Where a run stands, and how a checkpoint says it: in the words of Lightning, so that a run can change engine."""

from dataclasses import dataclass
from typing import Any

from lmmods.runs.progress import recount


@dataclass
class Progress:
    """Counts since the start of the run. A batch is a global micro-batch: one micro-batch on each data-parallel rank.

    Args:
        epoch: Epochs finished.
        batches: Batches of the current epoch done.
        total_batches: Batches of all epochs done.
        step: Optimiser steps done.
    """

    epoch: int = 0
    batches: int = 0
    total_batches: int = 0
    step: int = 0

    def loops(self, is_last_of_epoch: bool) -> dict[str, Any]:
        """The state of Lightning's loops at this moment."""
        none = _counts(0, 0, False)
        steps = {"ready": self.step, "completed": self.step}
        return {
            "fit_loop": {
                "state_dict": {},
                "epoch_loop.state_dict": {"_batches_that_stepped": self.step},
                "epoch_loop.batch_progress": _counts(self.total_batches, self.batches, is_last_of_epoch),
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
            **{f"{name}_loop": {"state_dict": {}, "batch_progress": _counts(0, 0, False)}
               for name in ("validate", "test", "predict")},
        }


def read_progress(checkpoint: dict[str, Any], data_key: str, num_ranks: int) -> Progress:
    """Where a checkpoint of either engine stands, counted in batches of `num_ranks` data-parallel ranks.

    Args:
        data_key: Under which the DataModule's state lies.

    Raises:
        UserError: It stands inside a batch of this many ranks.
    """
    fit = checkpoint["loops"]["fit_loop"]
    before, data, progress = checkpoint["world_size"], checkpoint[data_key], fit["epoch_loop.batch_progress"]
    epoch, step = fit["epoch_progress"]["current"]["completed"], checkpoint["global_step"]
    if before == num_ranks:
        return Progress(epoch, progress["current"]["ready"], progress["total"]["ready"], step)
    return Progress(epoch, *recount(progress["current"]["ready"], data, before, num_ranks, "devices"), step)


def _counts(total: int, current: int, is_last: bool) -> dict[str, Any]:
    return {**{name: {"ready": count, "completed": count, "started": count, "processed": count}
               for name, count in (("total", total), ("current", current))}, "is_last_batch": is_last}
