"""How long a run is and when it validates, by the rules of Lightning's Trainer."""

from dataclasses import dataclass

from jax_engine.progress import Position
from lmmods.core.errors import UserError
from lmmods.core.run_length import num_steps


@dataclass(frozen=True)
class Plan:
    """Lengths in rounds (one micro-batch for each share) and in optimiser steps.

    Args:
        rounds_per_epoch: Rounds of an epoch of training.
        num_steps: Optimiser steps of the run.
        num_val_rounds: Rounds of a validation; 0 where there is nothing to validate on.
        rounds_per_validation: Rounds from one validation to the next, counted anew in each epoch or over the run.
        counts_over_run: Which of the two.
        val_epochs: Every so many epochs validate; None: none does. Where rounds are counted in each epoch.
    """

    rounds_per_epoch: int
    num_steps: int
    num_val_rounds: int
    rounds_per_validation: int
    counts_over_run: bool
    val_epochs: int | None

    def ends_epoch(self, position: Position) -> bool:
        """Whether the last round done was the last of its epoch."""
        return position.rounds >= self.rounds_per_epoch

    def validates_after(self, position: Position) -> bool:
        """Whether a validation follows the last round done."""
        if not self.num_val_rounds:
            return False
        if self.counts_over_run:
            return position.total_rounds % self.rounds_per_validation == 0
        if self.val_epochs is None or (position.epoch + 1) % self.val_epochs:
            return False
        return position.rounds % self.rounds_per_validation == 0


def make_plan(*, rounds_per_epoch: int, rounds_per_step: int, num_val_rounds: int, max_epochs: int | float | None,
              max_steps: int, val_check_interval: int | float | None, val_epochs: int | None) -> Plan:
    """The plan that the trainer's keys ask for.

    Args:
        rounds_per_step: Rounds of an optimiser step; the last of an epoch may have fewer.
        max_epochs: Epochs, a fraction allowed; None or -1 leave it to `max_steps`.
        max_steps: Optimiser steps; -1 leaves it to `max_epochs`.
        val_check_interval: Rounds over the whole run, or share of an epoch; None is a whole epoch.

    Raises:
        UserError: The run has no end, or the interval is no share.
    """
    is_share = isinstance(val_check_interval, float)
    if is_share and not 0 <= val_check_interval <= 1:
        raise UserError(f"trainer.val_check_interval is {val_check_interval}, but must be a share from 0.0 to 1.0, or "
                        "a whole number of micro-batches.")
    interval = max(int(rounds_per_epoch * val_check_interval), 1) if is_share else val_check_interval
    steps = num_steps(rounds_per_epoch, rounds_per_step, max_epochs, max_steps)
    return Plan(rounds_per_epoch, steps, num_val_rounds, interval or rounds_per_epoch,
                isinstance(val_check_interval, int), val_epochs)


def limited(rounds: int, limit: int | float | None, role: str) -> int:
    """Rounds of a pass over a set, cut by `trainer.limit_<role>_batches`: a number of rounds or a share.

    Raises:
        UserError: Nothing is left to train on.
    """
    if limit is None:
        return rounds
    wanted = int(rounds * limit) if isinstance(limit, float) else limit
    if wanted < 1 and role == "train":
        raise UserError(f"trainer.limit_train_batches is {limit}: of {rounds} micro-batches nothing is left.")
    return min(wanted, rounds)
