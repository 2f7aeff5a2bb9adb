"""Choice of `trainer.precision: auto`.

It depends on the hardware's features, not on timings, as it must be the same on all processes of a run and whenever the
run is resumed.
"""

import torch

from lmmods.torch_engine.compat.torch import cpu_multiplies_bfloat16


def choose_precision(accelerator: str) -> tuple[str, str]:
    """Return the precision and the reason for it."""
    if accelerator != "cpu" and torch.cuda.is_available():
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16-mixed", "this GPU multiplies bfloat16"
        return "32-true", "this GPU does not multiply bfloat16"
    if torch.backends.mps.is_available() and accelerator != "cpu":
        return "32-true", "on Apple GPUs bfloat16 saves little"
    if cpu_multiplies_bfloat16():
        return "bf16-mixed", "this CPU multiplies bfloat16"
    return "32-true", "this CPU does not multiply bfloat16"
