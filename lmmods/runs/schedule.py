"""Length of a run and its validations, by the rules of Lightning's Trainer."""

from dataclasses import dataclass, replace

from lmmods.data.batch.stream import ENDLESS
from lmmods.recipe.trainer_fields import limit_batches, num_steps, steps_per_epoch
from lmmods.runs.progress import Progress


@dataclass(frozen=True)
class Schedule:
    """Lengths in optimiser steps and in global micro-batches: one micro-batch on each data-parallel rank.

    Args:
        batches_per_epoch: Global micro-batches of a training epoch.
        batches_per_step: Global micro-batches of an optimiser step; the last one of an epoch may have fewer.
        num_val_batches: Global micro-batches of a validation; 0 if there is no validation set.
        steps_per_validation: Optimiser steps between two validations, which does not depend on the batch split.
        counts_over_run: True if this interval is counted over the whole run, False if it restarts with each epoch.
        val_epochs: Validate only in every n-th epoch; None for no epoch. Ignored if `counts_over_run`.
    """

    batches_per_epoch: int
    batches_per_step: int
    num_steps: int
    num_val_batches: int
    steps_per_validation: int
    counts_over_run: bool
    val_epochs: int | None

    @classmethod
    def from_keys(cls, *, batches_per_epoch: int, batches_per_step: int, num_val_batches: int,
                  max_epochs: int | float | None, max_steps: int, val_check_interval: int | float | None,
                  val_epochs: int | None) -> "Schedule":
        """Build the schedule from the trainer's keys. Raises UserError: the run has no end.

        Args:
            max_epochs: Maximum number of epochs, may be fractional; None or -1 for no maximum.
            max_steps: Maximum number of optimiser steps; -1 for no maximum.
            val_check_interval: Optimiser steps over the whole run, or fraction of an epoch; None is a whole epoch.
        """
        epoch = steps_per_epoch(batches_per_epoch, batches_per_step)
        interval = (max(int(epoch * val_check_interval), 1) if isinstance(val_check_interval, float)
                    else val_check_interval)
        steps = num_steps(batches_per_epoch, batches_per_step, max_epochs, max_steps)
        return cls(batches_per_epoch, batches_per_step, steps, num_val_batches, interval or epoch,
                   isinstance(val_check_interval, int), val_epochs)

    def without_validation(self) -> "Schedule":
        """Return a schedule of the same length without validations."""
        return replace(self, num_val_batches=0)

    @property
    def is_endless(self) -> bool:
        """True if the rows are a stream, which is one endless epoch."""
        return self.batches_per_epoch >= ENDLESS

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of an epoch."""
        return steps_per_epoch(self.batches_per_epoch, self.batches_per_step)

    @property
    def num_epochs(self) -> float:
        """Number of epochs of the run, fractional."""
        return self.num_steps / self.steps_per_epoch

    def validations_after(self, step: int) -> int:
        """Return the number of validations after optimiser step `step`, including the one at the end of the run."""
        if not self.num_val_batches or step >= self.num_steps:
            return 0
        # A run always validates at its end, which adds one unless the interval ends there.
        at_end = self._validations(self.num_steps) == self._validations(self.num_steps - 1)
        return self._validations(self.num_steps) - self._validations(step) + at_end

    def _validations(self, steps: int) -> int:
        """Return the number of validations by the interval in the first `steps` optimiser steps."""
        if self.counts_over_run:
            return steps // self.steps_per_validation
        if self.val_epochs is None:
            return 0
        epochs, steps = divmod(steps, self.steps_per_epoch)
        per_epoch = self.steps_per_epoch // self.steps_per_validation
        is_due = (epochs + 1) % self.val_epochs == 0
        return epochs // self.val_epochs * per_epoch + (steps // self.steps_per_validation if is_due else 0)

    def ends_epoch(self, progress: Progress) -> bool:
        """True if the last step done was the last of its epoch."""
        return progress.epoch_step >= self.steps_per_epoch

    def validates_after(self, progress: Progress) -> bool:
        """True if a validation follows the last step done."""
        if not self.num_val_batches:
            return False
        if self.counts_over_run:
            return progress.step % self.steps_per_validation == 0
        if self.val_epochs is None or (progress.epoch + 1) % self.val_epochs:
            return False
        return progress.epoch_step % self.steps_per_validation == 0


@dataclass(frozen=True)
class RunLength:
    """Length of a run whose batch split is not known yet.

    Args:
        rows: Rows of an epoch.
        limit: `trainer.limit_train_batches`, see `limit_batches`.
        max_steps: See `Schedule.from_keys`.
        max_epochs: See `Schedule.from_keys`.
    """

    rows: int
    limit: int | float | None
    max_steps: int
    max_epochs: int | float | None

    def num_steps(self, batch: int, batches_per_step: int) -> int:
        """Return the number of optimiser steps of the run.

        Args:
            batch: Rows of a global micro-batch.
            batches_per_step: Global micro-batches of an optimiser step.
        """
        batches = limit_batches(-(-self.rows // batch), self.limit, "train")
        return num_steps(batches, batches_per_step, self.max_epochs, self.max_steps)
