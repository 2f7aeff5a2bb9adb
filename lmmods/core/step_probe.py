"""What an optimiser step takes: its time and speed, over a few of them."""

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StepProbe:
    """Times steps; the first one, in which programs are compiled and buffers made, is left out.

    Args:
        num_steps: How many to make, 2 or more.
    """

    num_steps: int = 4
    ends: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)

    def add(self, figures: dict[str, float]) -> bool:
        """Note a step that the device has done; `num_tokens` are its real tokens. Returns whether it was the last."""
        self.ends.append(time.perf_counter())
        self.tokens.append(figures["num_tokens"])
        return len(self.ends) == self.num_steps

    def found(self) -> dict[str, Any]:
        """Seconds of a step and real tokens a second."""
        seconds = self.ends[-1] - self.ends[0]
        return {"seconds_per_step": seconds / (len(self.ends) - 1), "tokens_per_second": sum(self.tokens[1:]) / seconds}
