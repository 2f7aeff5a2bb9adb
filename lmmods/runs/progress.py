"""Progress of a run, stored in checkpoints in the form of Lightning's loops so that a run can change engine."""

from dataclasses import dataclass
from typing import Any

from lmmods.core.errors import UserError
from lmmods.runs.checkpoint import CheckpointContent

_NO_BATCHES = {"ready": 0, "completed": 0, "started": 0, "processed": 0}


@dataclass(frozen=True)
class Cut:
    """Batch split: how the rows of an optimiser step are divided into micro-batches.

    Args:
        rows: Rows of a micro-batch, `data.batch_size`.
        accumulated: Micro-batches of each data-parallel rank per step, `trainer.accumulate_grad_batches`.
        ranks: Data-parallel ranks; each has its own micro-batches.
    """

    rows: int
    accumulated: int
    ranks: int

    @property
    def at_once(self) -> int:
        """Rows of a global micro-batch."""
        return self.rows * self.ranks

    @property
    def step(self) -> int:
        """Rows of an optimiser step."""
        return self.at_once * self.accumulated

    @property
    def devices(self) -> str:
        """The number of ranks in words."""
        return f"{self.ranks} device{'s' if self.ranks > 1 else ''}"

    def __str__(self) -> str:
        return (f"{self.step} rows (data.batch_size {self.rows} x trainer.accumulate_grad_batches {self.accumulated} x "
                f"{self.devices})")


@dataclass
class Progress:
    """Counts since the start of the run. A batch is a global micro-batch: one micro-batch on each data-parallel rank.

    Args:
        epoch: Epochs finished.
        batches: Batches done in the current epoch.
        total_batches: Batches done in all epochs.
        step: Optimiser steps done.
    """

    epoch: int = 0
    batches: int = 0
    total_batches: int = 0
    step: int = 0

    def count_step(self, num_batches: int) -> None:
        """Count an optimiser step of so many batches."""
        self.batches, self.total_batches = self.batches + num_batches, self.total_batches + num_batches
        self.step += 1

    def loops(self, is_last_of_epoch: bool) -> dict[str, Any]:
        """Return the state of Lightning's loops between two steps, as it saves it in the hook after a micro-batch."""
        # Lightning reads many more counts than this project has; those of finished work are all equal.
        steps = {"ready": self.step, "completed": self.step}
        none = {"total": dict(_NO_BATCHES), "current": dict(_NO_BATCHES)}
        return {
            "fit_loop": {
                "state_dict": {},
                "epoch_loop.state_dict": {"_batches_that_stepped": max(self.step - 1, 0)},
                "epoch_loop.batch_progress": _batch_progress(self.batches, self.total_batches, is_last_of_epoch),
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
                "epoch_loop.val_loop.batch_progress": {**none, "is_last_batch": False},
                "epoch_progress": {name: _epochs(self.epoch) for name in ("total", "current")},
            },
            "validate_loop": {"state_dict": {}, "batch_progress": {**none, "is_last_batch": False}},
            "test_loop": {"state_dict": {}, "batch_progress": {**none, "is_last_batch": False}},
            "predict_loop": {"state_dict": {}, "batch_progress": none},
        }


def read_progress(content: CheckpointContent, data_key: str, now: Cut) -> Progress:
    """Return the progress of a checkpoint of either engine, in batches of the current batch split.

    Args:
        data_key: Key of the training data's state.

    Raises:
        UserError: The checkpoint lies inside one of these batches.
    """
    fit, data = content["loops"]["fit_loop"], content[data_key]
    # "ready" includes the micro-batch in whose hook Lightning saved, which is not counted as completed yet.
    counts = fit["epoch_loop.batch_progress"]
    batches, total = counts["current"]["ready"], counts["total"]["ready"]
    # Counts are of global micro-batches: those of all ranks together.
    before = data["batch_size"] * content.get("world_size", 1)
    if before != now.at_once:
        batches, total = recount(batches, data, before, now)
    return Progress(fit["epoch_progress"]["current"]["completed"], batches, total, content["global_step"])


