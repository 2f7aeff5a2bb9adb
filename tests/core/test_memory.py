"""The memory of a step: whether it fits, and one sentence that says how this is known."""

import math

import pytest

from lmmods.core.memory import GIB, StepMemory, Widths, estimate_step


def memory(needed: float, available: float = 2 * GIB, **others) -> StepMemory:
    return StepMemory({"parameters": needed / 2, "activations": needed / 2}, available, "compiled by XLA", **others)


@pytest.mark.parametrize(("found", "fits", "said"), [
    (memory(GIB), True, "about 1.00 GiB of 2.00 GiB for a step, compiled by XLA"),
    (memory(2 * GIB), True, "about 2.00 GiB of 2.00 GiB for a step, compiled by XLA"),
    (memory(3 * GIB), False, "about 3.00 GiB of 2.00 GiB for a step, compiled by XLA"),
    (memory(3 * GIB, math.inf), True, "about 3.00 GiB for a step, compiled by XLA"),
    (memory(3 * GIB, trusts_compiler=True), True, "about 3.00 GiB of 2.00 GiB for a step, compiled by XLA"),
    (memory(GIB / 1024, refusal="no room"), False, "about 0.000977 GiB of 2.00 GiB for a step, compiled by XLA"),
    (memory(GIB, refusal="no room", trusts_compiler=True), False,
     "about 1.00 GiB of 2.00 GiB for a step, compiled by XLA")])
def test_one_sentence_says_what_fits_and_how_it_is_known(found, fits, said):
    assert (found.fits, str(found)) == (fits, said)


@pytest.mark.parametrize(("checkpointing", "kept"), [(False, 2 * (8 * 16 + 3 * 48)), (True, 2 * 16)])
def test_the_estimate_by_hand(checkpointing, kept):
    """Weights, a float32 gradient and AdamW's two moments, and activations of two blocks and the residual stream."""
    found = estimate_step(Widths(2, 16, 48), 1000, 250, "adamw", 10, checkpointing, 2, available=GIB)
    assert found.needed == 1000 + 250 * (4 + 8) + 10 * (kept + 4 * 16) * 2
    assert found.fits and found.method == "counted from the configuration"
