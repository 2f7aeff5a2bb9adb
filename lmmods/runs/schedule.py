"""How long a run is and when it validates, by the rules of Lightning's Trainer.

The loop of the JAX engine goes by it; of both engines' runs it says what is to come.
"""

from dataclasses import dataclass, replace

from lmmods.core.errors import UserError
from lmmods.core.trainer_fields import num_steps, steps_per_epoch
from lmmods.data.batches.stream import ENDLESS
from lmmods.runs.progress import Progress


@dataclass(frozen=True)
class Schedule:
    """Lengths in optimiser steps and in global micro-batches: one micro-batch on each data-parallel rank.

    Args:
        batches_per_epoch: Global micro-batches of an epoch of training.
        batches_per_step: Global micro-batches of an optimiser step; the last of an epoch may have fewer.
        num_val_batches: Global micro-batches of a validation; 0 where there is nothing to validate on.
        steps_per_validation: Optimiser steps from one validation to the next, counted anew in each epoch or over the
            run: so validations follow the same steps however these are cut into micro-batches.
        counts_over_run: Which of the two.
        val_epochs: Every so many epochs validate; None: none does. Where the interval is counted in each epoch.
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
        """The schedule that the trainer's keys ask for. Raises UserError: the run has no end.

        Args:
            max_epochs: Epochs, a fraction allowed; None or -1 leave it to `max_steps`.
            max_steps: Optimiser steps; -1 leaves it to `max_epochs`.
            val_check_interval: Optimiser steps over the whole run, or share of an epoch; None is a whole epoch.
        """
        epoch = steps_per_epoch(batches_per_epoch, batches_per_step)
        by_share = isinstance(val_check_interval, float)
        interval = max(int(epoch * val_check_interval), 1) if by_share else val_check_interval
        steps = num_steps(batches_per_epoch, batches_per_step, max_epochs, max_steps)
        return cls(batches_per_epoch, batches_per_step, steps, num_val_batches, interval or epoch,
                   isinstance(val_check_interval, int), val_epochs)

    def without_validation(self) -> "Schedule":
        """The same length, and no validation."""
        return replace(self, num_val_batches=0)

    @property
    def is_endless(self) -> bool:
        """Whether the rows come as a stream, in one epoch that never ends."""
        return self.batches_per_epoch >= ENDLESS

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of an epoch."""
        return steps_per_epoch(self.batches_per_epoch, self.batches_per_step)

    @property
    def num_epochs(self) -> float:
        """Epochs of the run, with the fraction."""
        return self._batches(self.num_steps) / self.batches_per_epoch

    def validations_after(self, step: int) -> int:
        """How many validations are to come after optimiser step `step`, the one with which the run ends included."""
        if not self.num_val_batches or step >= self.num_steps:
            return 0
        at_end = self._validations(self.num_steps) == self._validations(self.num_steps - 1)  # no interval asks for it
        return self._validations(self.num_steps) - self._validations(step) + at_end

    def _batches(self, step: int) -> int:
        """Global micro-batches of the first `step` optimiser steps."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * self.batches_per_epoch + min(steps * self.batches_per_step, self.batches_per_epoch)

    def _validations(self, steps: int) -> int:
        """Validations that the interval asks for in so many optimiser steps."""
        if self.counts_over_run:
            return steps // self.steps_per_validation
        if self.val_epochs is None:
            return 0
        epochs, steps = divmod(steps, self.steps_per_epoch)
        each = self.steps_per_epoch // self.steps_per_validation
        is_due = (epochs + 1) % self.val_epochs == 0
        return epochs // self.val_epochs * each + (steps // self.steps_per_validation if is_due else 0)

    def ends_epoch(self, progress: Progress) -> bool:
        """Whether the last micro-batch done was the last of its epoch."""
        return progress.batches >= self.batches_per_epoch

    def validates_after(self, progress: Progress) -> bool:
        """Whether a validation follows the last micro-batch done."""
        if not self.num_val_batches:
            return False
        if progress.batches % self.batches_per_step and not self.ends_epoch(progress):
            return False  # inside a step
        if self.counts_over_run:
            return progress.step % self.steps_per_validation == 0
        if self.val_epochs is None or (progress.epoch + 1) % self.val_epochs:
            return False
        return steps_per_epoch(progress.batches, self.batches_per_step) % self.steps_per_validation == 0


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


@dataclass(frozen=True)
class RunLength:
    """How long a run is that has not been cut into micro-batches yet.

    Args:
        rows: Of an epoch.
        limit: `trainer.limit_train_batches`, see `limited`.
        max_steps: And `max_epochs`: as of `Schedule.from_keys`.
    """

    rows: int
    limit: int | float | None
    max_steps: int
    max_epochs: int | float | None

    def num_steps(self, batch: int, batches_per_step: int) -> int:
        """Optimiser steps.

        Args:
            batch: Rows of a global micro-batch.
        """
        batches = limited(-(-self.rows // batch), self.limit, "train")
        return num_steps(batches, batches_per_step, self.max_epochs, self.max_steps)
