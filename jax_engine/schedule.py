"""How long a run is and when it validates, by the rules of Lightning's Trainer."""

from dataclasses import dataclass

from lmmods.core.errors import UserError
from lmmods.core.run_length import num_steps
from lmmods.runs.progress import Progress


@dataclass(frozen=True)
class Schedule:
    """Lengths in optimiser steps and in global micro-batches: one micro-batch on each data-parallel rank.

    Args:
        batches_per_epoch: Global micro-batches of an epoch of training.
        num_val_batches: Global micro-batches of a validation; 0 where there is nothing to validate on.
        batches_per_validation: Global micro-batches from one validation to the next, counted anew in each epoch or
            over the run.
        counts_over_run: Which of the two.
        val_epochs: Every so many epochs validate; None: none does. Where the interval is counted in each epoch.
    """

    batches_per_epoch: int
    num_steps: int
    num_val_batches: int
    batches_per_validation: int
    counts_over_run: bool
    val_epochs: int | None

    @classmethod
    def from_keys(cls, *, batches_per_epoch: int, batches_per_step: int, num_val_batches: int,
                  max_epochs: int | float | None, max_steps: int, val_check_interval: int | float | None,
                  val_epochs: int | None) -> "Schedule":
        """The schedule that the trainer's keys ask for. Raises UserError: the run has no end.

        Args:
            batches_per_step: Global micro-batches of an optimiser step; the last of an epoch may have fewer.
            max_epochs: Epochs, a fraction allowed; None or -1 leave it to `max_steps`.
            max_steps: Optimiser steps; -1 leaves it to `max_epochs`.
            val_check_interval: Global micro-batches over the whole run, or share of an epoch; None is a whole epoch.
        """
        by_share = isinstance(val_check_interval, float)
        interval = max(int(batches_per_epoch * val_check_interval), 1) if by_share else val_check_interval
        steps = num_steps(batches_per_epoch, batches_per_step, max_epochs, max_steps)
        return cls(batches_per_epoch, steps, num_val_batches, interval or batches_per_epoch,
                   isinstance(val_check_interval, int), val_epochs)

    def ends_epoch(self, progress: Progress) -> bool:
        """Whether the last micro-batch done was the last of its epoch."""
        return progress.batches >= self.batches_per_epoch

    def validates_after(self, progress: Progress) -> bool:
        """Whether a validation follows the last micro-batch done."""
        if not self.num_val_batches:
            return False
        if self.counts_over_run:
            return progress.total_batches % self.batches_per_validation == 0
        if self.val_epochs is None or (progress.epoch + 1) % self.val_epochs:
            return False
        return progress.batches % self.batches_per_validation == 0


def limited(num_batches: int, limit: int | float | None, role: str) -> int:
    """Global micro-batches of a pass over a set, limited by `trainer.limit_<role>_batches`: a number or a share.

    Raises:
        UserError: Nothing is left to train on.
    """
    if limit is None:
        return num_batches
    wanted = int(num_batches * limit) if isinstance(limit, float) else limit
    if wanted < 1 and role == "train":
        raise UserError(f"trainer.limit_train_batches is {limit}: of {num_batches} micro-batches nothing is left.")
    return min(wanted, num_batches)
