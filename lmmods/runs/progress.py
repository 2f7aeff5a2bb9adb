"""How far a run is, and how a checkpoint says it: as Lightning's loops count, so that a run can change engine."""

from dataclasses import dataclass
from typing import Any

from lmmods.core.errors import UserError
from lmmods.runs.checkpoint_format import CheckpointContent

_NO_BATCHES = {"ready": 0, "completed": 0, "started": 0, "processed": 0}


@dataclass(frozen=True)
class Cut:
    """How the rows of an optimiser step are cut into micro-batches.

    Args:
        rows: Of a micro-batch, `data.batch_size`.
        accumulated: Micro-batches of each data-parallel rank, `trainer.accumulate_grad_batches`.
        ranks: Data-parallel ranks: each has micro-batches of its own.
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
        """The ranks in words."""
        return f"{self.ranks} device{'s' if self.ranks > 1 else ''}"

    def __str__(self) -> str:
        return (f"{self.step} rows (data.batch_size {self.rows} x trainer.accumulate_grad_batches {self.accumulated} x "
                f"{self.devices})")


@dataclass
class Progress:
    """Counts since the start of the run. A batch is a global micro-batch: one micro-batch on each data-parallel rank.

    Args:
        epoch: Epochs finished.
        batches: Batches of the current epoch done.
        total_batches: Batches of all epochs done.
        step: Optimiser steps done.
        accumulated: Batches done of the step under way.
    """

    epoch: int = 0
    batches: int = 0
    total_batches: int = 0
    step: int = 0
    accumulated: int = 0

    def loops(self, is_last_of_epoch: bool) -> dict[str, Any]:
        """The state of Lightning's loops at this moment."""
        steps = {"ready": self.step, "completed": self.step}
        none = {"total": dict(_NO_BATCHES), "current": dict(_NO_BATCHES)}
        return {
            "fit_loop": {
                "state_dict": {},
                "epoch_loop.state_dict": {"_batches_that_stepped": self.step},
                "epoch_loop.batch_progress": {
                    "total": dict.fromkeys(_NO_BATCHES, self.total_batches),
                    "current": dict.fromkeys(_NO_BATCHES, self.batches), "is_last_batch": is_last_of_epoch},
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
    """Where a checkpoint of either engine stands, in batches as the run goes on with.

    Args:
        data_key: Under which the state of the training data lies.

    Raises:
        UserError: It stands inside one of these.
    """
    fit, data = content["loops"]["fit_loop"], content[data_key]
    counts, accumulated = fit["epoch_loop.batch_progress"], content["window"].get("num_batches", 0)
    batches, total = counts["current"]["ready"], counts["total"]["ready"]
    before = data["batch_size"] * content.get("world_size", 1)
    if before != now.at_once:
        batches, total = recount(batches, data, before, now)
        accumulated = accumulated * before // now.at_once
    return Progress(fit["epoch_progress"]["current"]["completed"], batches, total, content["global_step"], accumulated)


def recount(ready: int, data: dict[str, Any], before: int, now: Cut) -> tuple[int, int]:
    """Batches of the current epoch and of all epochs done, where they are of another number of rows.

    Args:
        ready: Batches done of the current epoch.
        data: State of the training data.
        before: Rows of each.

    Raises:
        UserError: The run stands inside a batch of now.
    """
    rows, earlier, ends = ready * before, 0, False
    if "num_rows" in data:  # a stream is one endless epoch
        earlier, ends = data["epoch"] * -(-data["num_rows"] // now.at_once), rows >= data["num_rows"]
        rows = min(rows, data["num_rows"])
    if rows % now.at_once and not ends:
        raise UserError(
            f"This checkpoint stands inside a step, behind {rows} rows of an epoch, which {now.devices} with "
            f"data.batch_size {now.rows} do not come to in whole micro-batches. Resume from a checkpoint between two "
            "steps, whose name has no +, or with the batch size and devices that wrote it.")
    current = -(-rows // now.at_once)
    return current, earlier + current


def recount_loops(content: CheckpointContent, data_key: str, now: Cut) -> Progress:
    """Let the loops of a checkpoint count batches as the run goes on with; what they say, and errors, as of
    `read_progress`."""
    progress = read_progress(content, data_key, now)
    counts = content["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for part, ready in ((counts["current"], progress.batches), (counts["total"], progress.total_batches)):
        shift = ready - part["ready"]
        for name in part:  # the batch under way may not be completed yet
            part[name] += shift
    return progress


def correct_epochs(content: CheckpointContent) -> None:
    """Set Lightning's count of epochs right in a checkpoint that it writes inside an epoch or right at its end.

    After a resume from the end of an epoch it counts neither the end of that one nor the start of the next; a run
    stopped so twice would train an epoch more than max_epochs.
    """
    for counts in content["loops"]["fit_loop"]["epoch_progress"].values():
        counts.update(_epochs(counts["completed"]))


def _epochs(completed: int) -> dict[str, int]:
    """The counts while the epoch after `completed` ones is under way."""
    return {"ready": completed + 1, "completed": completed, "started": completed + 1, "processed": completed}
