"""Attention in blocks against plain attention: outputs and gradients of real tokens, over several blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from jax_engine.models import attention, hub
from jax_engine.models import attention as blocked
from jax_engine.models.attention import attend, attend_blocked, attention_mask
from tests.closeness import assert_as_close

LENGTH = 10
LENGTHS = np.array([[1] * 10, [1] * 7 + [0] * 3, [0] * 4 + [1] * 6])
PACKED = np.array([[1] * 4 + [2] * 6, [1] * 3 + [2] * 4 + [0] * 3, [1] * 10])
KINDS = {"full": {}, "padded": {"attention_mask": LENGTHS}, "packed": {"segment_ids": PACKED}}


def compute_exact(q, k, v, sinks, mask, scale, cap, weights) -> list[torch.Tensor]:
    """Return attention by its formula in float64 [B, T, H * D], and the gradients of its weighted sum."""
    q, k, v, sinks = inputs = [x if x is None else torch.tensor(x).double().requires_grad_() for x in (q, k, v, sinks)]
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(2, 2)) * float(scale)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~torch.tensor(np.asarray(mask)), torch.finfo(torch.float64).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    mixed = torch.einsum("bhts,bshd->bthd", scores.softmax(-1)[..., :LENGTH], v.repeat_interleave(2, 2)).flatten(2)
    return [mixed, *torch.autograd.grad((mixed * torch.tensor(weights)).sum(), [x for x in inputs if x is not None])]


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("causal", "window", "cap", "has_sinks"), [
    (True, None, None, False), (True, 3, 0.8, True), (False, None, None, False)])
def test_blocked_attention_equals_plain_attention(monkeypatch, block, kind, causal, window, cap, has_sinks):
    monkeypatch.setattr(blocked, "CAUSAL_BLOCK", block)
    monkeypatch.setattr(blocked, "BLOCK", block)
    random = np.random.default_rng(0)
    batch = {"input_ids": np.zeros((3, LENGTH), np.int32)} | KINDS[kind]
    q, k, v, weights = (random.normal(size=(3, LENGTH, heads, 8)).astype(np.float32) for heads in (4, 2, 2, 4))
    real = next(iter(KINDS[kind].values()), np.ones((3, LENGTH))) > 0
    weights = (weights * real[..., None, None]).reshape(3, LENGTH, -1)
    mask, scale = attention_mask(jax.tree.map(jnp.asarray, batch), causal, window), jnp.float32(0.3)
    sinks = random.normal(size=4).astype(np.float32) if has_sinks else None

    def run(function):
        def loss(*arguments):
            mixed = function(*arguments)
            return (mixed * weights).sum(), mixed

        (_, mixed), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(q, k, v, sinks)
        return [np.asarray(mixed)[real], *jax.tree.leaves(gradients)]

    plain = run(lambda *qkv: attend(*qkv[:3], mask, scale, cap=cap, sinks=qkv[3]))
    blocks = run(lambda *qkv: attend_blocked(causal, cap, *qkv[:3], mask, scale, qkv[3]))
    mixed, *gradients = compute_exact(q, k, v, sinks, mask, scale, cap, weights)
    assert len(blocks) == 4 + has_sinks
    assert_as_close(blocks, plain, [mixed[torch.tensor(real)], *gradients])


def test_outputs_keep_bfloat16_and_scores_are_float32():
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.normal(size=(2, LENGTH, heads, 8)), jnp.bfloat16) for heads in (4, 2, 2))
    mask, scale = attention_mask({"input_ids": jnp.zeros((2, LENGTH), jnp.int32)}, True, None), jnp.float32(0.3)
    actual, back = jax.vjp(lambda *qkv: attend_blocked(True, None, *qkv, mask, scale), q, k, v)
    expected = attend(*(x.astype(jnp.float32) for x in (q, k, v)), mask, scale, 0.0, None)
    assert actual.dtype == jnp.bfloat16 and {x.dtype for x in back(actual)} == {jnp.dtype("bfloat16")}
    assert np.abs(actual.astype(jnp.float32) - expected).max() <= 2**-7 * np.abs(expected).max()


@pytest.mark.parametrize(("requested", "fast_kernels", "is_blocked"), [
    (None, True, True), ("sdpa", True, True), ("eager", True, False), ("sdpa", False, False)])
def test_the_recipe_switches_blocked_attention_off(monkeypatch, requested, fast_kernels, is_blocked):
    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                         vocab_size=11)
    calls = []
    monkeypatch.setattr(attention, "attend_blocked", lambda *args: calls.append(True) or attend_blocked(*args))
    network = hub.network(config, "causal", fast_kernels=fast_kernels, attention=requested)
    network.hidden(network.init(0), {"input_ids": jnp.zeros((1, 4), jnp.int32)})
    assert bool(calls) == is_blocked
    assert (network.build.cpu_forms, network.unroll) == ((True, 2) if fast_kernels else (False, 1))
