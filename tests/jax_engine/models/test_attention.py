"""Masks and the attention itself against torch."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_engine.models.attention import attend, attention_mask, cached_mask
from jax_engine.models.dropout import Seeds
from lmmods.core.dropout import token_seeds

RANDOM = np.random.default_rng(0)


def test_masks_equal_those_written_by_hand():
    batch = {"input_ids": np.zeros((2, 4), int), "attention_mask": np.array([[1, 1, 1, 0], [0, 1, 1, 1]])}
    both = attention_mask(batch, causal=False, window=None)[:, 0]
    assert (both == (batch["attention_mask"] > 0)[:, None]).all()
    causal = attention_mask(batch, causal=True, window=2)[0, 0]
    assert causal.astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0]]
    packed = {"input_ids": batch["input_ids"][:1], "segment_ids": np.array([[1, 1, 2, 0]]),
              "attention_mask": np.ones((1, 4), int)}
    assert attention_mask(packed, True, None)[0, 0].astype(int).tolist() == [
        [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    near = attention_mask({"input_ids": np.zeros((1, 4), int)}, causal=False, window=2)[0, 0]
    assert near.astype(int).tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    free = attention_mask({"input_ids": np.zeros((2, 3), int)}, True, None)
    assert free.shape == (2, 1, 3, 3) and (free == np.tril(np.ones((3, 3), bool))).all()


@pytest.mark.parametrize("window", [None, 2])
def test_a_cached_step_attends_to_the_same_tokens_as_a_whole_row(window):
    mask = np.array([[0, 1, 1, 1, 1]])
    whole = attention_mask({"input_ids": mask, "attention_mask": mask}, True, window)
    step = cached_mask(jnp.pad(mask > 0, ((0, 0), (0, 2))), 3, 2, window)
    assert np.array_equal(step[..., :5], whole[:, :, 3:]) and not step[..., 5:].any()


def test_grouped_query_attention_equals_torchs():
    q, k, v = (RANDOM.normal(size=(2, 5, heads, 8)).astype(np.float32) for heads in (6, 2, 2))
    mask = np.tril(np.ones((5, 5), bool))[None, None].repeat(2, 0)
    actual = attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), mask, 0.3, 0.0, None)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(torch.tensor(x).transpose(1, 2) for x in (q, k, v)), attn_mask=torch.tensor(mask), scale=0.3, enable_gqa=True)
    assert np.allclose(actual, expected.transpose(1, 2).flatten(2), atol=1e-5)
    nothing = attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), np.zeros_like(mask), 0.3, 0.0, None)
    assert np.allclose(nothing[:, 0].reshape(2, 2, 3, 8), v.mean(1)[:, :, None], atol=1e-5)


def test_dropout_of_weights_keeps_their_mean_and_differs_by_row():
    q, k = (jnp.asarray(RANDOM.normal(size=(1, 4, 2, 8)), jnp.float32).repeat(3000, 0) for _ in range(2))
    mask = jnp.ones((3000, 1, 4, 4), bool)
    tokens = token_seeds(0, 0, np.arange(3000)[:, None], np.arange(4)).view(np.uint32)

    def drop(rows):
        seeds = Seeds(jnp.asarray(tokens[:rows]), {"layers.attn.weights": jnp.uint32(7)})
        return attend(q[:rows], k[:rows], k[:rows], mask[:rows], 0.3, 0.5, seeds)

    exact, dropped = attend(q, k, k, mask, 0.3, 0.5, None), drop(3000)
    assert np.abs(dropped.mean(0) - exact[0]).max() < 0.1
    assert not np.array_equal(dropped[0], dropped[1])
    assert np.allclose(drop(1)[0], dropped[0], atol=1e-6)
