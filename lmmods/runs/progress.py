"""How far a run is, and how a checkpoint says it: as Lightning's loops count, so that a run can change engine."""

from dataclasses import dataclass
from typing import Any

from lmmods.core.errors import UserError
from lmmods.runs.checkpoint_content import CheckpointContent

_NO_BATCHES = {"ready": 0, "completed": 0, "started": 0, "processed": 0}


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


def read_progress(content: CheckpointContent, data_key: str, num_ranks: int, kind: str) -> Progress:
    """Where a checkpoint of either engine stands, counted in batches of `num_ranks` data-parallel ranks.

    Args:
        data_key: Under which the state of the training data lies.
        kind: What a rank is called.

    Raises:
        UserError: It stands inside a batch of this many ranks.
    """
    fit = content["loops"]["fit_loop"]
    before, counts = content.get("world_size", 1), fit["epoch_loop.batch_progress"]
    batches, total = counts["current"]["ready"], counts["total"]["ready"]
    if before != num_ranks:
        batches, total = recount(batches, content[data_key], before, num_ranks, kind)
    return Progress(fit["epoch_progress"]["current"]["completed"], batches, total, content["global_step"])


def recount(ready: int, data: dict[str, Any], before: int, now: int, kind: str) -> tuple[int, int]:
    """Batches of the current epoch and of all epochs done, where the number of ranks changes.

    Args:
        ready: Batches of `before` ranks in the current epoch.
        before: Ranks that wrote the checkpoint.
        now: Ranks that go on.
        kind: What a rank is called.

    Raises:
        UserError: The run stands inside a batch of `now` ranks.
    """
    everywhere, earlier, in_epoch = ready * before, 0, None
    if "num_rows" in data:  # a stream is one endless epoch
        in_epoch = -(-data["num_rows"] // data["batch_size"])
        everywhere, earlier = data["batches"], data["epoch"] * -(-in_epoch // now)
    if everywhere % now and everywhere != in_epoch:
        raise UserError(f"This checkpoint of {before} {kind} cannot go on with {now}: it stands at micro-batch "
                        f"{everywhere}, which {now} {kind} do not share evenly. Resume from one at another step, or "
                        f"with as many {kind} as before.")
    current = -(-everywhere // now)
    return current, earlier + current


def recount_loops(content: CheckpointContent, data_key: str, num_ranks: int, kind: str) -> None:
    """Let the loops of a checkpoint count batches of `num_ranks`; arguments and errors as of `read_progress`."""
    progress = read_progress(content, data_key, num_ranks, kind)
    counts = content["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for part, ready in ((counts["current"], progress.batches), (counts["total"], progress.total_batches)):
        shift = ready - part["ready"]
        for name in part:  # the batch under way may not be completed yet
            part[name] += shift


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