def rewind(content: CheckpointContent) -> CheckpointContent:
    """Return a checkpoint that an earlier version wrote inside a step as of the start of that step.

    The gradients of the micro-batches done (`window`) are dropped: the resumed run computes the step again, from the
    same weights, rows and seed. Nothing else in a checkpoint changes within a step, except counts of micro-batches.

    Raises:
        UserError: The step began in an earlier buffer of a stream, of which the checkpoint has no position.
    """
    if not (window := content.get("window")):
        return content
    key = next(key for key, value in content.items() if isinstance(value, dict) and "batch_size" in value)
    data, fit, done = dict(content[key]), content["loops"]["fit_loop"], window["num_batches"]  # of each rank
    unit, size = ("rows", data["batch_size"]) if "rows" in data else ("batches", 1)
    data[unit] -= done * content.get("world_size", 1) * size
    if data[unit] < 0:
        raise UserError("An earlier version wrote this checkpoint inside a step that spans two buffers of the stream. "
                        "Resume from an earlier checkpoint.")
    progress = fit["epoch_loop.batch_progress"]
    progress = _batch_progress(progress["current"]["ready"] - done, progress["total"]["ready"] - done, False)
    # Lightning's own copy of the loader's state goes.
    state = {name: value for name, value in fit["state_dict"].items() if name != "combined_loader"}
    fit = {**fit, "state_dict": state, "epoch_loop.batch_progress": progress}
    return {**content, "window": {}, key: data, "loops": {**content["loops"], "fit_loop": fit}}


def _batch_progress(batches: int, total_batches: int, is_last_of_epoch: bool) -> dict[str, Any]:
    """Return Lightning's counts of micro-batches between two steps, in the hook after a micro-batch."""
    # The micro-batch of the hook is not completed yet: otherwise Lightning would not begin to count anew after the last
    # one of an epoch. At the start of an epoch there is none: otherwise Lightning would skip the first micro-batch.
    latest = min(batches, 1)
    counts = {name: {**dict.fromkeys(_NO_BATCHES, count), "completed": count - latest}
              for name, count in (("total", total_batches), ("current", batches))}
    return {**counts, "is_last_batch": is_last_of_epoch}


def recount(ready: int, data: dict[str, Any], before: int, now: Cut) -> tuple[int, int]:
    """Convert counts to batches of another number of rows: batches done in the current epoch and in all epochs.

    Args:
        ready: Batches done in the current epoch.
        data: State of the training data.
        before: Rows of each of these batches.

    Raises:
        UserError: The run lies inside a batch of the new size.
    """
    rows, earlier, ends = ready * before, 0, False
    if "num_rows" in data:  # a stream is one endless epoch
        # Earlier epochs had whole passes over the rows, in the new size: their last micro-batch may be smaller.
        earlier, ends = data["epoch"] * -(-data["num_rows"] // now.at_once), rows >= data["num_rows"]
        rows = min(rows, data["num_rows"])  # a last micro-batch that is not full counts as its real rows
    if rows % now.at_once and not ends:
        raise UserError(
            f"This checkpoint was written after {rows} rows of an epoch, which {now.devices} with data.batch_size "
            f"{now.rows} do not come to in whole micro-batches. Resume with the batch size and devices that wrote it.")
    current = -(-rows // now.at_once)  # rounded up for the last micro-batch of the epoch
    return current, earlier + current


def recount_loops(content: CheckpointContent, data_key: str, now: Cut) -> None:
    """Convert the loops of a checkpoint to batches of the current batch split, in place. Raises as `read_progress`."""
    progress = read_progress(content, data_key, now)
    counts = content["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for part, ready in ((counts["current"], progress.batches), (counts["total"], progress.total_batches)):
        shift = ready - part["ready"]
        for name in part:  # shift each: the current batch may not be completed yet
            part[name] += shift


def correct_epochs(content: CheckpointContent) -> None:
    """Correct Lightning's epoch counts in a checkpoint that it writes within an epoch or exactly at its end.

    After a resume from the end of an epoch Lightning counts neither the end of that epoch nor the start of the next, so
    a run stopped there twice would train one epoch more than max_epochs.
    """
    for counts in content["loops"]["fit_loop"]["epoch_progress"].values():
        counts.update(_epochs(counts["completed"]))


def _epochs(completed: int) -> dict[str, int]:
    """Lightning's counts during the epoch that follows `completed` ones."""
    return {"ready": completed + 1, "completed": completed, "started": completed + 1, "processed": completed}
