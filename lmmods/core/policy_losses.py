"""Losses of reinforcement learning, written once for both engines."""

from dataclasses import dataclass
from typing import Any

Array = Any  # of the calling engine


@dataclass(frozen=True)
class PolicyLoss:
    """A loss by name."""

    loss: str = "dapo"
    ratio: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    max_new_tokens: int = 512
