"""The memory of a step: whether it fits, and one sentence that says how this is known."""

import math

import pytest

from lmmods.core.memory import GIB, StepMemory, Widths, cache_bytes, estimate_step


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


@pytest.mark.parametrize(("block", "gap", "fits", "tight"), [
    (0.7, 1.0, True, False), (0.9, 1.0, True, True), (1.1, 1.0, False, False), (0.9, math.inf, True, False)])
def test_a_part_that_must_be_one_block(block, gap, fits, tight):
    found = memory(GIB, block=block * GIB, gap=gap * GIB)
    assert (found.fits, found.is_tight) == (fits, tight)
    piece = f"; {block:.2f} GiB of it must be one block, and the largest free piece has 1.00 GiB"
    assert str(found).endswith(piece if tight or not fits else "compiled by XLA")
    assert not memory(3 * GIB, block=0.9 * GIB, gap=GIB).is_tight  # which does not fit anyway


@pytest.mark.parametrize(("checkpointing", "kept"), [(False, 2 * (8 * 16 + 3 * 48)), (True, 2 * 16)])
def test_the_estimate_by_hand(checkpointing, kept):
    """Weights, a float32 gradient and AdamW's two moments, and activations of two blocks and the residual stream."""
    found = estimate_step(Widths(2, 16, 48), 1000, 250, "adamw", 10, checkpointing, 2, available=GIB)
    assert found.needed == 1000 + 250 * (4 + 8) + 10 * (kept + 4 * 16) * 2
    assert found.fits and found.method == "counted from the configuration"


def test_keys_and_values_of_layers_that_differ():
    """A window of 5 tokens, a wide layer whose one head serves all queries, and layers that have none of their own."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING["gemma4_text"](
        num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
        head_dim=6, num_key_value_heads=2, global_head_dim=8, num_global_key_value_heads=1, attention_k_eq_v=True,
        sliding_window=5)
    assert cache_bytes(config, 9, 2) == 2 * 2 * (5 * 2 * 6 + 9 * 1 * 8)
    linear = CONFIG_MAPPING["qwen3_5_text"](
        num_hidden_layers=4, head_dim=6, num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=6,
        linear_key_head_dim=5, linear_value_head_dim=7, linear_conv_kernel_dim=3)
    state = 4 * 6 * 5 * 7 + 2 * (2 * 2 * 5 + 6 * 7) * 2
    assert cache_bytes(linear, 9, 2) == 3 * state + 2 * 2 * 9 * 2 * 6  # keys and values in the last layer alone
