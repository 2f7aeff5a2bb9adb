"""Dropout with the masks of `lmmods.core.dropout`, recomputed in the backward pass instead of saved."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_engine.models.architecture import Architecture, Family, Head
from jax_engine.models.names import Names
from lmmods.core.dropout import FINAL_1, FINAL_2, NOISE_SITE, feature_seeds, keep_scale, min_kept, site_seed
from lmmods.core.errors import UserError


class Seeds(NamedTuple):
    """Seeds of the dropout masks of a forward pass.

    Args:
        tokens: Seed of each token, uint32 [B, T].
        sites: Seeds of the dropout sites, by our names; inside a layer, that layer's seeds.
        queries: Seeds of the queries of the attention weights, [B, t]. Default: all tokens.
    """

    tokens: Array
    sites: dict[str, Array]
    queries: Array | None = None


def site_seeds(names: Names, family: Family, head: Head, arch: Architecture, lora_paths: frozenset[str]
               ) -> dict[str, np.ndarray]:
    """Return the uint32 seeds of a network's dropout sites by our names; sites in layers have one per layer.

    Args:
        lora_paths: Linear layers with adapters that have dropout.
    """
    in_head = family.head_dropouts.get(head, {})

    def torch_name(site: str, layer: int | None) -> str:
        if site.endswith(".lora"):
            path = site.removesuffix(".lora")
            index = None if layer is None else arch.layers_with(path).index(layer)
            return names.torch_module(path, index) + ".lora_dropout"
        return names.fill_layer(family.dropouts[site], layer, in_base=True)

    # A head may call one torch module twice: number the calls.
    torch_names = list(in_head.values())
    seeds = {site: np.array(site_seed(name, torch_names[:index].count(name)), np.uint32)
             for index, (site, name) in enumerate(in_head.items())}
    for site in [*family.dropouts, *(f"{path}.lora" for path in sorted(lora_paths))]:
        if site.startswith("layers."):
            layers = arch.layers_with(site.removesuffix(".lora"))
            # Layers that share weights are one torch module, called several times: number the calls. A layer without
            # the site gets an unused 0, so that the scan has a seed for each layer.
            layer_seeds = [site_seed(torch_name(site, stored), arch.passes[:depth].count(stored))
                           if stored in layers else 0 for depth, stored in enumerate(arch.passes)]
        else:
            layer_seeds = site_seed(torch_name(site, None))
        seeds[site] = np.array(layer_seeds, np.uint32)
    return seeds


def dropout(x: Array, rate: float, seeds: Seeds | None, site: str) -> Array:
    """Apply dropout to the features of x [B, T, F] or, pooled, [B, F], unless `seeds` is None."""
    if seeds is None or rate == 0.0:
        return x
    if x.ndim == 2:
        # A row's seed is the sum of its tokens' seeds (0 in padding), modulo 2^32.
        return _drop(rate, x, seeds.tokens.sum(1, dtype=jnp.uint32), seeds.sites[site])
    return _drop(rate, x, seeds.tokens, seeds.sites[site])


def dropped_weights(weights: Array, rate: float, seeds: Seeds, site: str) -> Array:
    """Apply dropout to attention weights [B, heads, t, T], query by key."""
    return _drop(rate, weights, seeds.tokens, seeds.sites[site], seeds.queries)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _drop(rate: float, x: Array, tokens: Array, site: Array, queries: Array | None = None) -> Array:
    # Features [B, T, F] or [B, F], or attention weights [B, heads, t, T].
    if x.ndim < 4:
        mask = feature_mask(tokens, site, x.shape[-1], rate)
    else:
        mask = attention_mask(tokens, site, x.shape[1], rate, queries)
    return jnp.where(mask, x.astype(jnp.float32) * keep_scale(rate), 0.0).astype(x.dtype)


def _forward(rate, x, tokens, site, queries=None):
    return _drop(rate, x, tokens, site, queries), (tokens, site, queries)


def _backward(rate, residuals, gradient):
    # Dropout is linear in x, so the gradient takes the same mask and scale.
    return _drop(rate, gradient, *residuals), None, None, None


_drop.defvjp(_forward, _backward)


def feature_mask(tokens: Array, site: Array, num: int, rate: float) -> Array:
    """Return `core.dropout.feature_mask`, [..., num], for seeds [...]."""
    # 32 bits of hash decide about two features, hence half as many seeds as features, rounded up.
    words = _finalise(tokens ^ site)
    return _split(words[..., None] ^ feature_seeds(-(-num // 2)), rate, -1)[..., :num]


def add_noise(x: Array, batch: dict[str, Array], seeds: Seeds | None, alpha: float) -> Array:
    """Add NEFTune's noise to embeddings x [B, T, d] (`TaskFields.neftune_alpha`), unless `seeds` is None."""
    if seeds is None or not alpha:
        return x
    lengths = document_lengths(batch)
    bound = alpha / jnp.sqrt(jnp.maximum(lengths * x.shape[-1], 1).astype(jnp.float32)) * (lengths > 0)
    noise = feature_noise(seeds.tokens, np.uint32(site_seed(NOISE_SITE)), x.shape[-1]) * bound[..., None]
    return (x.astype(jnp.float32) + noise).astype(x.dtype)


