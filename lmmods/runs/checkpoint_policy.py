"""Which checkpoints a run writes and keeps, in both engines."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmmods.core.errors import UserError
from lmmods.recipe.block_fields import CheckpointFields
from lmmods.runs.folder import RunFolder, checkpoint_position
from lmmods.runs.run_files import remove_checkpoint


class CheckpointPolicy(CheckpointFields):
    """Ranking of a run's checkpoints, and the rule by which they are kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.best: list[tuple[float, str]] = []  # (value, checkpoint name), best first
        self.rank_by("val/loss", "min")

    def rank_by(self, monitor: str, mode: str) -> None:
        """Set the task's metric and its direction, for ranking checkpoints unless the recipe sets another."""
        self._default = monitor, mode

    @property
    def ranking(self) -> tuple[str, str]:
        """`monitor` and `mode`, with defaults in place of null."""
        monitor, mode = self._default
        return self.monitor or monitor, self.mode or (mode if self.monitor in (None, monitor) else "min")

    def state_dict(self) -> dict[str, Any]:
        monitor, mode = self.ranking
        return {"best": [list(pair) for pair in self.best], "monitor": monitor, "mode": mode}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the ranking, unless it is by another metric than this run's; older checkpoints do not name theirs."""
        monitor, mode = self.ranking
        is_same = (state.get("monitor", monitor), state.get("mode", mode)) == self.ranking
        self.best = [(value, name) for value, name in state["best"] if is_same and math.isfinite(value)]

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint is due after optimiser step `step`."""
        return self.every_n_steps is not None and step % self.every_n_steps == 0

    def rank(self, metrics: dict[str, float], name: str) -> None:
        """Add the checkpoint about to be written to the ranking, unless its value is not finite.

        Raises:
            UserError: The run does not log the metric to rank by.
        """
        if not self.keep_best:
            return
        monitor, mode = self.ranking
        if monitor not in metrics:
            raise UserError(f"checkpoint.monitor is {monitor!r}, which this run does not log. Use one of "
                            f"{', '.join(sorted(metrics))}.")
        value = metrics[monitor]
        if not math.isfinite(value):
            return
        self.best = [pair for pair in self.best if pair[1] != name] + [(value, name)]
        sign = 1 if mode == "min" else -1
        self.best.sort(key=lambda pair: (sign * pair[0], checkpoint_position(pair[1])))
        self.best = self.best[: self.keep_best]

    def decide(self, newest: str) -> "KeptCheckpoints":
        """Return which checkpoints to keep once `newest` is written, by the current ranking."""
        return KeptCheckpoints(newest, tuple(name for _, name in self.best), self.keep_last)

    def resume(self, folder: RunFolder, checkpoint: Path) -> None:
        """Complete the clean-up of a run that was interrupted after writing `checkpoint`.

        Checkpoints that were deleted or belong to another run folder are removed from the ranking.
        """
        self.best = [pair for pair in self.best if folder.checkpoint(pair[1]).is_dir()][: self.keep_best]
        if checkpoint.name in folder.names():
            self.decide(checkpoint.name).apply(folder)


@dataclass(frozen=True)
class KeptCheckpoints:
    """The checkpoints to keep, decided when one is written. Another thread may apply this while training goes on.

    Args:
        newest: Name of the checkpoint being written.
        best: Names of the best checkpoints, best first; may include `newest`.
        keep_last: Number of newest checkpoints to keep.
    """

    newest: str
    best: tuple[str, ...]
    keep_last: int

    def apply(self, folder: RunFolder) -> None:
        """Point `last` and `best` to their checkpoints, then delete the others. Call when `newest` is complete.

        In this order, a process killed at any point leaves complete checkpoints, and links to complete ones.
        """
        folder.point("last", folder.checkpoint(self.newest))
        if self.best and folder.checkpoint(self.best[0]).is_dir():
            folder.point("best", folder.checkpoint(self.best[0]))
        for name in folder.names()[: -self.keep_last]:
            if name not in (self.newest, *self.best):
                remove_checkpoint(folder.checkpoint(name))
