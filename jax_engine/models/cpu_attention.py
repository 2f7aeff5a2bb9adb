"""Attention on CPUs: blocks of scores that stay in the cache, and none of those that a causal mask hides whole.

The backward pass computes the scores again instead of keeping them (Dao et al. 2022). There keys run along the rows, so
that two of its three products of scores need no transposing, which is slow in XLA on CPUs.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from jax_engine.models.linear import capped

# Queries of a block, and keys in the backward pass. Larger ones multiply faster, but skip less.
CAUSAL_BLOCK, BLOCK = 128, 512


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_blocked(causal: bool, cap: float | None, q: Array, k: Array, v: Array, mask: Array, scale: Array,
                   sinks: Array | None = None) -> Array:
    """`attend` without dropout. A query that sees nothing gets a mean of some values; its gradient must be zero.

    Args:
        causal: Whether `mask` hides all keys behind the query.
        cap: Of the scores (see `capped`).
        q: [B, T, heads, head_dim].
        k: [B, T, kv_heads, head_dim]. v: the same.
        mask: [B, 1, T, T] booleans.
        sinks: [heads] one score more for each query, without a value.

    Returns:
        [B, T, heads * head_dim].
    """
    return _forward(causal, cap, q, k, v, mask, scale, sinks)[0]


def _forward(causal, cap, q, k, v, mask, scale, sinks):
    batch, length, heads, size = q.shape
    shape = (batch, k.shape[2], heads // k.shape[2])
    queries = q.reshape(batch, length, *shape[1:], size).transpose(0, 2, 3, 1, 4)  # [B, K, G, T, D]
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    mixed, norms = [], []
    for start, end in _blocks(length, causal):
        seen = end if causal else length
        scores = _product(_flat(queries[..., start:end, :]), keys[:, :, :seen], 3, 3)
        scores = capped(scores.reshape(*shape, end - start, seen) * scale, cap)
        scores = jnp.where(mask[:, :, None, start:end, :seen], scores, jnp.finfo(jnp.float32).min)
        largest = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = weights.sum(-1, keepdims=True)
        part = _product(_flat(weights).astype(v.dtype), values[:, :, :seen], 3, 2)
        mixed.append(part.reshape(*shape, end - start, size) / total)
        norms.append((largest + jnp.log(total))[..., 0])
    mixed, norms = jnp.concatenate(mixed, 3), jnp.concatenate(norms, 3)
    if sinks is not None:
        with_sinks = jnp.logaddexp(norms, _by_group(sinks, shape[1]))
        mixed, norms = mixed * jnp.exp(norms - with_sinks)[..., None], with_sinks
    out = mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads * size).astype(v.dtype)
    return out, (queries, keys, values, mask, scale, sinks, mixed, norms)


def _backward(causal, cap, kept, gradient):
    queries, keys, values, mask, scale, sinks, mixed, norms = kept
    batch, groups, per_group, length, size = queries.shape
    gradient = gradient.reshape(batch, length, groups, per_group, size).transpose(0, 2, 3, 1, 4)
    offset = (gradient * mixed).sum(-1)
    d_queries, d_keys, d_values = jnp.zeros(queries.shape, jnp.float32), [], []
    for start, end in _blocks(length, causal):
        first = start if causal else 0  # of the queries that see a key of this block
        later, later_gradient = _flat(queries[..., first:, :]), _flat(gradient[..., first:, :])
        own, own_values = keys[:, :, start:end], values[:, :, start:end]
        shape = (batch, groups, end - start, per_group, length - first)
        seen = mask[:, :, first:, start:end].swapaxes(2, 3)[:, :, :, None]
        scores = capped(_product(own, later, 3, 3).reshape(shape) * scale, cap)
        weights = jnp.exp(jnp.where(seen, scores, jnp.finfo(jnp.float32).min) - norms[:, :, None, :, first:])
        slopes = _product(own_values, later_gradient, 3, 3).reshape(shape) - offset[:, :, None, :, first:]
        slopes = weights * slopes if cap is None else weights * slopes * (1 - jnp.square(scores / cap))
        weights, slopes = (x.reshape(*shape[:3], -1).astype(values.dtype) for x in (weights, slopes))
        d_values.append(_product(weights, later_gradient, 3, 2))
        d_keys.append(_product(slopes, later, 3, 2) * scale)
        turned = jax.lax.optimization_barrier(slopes.swapaxes(2, 3))  # XLA would fold it into a slow product
        change = _product(turned, own, 3, 2).reshape(*shape[:2], per_group, length - first, size)
        d_queries = d_queries.at[..., first:, :].add(change) if first else d_queries + change
    d_queries = (d_queries * scale).transpose(0, 3, 1, 2, 4).reshape(batch, length, -1, size)
    d_keys, d_values = (jnp.concatenate(parts, 2).transpose(0, 2, 1, 3) for parts in (d_keys, d_values))
    if sinks is not None:
        taken = jnp.exp(_by_group(sinks, groups) - norms)
        sinks = -(taken * offset).sum((0, 3)).reshape(sinks.shape).astype(sinks.dtype)
    return *(x.astype(values.dtype) for x in (d_queries, d_keys, d_values)), None, None, sinks


attend_blocked.defvjp(_forward, _backward)


def _blocks(length: int, causal: bool) -> list[tuple[int, int]]:
    size = CAUSAL_BLOCK if causal else BLOCK
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _by_group(sinks: Array, num_groups: int) -> Array:
    """[K, G, 1] of [heads]."""
    return sinks.astype(jnp.float32).reshape(num_groups, -1, 1)


def _flat(x: Array) -> Array:
    """[B, K, G, T, D] as [B, K, G * T, D]."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _product(x: Array, y: Array, axis: int, axis_of_y: int) -> Array:
    """Sums over one axis of x and one of y, for each row and kv head, in float32."""
    return jax.lax.dot_general(x, y, (((axis,), (axis_of_y,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
