"""How many optimiser steps a run has, by `trainer.max_epochs` and `trainer.max_steps`."""

import math
from fractions import Fraction

from lmmods.core.errors import UserError
from lmmods.core.settings import require


def check_length(max_epochs: int | float | None, max_steps: int) -> None:
    """Raise UserError unless the keys say how long to train."""
    if max_epochs is None and max_steps == -1:
        raise UserError("trainer.max_steps or trainer.max_epochs is missing: say how long to train.")
    require(max_epochs in (None, -1) or math.isfinite(max_epochs) and max_epochs >= 0, "trainer.max_epochs", max_epochs,
            "a number of epochs, 0 or more; 1.5 is one and a half, and -1 leaves it to trainer.max_steps")


def steps_per_epoch(batches_per_epoch: int, batches_per_step: int) -> int:
    """Optimiser steps of an epoch; arguments as of `num_steps`."""
    return -(-batches_per_epoch // batches_per_step)


def num_steps(batches_per_epoch: int, batches_per_step: int, max_epochs: int | float | None, max_steps: int) -> int:
    """Optimiser steps of a run. Raises UserError: the run has no end.

    Args:
        batches_per_epoch: Micro-batches of each device in an epoch.
        batches_per_step: Micro-batches of each device in an optimiser step; the last step of an epoch may have fewer.
        max_epochs: Epochs; a fraction of the steps of one is rounded up to whole steps. None or -1: max_steps decides.
        max_steps: Optimiser steps; -1: max_epochs decides.
    """
    check_length(max_epochs, max_steps)
    by_epochs = math.inf
    if max_epochs not in (None, -1):
        whole, part = divmod(Fraction(str(max_epochs)), 1)  # as written: 1.1 is no more than eleven tenths
        steps = steps_per_epoch(batches_per_epoch, batches_per_step)
        by_epochs = whole * steps + math.ceil(part * steps)
    steps = min(by_epochs, math.inf if max_steps == -1 else max_steps)
    if math.isinf(steps):
        raise UserError("trainer.max_steps or trainer.max_epochs is missing: say how long to train.")
    return steps
