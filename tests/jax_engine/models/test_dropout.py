"""Dropout on JAX: masks bit for bit as in the reference, and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_engine.models.dropout import (
    Seeds,
    attention_mask,
    document_lengths,
    dropout,
    dropped_weights,
    feature_mask,
    feature_noise,
)
from lmmods.core import dropout as reference

TOKENS = reference.token_seeds(42, 3, np.arange(3)[:, None], np.arange(7))
SITE = reference.site_seed("here")


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_masks_have_the_bits_of_the_reference(rate):
    words, site = jnp.asarray(TOKENS.view(np.uint32)), jnp.uint32(SITE)
    for num in (1, 6, 9):
        np.testing.assert_array_equal(jax.jit(feature_mask, static_argnums=(2, 3))(words, site, num, rate),
                                      reference.feature_mask(TOKENS, SITE, num, rate))
    for heads in (1, 3, 4):
        np.testing.assert_array_equal(jax.jit(attention_mask, static_argnums=(2, 3))(words, site, heads, rate),
                                      reference.attention_mask(TOKENS, SITE, heads, rate))


def test_kept_features_and_their_gradients_are_scaled():
    seeds = Seeds(jnp.asarray(TOKENS.view(np.uint32)), {"here": jnp.uint32(SITE)})
    scaled = reference.keep_scale(0.3) * reference.feature_mask(TOKENS, SITE, 10, 0.3)
    x = jnp.ones((3, 7, 10))
    np.testing.assert_allclose(dropout(x, 0.3, seeds, "here"), scaled, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: (2 * dropout(x, 0.3, seeds, "here")).sum())(x), 2 * scaled, rtol=1e-6)
    weights = jnp.ones((3, 2, 7, 7))
    gradient = jax.grad(lambda x: dropped_weights(x, 0.3, seeds, "here").sum())(weights)
    scaled = reference.keep_scale(0.3) * reference.attention_mask(TOKENS, SITE, 2, 0.3)
    np.testing.assert_allclose(gradient, scaled, rtol=1e-6)
    assert dropout(x, 0.3, None, "here") is x and dropout(x, 0.0, seeds, "here") is x
    assert dropout(x.astype(jnp.bfloat16), 0.3, seeds, "here").dtype == jnp.bfloat16


def test_noise_has_the_bits_of_the_reference():
    seeds = reference.token_seeds(3, 1, np.arange(7), np.arange(7)).astype(np.int32)
    actual = jax.jit(feature_noise, static_argnums=2)(seeds.view(np.uint32), np.uint32(reference.site_seed("a")), 65)
    assert np.array_equal(actual, reference.feature_noise(seeds, reference.site_seed("a"), 65))


def test_each_document_of_a_packed_row_has_its_own_length():
    segments = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 3]])
    assert document_lengths({"segment_ids": segments}).tolist() == [[3, 3, 3, 2, 2, 0], [1, 4, 4, 4, 4, 1]]
    assert document_lengths({"attention_mask": (segments > 1).astype(int)}).tolist() == [
        [0, 0, 0, 2, 2, 0], [0, 5, 5, 5, 5, 5]]
