"""The learning rate range test: a short training whose rate rises until the loss diverges (Smith 2015).

Source: L. N. Smith, Cyclical Learning Rates for Training Neural Networks, arXiv:1506.01186, section 3.3. Smoothing, the
rule of divergence and the suggestion at the steepest fall are those of fast.ai's `lr_find` and Lightning's
LearningRateFinder, but for how steepness is measured: batches of text differ so much that the difference of two
smoothed losses is mostly noise, so a line is laid through a window of steps, and it must fall clearly.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from lmmods.core.errors import UserError
from lmmods.core.settings import Optimizer, require

SMOOTHING = 0.98  # of the running mean of the loss
DIVERGED = 4.0  # times the least smoothed loss
WINDOW = 8  # a line is laid through a quarter of the steps, so many parts of them to each side
CLEAR = 3.0  # standard errors of its slope by which a line must fall
FEWEST = 20  # steps, so that some are left


class Ramp:
    """A recipe's optimiser whose rate rises by the same factor at each step, from `low` at the first to `high` at the
    last. It stands for `Optimizer` without being one: no recipe can name it."""

    def __init__(self, optimizer: Optimizer, low: float, high: float) -> None:
        vars(self).update(vars(optimizer))
        self.low, self.lr = low, high

    def lr_at(self, step: int, num_steps: int) -> float:
        """As `Optimizer.lr_at`."""
        return self.low * (self.lr / self.low) ** (min(step, num_steps - 1) / (num_steps - 1))


@dataclass
class RangeTest:
    """Losses of a ramp and the learning rate they suggest.

    Args:
        min_lr: Rate of the first step.
        max_lr: Rate of the last one, unless the loss diverges before.
        num_steps: Optimiser steps of the ramp.

    Raises:
        UserError: These make no ramp.
    """

    min_lr: float = 1e-7
    max_lr: float = 1.0
    num_steps: int = 100
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    smoothed: list[float] = field(default_factory=list)
    diverged: bool = False

    def __post_init__(self) -> None:
        require(self.num_steps >= FEWEST, "--steps", self.num_steps, f"{FEWEST} or more")
        require(0 < self.min_lr < self.max_lr < math.inf, "--min_lr", self.min_lr, "above 0 and below --max_lr")
        self._mean = 0.0

    def ramp(self, optimizer: Optimizer) -> Ramp:
        """A recipe's optimiser with the ramp in place of its schedule."""
        return Ramp(optimizer, self.min_lr, self.max_lr)

    def add(self, figures: dict[str, float]) -> bool:
        """Note the `lr` and `loss` of an optimiser step. Returns whether the test is over."""
        if self.diverged:
            return True
        loss = figures["loss"]
        if not math.isfinite(loss):
            self.diverged = True
            return True
        self.rates.append(figures["lr"])
        self.losses.append(loss)
        self._mean = SMOOTHING * self._mean + (1 - SMOOTHING) * loss
        self.smoothed.append(self._mean / (1 - SMOOTHING ** len(self.losses)))
        self.diverged = len(self.losses) > 1 and self.smoothed[-1] > DIVERGED * min(self.smoothed)
        return self.diverged or len(self.losses) == self.num_steps

    def suggestion(self) -> float:
        """Rate where the loss falls fastest over the logarithm of the rate, in two digits.

        Raises:
            UserError: The loss nowhere falls clearly, or too few steps were made before it diverged.
        """
        half = self.num_steps // WINDOW
        last = min(int(np.argmin(self.smoothed)) if self.smoothed else 0, len(self.losses) - 1 - half)
        if last < half:
            raise UserError(f"The loss diverged or stopped falling within {len(self.losses)} of {self.num_steps} "
                            "steps, too early to find a learning rate: lower --min_lr or raise --steps.")
        offsets = np.arange(-half, half + 1)  # the logarithms of the rates are evenly spaced
        spread = float((offsets**2).sum())
        fits = {}
        for centre in range(half, last + 1):
            losses = np.array(self.losses[centre - half : centre + half + 1])
            slope = float(offsets @ losses) / spread
            rest = losses - losses.mean() - slope * offsets
            fits[centre] = slope, math.sqrt(float(rest @ rest) / (len(rest) - 2) / spread)
        best = min(fits, key=lambda centre: fits[centre][0])
        slope, error = fits[best]
        if slope >= -CLEAR * error:
            raise UserError(f"The loss falls nowhere clearly between learning rates of {self.min_lr:g} and "
                            f"{self.rates[-1]:.2g}: batches differ by more. Raise --steps; a model that is trained "
                            "already may have nothing left to learn from these rows.")
        return float(f"{self.rates[best]:.1e}")