def document_lengths(batch: dict[str, Array]) -> Array:
    """Return the length of each token's row or, in packed rows, document: [B, T], 0 in padding."""
    documents = batch["segment_ids"] if "segment_ids" in batch else batch["attention_mask"]
    counts = jax.vmap(lambda row: jnp.zeros(len(row) + 1, jnp.int32).at[row].add(1)[row])(documents)
    return counts * (documents > 0)


def feature_noise(tokens: Array, site: Array, num: int) -> Array:
    """Return `core.dropout.feature_noise`, [..., num], for seeds [...]."""
    bits = _finalise(_finalise(tokens ^ site)[..., None] ^ feature_seeds(num))
    return ((jax.lax.bitcast_convert_type(bits, jnp.int32) >> 8).astype(jnp.float32) + 0.5) * 2.0**-23


def attention_mask(tokens: Array, site: Array, num_heads: int, rate: float, queries: Array | None = None) -> Array:
    """Return `core.dropout.attention_mask`, [B, num_heads, t, T], for tokens [B, T] and `queries` [B, t], or all."""
    queries = _finalise((tokens if queries is None else queries) ^ site)
    # [B, pairs of heads, T]; with queries [B, 1, t, 1] -> [B, pairs of heads, t, T].
    keys = _finalise(tokens[:, None] ^ feature_seeds(-(-num_heads // 2))[:, None])
    return _split(queries[:, None, :, None] ^ keys[:, :, None], rate, 1)[:, :num_heads]


def _finalise(h: Array) -> Array:
    h = (h ^ (h >> 16)) * jnp.uint32(FINAL_1)
    h = (h ^ (h >> 13)) * jnp.uint32(FINAL_2)
    return h ^ (h >> 16)


def _split(mixed: Array, rate: float, axis: int) -> Array:
    bits = _finalise(mixed)
    # `min_kept` is a multiple of 2^16, so the upper 16 bits of an int32 decide: the word's upper bits for the first
    # half of the features, and its lower bits, shifted up, for the second half.
    halves = jnp.concatenate([bits, bits << 16], axis)
    return jax.lax.bitcast_convert_type(halves, jnp.int32) >= jnp.int32(min_kept(rate))


def token_words(batch: dict[str, Array]) -> Array:
    """Return a batch's `token_seeds` as uint32 [B, T]; raise UserError if it has none."""
    if "token_seeds" not in batch:
        raise UserError("The batches have no token_seeds, which dropout needs. Create them in the data module's "
                        "collator.")
    return jax.lax.bitcast_convert_type(batch["token_seeds"], jnp.uint32)
