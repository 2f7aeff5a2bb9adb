"""Progress of a run in optimiser steps, which is the same for every batch split and on both engines."""

from dataclasses import asdict, dataclass
from typing import Any, cast

from lmmods.core.errors import UserError
from lmmods.runs.checkpoint import CheckpointContent


@dataclass(frozen=True)
class BatchSplit:
    """How the rows of an optimiser step are split into micro-batches.

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
        """Number of ranks, for messages."""
        return f"{self.ranks} device{'s' if self.ranks > 1 else ''}"

    def __str__(self) -> str:
        return (f"{self.step} rows (data.batch_size {self.rows} x trainer.accumulate_grad_batches {self.accumulated} x "
                f"{self.devices})")


@dataclass
class Progress:
    """Optimiser steps done since the start of the run.

    Args:
        epoch: Epochs finished before the current one.
        epoch_step: Steps done in the current epoch.
        step: Steps done in total.
        ends_epoch: True if the last step done was the last of the current epoch.
    """

    epoch: int = 0
    epoch_step: int = 0
    step: int = 0
    ends_epoch: bool = False

    def state(self) -> dict[str, Any]:
        """Return the entry `progress` of a checkpoint."""
        return asdict(self)


def update_checkpoint(content: CheckpointContent) -> CheckpointContent:
    """Convert a checkpoint to this version's form, without changing the argument.

    Earlier versions stored the state of Lightning's loops, which counted micro-batches, and could save within a step.
    Such a step is repeated with the same weights, rows and seed: the gradients of its first micro-batches (`window`)
    are dropped. Nothing else in a checkpoint changes within a step.

    Raises:
        UserError: The unfinished step started in an earlier buffer of a stream, whose position was not saved.
    """
    if "progress" in content:
        return content
    old_content = cast(dict[str, Any], content)  # with keys that this version does not write
    key, data = next((key, dict(value)) for key, value in old_content.items()
                     if isinstance(value, dict) and "batch_size" in value)
    fit_loop = old_content["loops"]["fit_loop"]
    counts, epochs = fit_loop["epoch_loop.batch_progress"], fit_loop["epoch_progress"]["current"]
    batches, ranks, size = counts["current"]["ready"], old_content.get("world_size", 1), data["batch_size"]
    if window := old_content.get("window"):
        batches -= window["num_batches"]
        counter, factor = ("rows", size) if "rows" in data else ("batches", 1)
        data[counter] -= window["num_batches"] * ranks * factor
        if data[counter] < 0:
            raise UserError("An earlier version wrote this checkpoint within a step that spans two buffers of the "
                            "stream. Resume from an earlier checkpoint.")
    if "num_rows" in data:  # positions were counted in micro-batches, the last of which may be short
        data["rows"] = min(data.pop("batches") * size, data["num_rows"])
    accumulated = old_content.get("identity", {}).get("trainer", {}).get("accumulate_grad_batches") or 1
    # At the end of a run, Lightning had counted the epoch as finished.
    finished = epochs["completed"] - (epochs["ready"] == epochs["completed"] > 0)
    progress = Progress(finished, -(-batches // accumulated), old_content["global_step"],
                        counts["is_last_batch"] and not window)
    return cast(CheckpointContent, {**old_content, key: data, "progress": progress.state()})
