"""Memory of a training step: what it needs on a device, whether that fits, and how this was found.

The start of a run, `inspect`, `new`, `find` and `plan` all answer with a `StepMemory`.
"""

import math
from dataclasses import dataclass
from typing import Literal

from lmmods.core.model_sizes import Widths

GIB = 2**30
Method = Literal["counted from the configuration", "counted on fake tensors", "compiled by XLA", "measured"]
# Bytes of optimiser state per trained parameter.
STATE_BYTES = {"adamw": 8, "paged_adamw_32bit": 8, "lion": 4, "adafactor": 4.1, "sgd": 4, "adamw_8bit": 2,
               "paged_adamw_8bit": 2, "lion_8bit": 1, "paged_lion_8bit": 1, "sgd_8bit": 1}


@dataclass(frozen=True)
class StepMemory:
    """Peak memory of a training step on each device.

    Args:
        parts: Bytes by part; together they are the peak.
        available: Bytes that the step may take; infinite if there is no limit to compare with.
        method: How `parts` was found.
        refusal: Message of a compiler that found no room; None if there is none.
        trusts_compiler: Only `refusal` tells whether the step fits, as the compiler may move what it counts.
    """

    parts: dict[str, float]
    available: float
    method: Method
    refusal: str | None = None
    trusts_compiler: bool = False

    @property
    def needed(self) -> int:
        """Bytes at the peak."""
        return int(sum(self.parts.values()))

    @property
    def fits(self) -> bool:
        """True if the memory suffices."""
        return self.refusal is None and (self.trusts_compiler or self.needed <= self.available)

    def __str__(self) -> str:
        limit = "" if math.isinf(self.available) else f" of {gibibytes(self.available)}"
        return f"about {gibibytes(self.needed)}{limit} for a step, {self.method}"


def gibibytes(num_bytes: float) -> str:
    """Return bytes as text in GiB, with two decimals or, if small, three digits."""
    size = num_bytes / GIB
    return f"{size:,.2f} GiB" if size >= 0.1 else f"{size:.3g} GiB"


def estimate_step(widths: Widths, weight_bytes: float, num_trainable: int, optimizer: str, num_tokens: int,
                  checkpointing: bool, compute_bytes: int, available: float) -> StepMemory:
    """Count the memory of a step from the dimensions of its network, accurate to some tens of percent.

    Args:
        weight_bytes: Memory of all weights, adapters included.
        optimizer: A key of `STATE_BYTES`.
        num_tokens: Tokens of a micro-batch, padding included.
        checkpointing: True if only the blocks' inputs are kept.
        compute_bytes: Bytes of an activation.
        available: As in `StepMemory`.
    """
    # A block keeps roughly its normed inputs, q, k, v, the attention output and the MLP's gate, up and product.
    per_layer = widths.hidden if checkpointing else 8 * widths.hidden + 3 * widths.wide
    activations = num_tokens * (per_layer * widths.num_layers + 4 * widths.hidden) * compute_bytes
    return StepMemory({"parameters": weight_bytes, "gradients": 4 * num_trainable,
                       "optimiser state": num_trainable * STATE_BYTES[optimizer], "activations": activations},
                      available, "counted from the configuration")
