"""Attention: masks, and softmax attention with float32 scores."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jax_engine.models.architecture import Architecture, LayerKind
from jax_engine.models.dropout import Seeds, dropped_weights
from jax_engine.models.linear import Build, Linear, Norm, divide_by_rms, parameter, soft_cap
from jax_engine.models.relative import Table, content_to_position, position_to_content
from jax_engine.models.rope import Angles, rotate
from lmmods.core.initialization import Normal


def attention_mask(batch: dict[str, Array], causal: bool, window: int | None, blocks: Array | None = None) -> Array:
    """Return the attention mask [B, 1, T, T] bool, query by key; True attends.

    Args:
        batch: `input_ids` [B, T]; `segment_ids` (documents 1, 2, ...; 0 is padding) or `attention_mask` or neither.
        window: Size of the sliding window, including the query; without `causal` it also extends as far ahead.
        blocks: [B, T], equal positive numbers for tokens that also attend to later ones among them.
    """
    length = batch["input_ids"].shape[1]
    queries, keys = jnp.arange(length)[:, None], jnp.arange(length)[None]
    visible = visibility_mask(queries, keys, causal, window)[None, None]
    if blocks is not None:
        visible = visible | in_block(blocks, blocks)[:, None] & (keys > queries)
    if "segment_ids" in batch:
        segments = batch["segment_ids"]
        # A query attends to its document, and not to padding. Padded queries attend to nothing: see `attend`.
        same_document = (segments[:, :, None] == segments[:, None]) & (segments[:, None] > 0)
        return visible & same_document[:, None]
    if "attention_mask" in batch:
        return visible & (batch["attention_mask"] > 0)[:, None, None]
    return jnp.broadcast_to(visible, (batch["input_ids"].shape[0], 1, length, length))


def real_tokens(batch: dict[str, Array]) -> Array:
    """Return [B, T] bool, False for padding."""
    if "segment_ids" in batch:
        return batch["segment_ids"] > 0
    return batch["attention_mask"] > 0 if "attention_mask" in batch else jnp.ones(batch["input_ids"].shape, bool)


def cached_mask(valid: Array, start: Array, length: int, window: int | None, blocks: Array | None = None) -> Array:
    """Return the mask [B, 1, length, S] of `length` new tokens that follow `start` cached ones.

    Args:
        valid: [B, S] bool, cache slots with real tokens, including the new ones.
        blocks: [B, length], as for `attention_mask`.
    """
    queries = start + jnp.arange(length)[:, None]
    keys = jnp.arange(valid.shape[1])[None]
    visible = visibility_mask(queries, keys, True, window)[None, None]
    if blocks is not None:
        slots = jax.lax.dynamic_update_slice_in_dim(jnp.zeros(valid.shape, blocks.dtype), blocks, start, axis=1)
        visible = visible | in_block(blocks, slots)[:, None] & (keys > queries)
    return visible & valid[:, None, None]


def in_block(queries: Array, keys: Array) -> Array:
    """Return [B, T, S] bool, True if query and key are in one block, for the blocks [B, T] and [B, S] of both."""
    return (queries[:, :, None] == keys[:, None]) & (queries[:, :, None] > 0)


def visibility_mask(queries: Array, keys: Array, causal: bool, window: int | Array | None) -> Array:
    """Return a mask, True where queries attend to keys, by their positions in a row."""
    visible = keys <= queries if causal else jnp.broadcast_to(True, jnp.broadcast_shapes(queries.shape, keys.shape))
    if window is None:
        return visible
    visible &= keys > queries - window
    return visible if causal else visible & (keys < queries + window)


def attend(q: Array, k: Array, v: Array, mask: Array, scale: Array, rate: float = 0.0, seeds: Seeds | None = None,
           cap: float | None = None, bias: Array | None = None, sinks: Array | None = None) -> Array:
    """Compute softmax attention with float32 scores. A fully masked query gets the mean of all values, not NaN.

    Args:
        q: [B, T, heads, head_dim].
        k: [B, S, kv_heads, head_dim]; each serves heads / kv_heads queries (Ainslie et al. 2023). v: the same.
        mask: [B, 1, T, S] booleans.
        rate: Dropout rate of the attention weights.
        seeds: Dropout seeds; None applies no dropout.
        cap: Soft cap of the scores (see `soft_cap`).
        bias: [B, heads, T, S], added to the scores before scaling.
        sinks: [heads] logit of an attention sink: an extra key per head, without a value.

    Returns:
        [B, T, heads * head_dim].
    """
    batch, length, heads, size = q.shape
    # [B, T, heads, D] -> [B, T, K, G, D]: K kv heads, each for G consecutive query heads.
    q = q.reshape(batch, length, k.shape[2], -1, size)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32)
    # [B, K, G, T, S] float32.
    scores = (scores if bias is None else scores + bias.reshape(scores.shape)) * scale
    # Mask with the smallest finite number: a row of -inf would become NaN in the softmax.
    scores = jnp.where(mask[:, :, None], soft_cap(scores, cap), jnp.finfo(jnp.float32).min)
    if sinks is not None:
        # The sink is a last key in the softmax, [..., S + 1]. Its weight is removed, because it has no value.
        sinks = sinks.astype(jnp.float32).reshape(k.shape[2], -1)[:, :, None, None]
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :k.shape[1]]
    if seeds is not None and rate:
        # [B, K, G, T, S] -> [B, heads, T, S]: dropout masks depend on the index of the query head.
        by_head = weights.reshape(batch, heads, length, -1)
        weights = dropped_weights(by_head, rate, seeds, "layers.attn.weights").reshape(weights.shape)
    # The second product uses weights in the compute dtype. [B, T, K, G, D]
    mixed = jnp.einsum("bkgts,bskd->btkgd", weights.astype(v.dtype), v)
    return mixed.reshape(batch, length, heads * size)


KeysValues = tuple[Array, Array]  # each [B, S, kv_heads, head_dim]


class Attention(nnx.Module):
    """Self-attention of one layer with its projections."""

    def __init__(self, arch: Architecture, build: Build, kind: LayerKind):
        self.arch, self.blocked, self.keys = arch, build.blocked, kind.keys
        self.num_kv_heads, self.head_dim = arch.head_sizes(kind.attention)
        path, borrows = f"layers.{kind.attention}", kind.keys == "borrowed"
        inner, kv = arch.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        kwargs = {"build": build, "conv1d": arch.conv1d}
        kwargs |= {"std": arch.layer_std, "bias": arch.qkv_bias}
        if arch.qkv == "apart":
            self.q = Linear(arch.hidden_size, inner * (1 + arch.output_gate), f"{path}.q", **kwargs)
            self.k = None if borrows else Linear(arch.hidden_size, kv, f"{path}.k", **kwargs)
            as_values = kind.attention == "full_attn" and arch.wide_heads.keys_as_values
            self.v = None if borrows or as_values else Linear(arch.hidden_size, kv, f"{path}.v", **kwargs)
        else:
            self.qkv = Linear(arch.hidden_size, inner + 2 * kv, f"{path}.qkv", **kwargs)
        has_place_projections = arch.relative is not None and not arch.relative.shared
        # Projections of the relative-position table, unless it shares the content's.
        self.place_k, self.place_q = (
            Linear(arch.hidden_size, inner, f"layers.attn.{name}", **kwargs) if has_place_projections and score in
            arch.relative.scores else None for name, score in (("place_k", "c2p"), ("place_q", "p2c")))
        kwargs |= {"std": arch.residual_std, "bias": arch.out_bias}
        self.o = Linear(inner, arch.hidden_size, f"{path}.o", **kwargs)
        self.sinks = parameter((arch.num_heads,), Normal(arch.layer_std)) if arch.sinks else None
        if arch.qk_norm:
            # A norm per head has one weight for all heads.
            sizes = (self.head_dim, self.head_dim) if arch.qk_norm == "head" else (inner, kv)
            self.q_norm, self.k_norm = (Norm(size, arch.norm, arch.norm_eps) for size in sizes)
            self.k_norm = None if borrows else self.k_norm

    def __call__(self, x: Array, mask: Array | Callable[[Array, Array, Array], Array], scale: Array,
                 angles: Angles | Table | None, seeds: Seeds | None, cache: dict[str, Array] | None = None,
                 start: Array | None = None, key_angles: Angles | None = None, borrowed: KeysValues | None = None
                 ) -> tuple[Array, dict[str, Array] | None, KeysValues | None]:
        """Return the attention output [B, T, D], the cache with new keys and values from `start` on, and the keys and
        values if later layers borrow them.

        Args:
            mask: [B, 1, T, S] booleans, or a fused kernel that applies its own mask.
            angles: Rope angles of these tokens, or a table of relative positions.
            key_angles: Rope angles of all cache slots; the cache then has unrotated keys. None: as `angles`.
            borrowed: Keys and values of an earlier layer, including its cache, for a layer that does not compute them.
        """
        if self.keys == "borrowed":
            q = self._rotate(self.q_norm(self._split_heads(self.q(x, seeds))), angles)
            return self.o(self._attend(q, *borrowed, mask, scale, seeds, start is None, None), seeds), None, None
        q, k, v, gate = self._project(x, seeds)
        bias = self._relative_scores(q, k, angles) if isinstance(angles, Table) else None
        if angles is not None and bias is None:
            q = self._rotate(q, angles)
            k = self._rotate(k, angles) if key_angles is None else k
        if cache is not None:
            # [B, T, K, D] into [B, K, S, D] at slots start, ..., start + T - 1. A cache in the order of the products
            # needs no transposition for each token.
            cache = {name: jax.lax.dynamic_update_slice_in_dim(
                cache[name], new.swapaxes(1, 2).astype(cache[name].dtype), start, axis=2)
                for name, new in (("k", k), ("v", v))}
            k, v = (cache[name].swapaxes(1, 2) for name in ("k", "v"))
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        # Frequencies that depend on the length change as the text grows, so each step rotates the cached keys again.
        k = k if key_angles is None else self._rotate(k, key_angles)
        lent = (k, v) if self.keys == "lent" else None
        mixed = self._attend(q, k, v, mask, scale, seeds, cache is None, bias)
        mixed = mixed if gate is None else mixed * jax.nn.sigmoid(gate.reshape(mixed.shape))
        return self.o(mixed, seeds), cache, lent

    def _rotate(self, x: Array, angles: Angles) -> Array:
        return rotate(x, angles, self.arch.ropes[0].interleaved)

    def _attend(self, q: Array, k: Array, v: Array, mask: Array | Callable[[Array, Array, Array], Array], scale: Array,
                seeds: Seeds | None, has_whole_rows: bool, bias: Array | None) -> Array:
        if callable(mask):
            return mask(q, k, v)
        rate = 0.0 if seeds is None else self.arch.attention_dropout
        sinks = None if self.sinks is None else self.sinks[...]
        # Context parallelism: `mask` describes the pattern, and has its own `attend`.
        if not isinstance(mask, Array):
            return mask.attend(q, k, v, scale, rate, seeds, self.arch.attention_cap, sinks)
        # Blocked attention needs equal numbers of queries and keys, so it does not work with a cache.
        if has_whole_rows and not rate and self.blocked and bias is None:
            causal = self.arch.causal and not (self.arch.images and self.arch.images.in_both_directions)
            return attend_blocked(causal, self.arch.attention_cap, q, k, v, mask, scale, sinks)
        return attend(q, k, v, mask, scale, rate, seeds, self.arch.attention_cap, bias, sinks)

    def _relative_scores(self, q: Array, k: Array, table: Table) -> Array:
        """Return the relative-position terms of the scores, [B, heads, T, T]."""
        rows = {name: linear(table.rows).reshape(-1, *q.shape[2:])  # no seeds: dropout is per token, not per row
                for name, linear in (("k", self.place_k or self.k), ("q", self.place_q or self.q))}
        terms = {"c2p": content_to_position(q, rows["k"], table.buckets),
                 "p2c": position_to_content(rows["q"], k, table.buckets)}
        return sum((terms[name] for name in self.arch.relative.scores), jnp.zeros(()))

    def _project(self, x: Array, seeds: Seeds | None) -> tuple[Array, Array, Array, Array | None]:
        """Return queries [B, T, heads, head_dim], keys and values [B, T, kv_heads, head_dim], and the output gate in
        the shape of the queries, or None.
        """
        arch, gate = self.arch, None
        if arch.qkv == "fused_by_head":
            # Rows of the matrix: query, key and value of head 0, then of head 1, ...
            parts = self.qkv(x, seeds).reshape(*x.shape[:2], arch.num_heads, 3, arch.head_dim)
            return *(parts[..., index, :] for index in range(3)), None
        if arch.qkv == "fused":
            inner, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
            q, k, v = jnp.split(self.qkv(x, seeds), [inner, inner + kv], axis=-1)
        else:
            q, k = self.q(x, seeds), self.k(x, seeds)
            v = k if self.v is None else self.v(x, seeds)
        if arch.output_gate:
            # Rows of the matrix: query and gate of head 0, then of head 1, ...
            q, gate = jnp.split(q.reshape(*x.shape[:2], arch.num_heads, -1), 2, axis=-1)
        if arch.qk_norm == "projection":
            # Before splitting the heads, so that the norm spans all of them.
            q, k = self.q_norm(q), self.k_norm(k)
        if arch.qkv_limit is not None:
            q, k, v = (jnp.clip(part, -arch.qkv_limit, arch.qkv_limit) for part in (q, k, v))
        q, k, v = (self._split_heads(part) for part in (q, k, v))
        v = divide_by_rms(v, arch.norm_eps) if arch.value_norm else v
        return (self.q_norm(q), self.k_norm(k), v, gate) if arch.qk_norm == "head" else (q, k, v, gate)

    def _split_heads(self, x: Array) -> Array:
        """Reshape [B, T, heads * head_dim] to [B, T, heads, head_dim]."""
        return x.reshape(*x.shape[:2], -1, self.head_dim)


# ---------------------------------------------------------------------------------------------------------------------
# Attention on CPUs in blocks of scores that fit the processor's cache; causal attention skips fully masked blocks.
#
# The backward pass recomputes the scores instead of saving them (Dao et al. 2022), transposed to keys by queries. Two
# of its three products with scores then need no transposition, which is slow in XLA on CPUs.

# Queries per block, and keys in the backward pass. Larger blocks multiply faster, but fewer can be skipped.
CAUSAL_BLOCK, BLOCK = 128, 512


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_blocked(causal: bool, cap: float | None, q: Array, k: Array, v: Array, mask: Array, scale: Array,
                   sinks: Array | None = None) -> Array:
    """Compute `attend` without dropout. A fully masked query gets the mean of some values; its cotangent must be zero.

    Args:
        causal: True if `mask` hides all keys after the query.
        cap: Soft cap of the scores (see `soft_cap`).
        q: [B, T, heads, head_dim].
        k: [B, T, kv_heads, head_dim]. v: the same.
        mask: [B, 1, T, T] booleans.
        sinks: [heads] logit of an attention sink: an extra key per head, without a value.

    Returns:
        [B, T, heads * head_dim].
    """
    return _forward(causal, cap, q, k, v, mask, scale, sinks)[0]


def _forward(causal, cap, q, k, v, mask, scale, sinks):
    batch, length, heads, size = q.shape
    shape = (batch, k.shape[2], heads // k.shape[2])
    # Heads before positions, so that each product is one batched matrix product. K kv heads, G query heads per kv head.
    queries = q.reshape(batch, length, *shape[1:], size).transpose(0, 2, 3, 1, 4)  # [B, K, G, T, D]
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    mixed, norms = [], []
    for start, end in _blocks(length, causal):
        # Queries of a causal block do not attend to keys after its end.
        num_keys = end if causal else length
        # [B, K, G * t, D] by [B, K, s, D] -> [B, K, G * t, s]: one product for all query heads of a kv head.
        scores = _product(_flat(queries[..., start:end, :]), keys[:, :, :num_keys], 3, 3)
        scores = soft_cap(scores.reshape(*shape, end - start, num_keys) * scale, cap)
        scores = jnp.where(mask[:, :, None, start:end, :num_keys], scores, jnp.finfo(jnp.float32).min)
        # Softmax; divide the product instead of the weights, because it is smaller.
        max_scores = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - max_scores)
        total = weights.sum(-1, keepdims=True)
        part = _product(_flat(weights).astype(v.dtype), values[:, :, :num_keys], 3, 2)
        mixed.append(part.reshape(*shape, end - start, size) / total)
        # log-sum-exp of each query's scores, from which the backward pass recomputes the weights.
        norms.append((max_scores + jnp.log(total))[..., 0])
    mixed, norms = jnp.concatenate(mixed, 3), jnp.concatenate(norms, 3)
    if sinks is not None:
        # A sink adds exp(sink) to each softmax's denominator, and nothing to its numerator.
        with_sinks = jnp.logaddexp(norms, _by_group(sinks, shape[1]))
        mixed, norms = mixed * jnp.exp(norms - with_sinks)[..., None], with_sinks
    out = mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads * size).astype(v.dtype)
    return out, (queries, keys, values, mask, scale, sinks, out, norms)


def _backward(causal, cap, residuals, gradient):
    queries, keys, values, mask, scale, sinks, out, norms = residuals
    batch, groups, per_group, length, size = queries.shape
    # D of Dao et al. (2022), appendix B.2: the softmax's gradient is weights * (d weights - D). [B, K, G, T]
    products = (gradient.astype(jnp.float32) * out).reshape(batch, length, groups, per_group, size)
    offset = products.sum(-1).transpose(0, 2, 3, 1)
    gradient = gradient.reshape(batch, length, groups, per_group, size).transpose(0, 2, 3, 1, 4)
    # In blocks of keys, the gradients of keys and values are complete, while those of queries are summed over blocks.
    d_queries, d_keys, d_values = jnp.zeros(queries.shape, jnp.float32), [], []
    for start, end in _blocks(length, causal):
        first = start if causal else 0  # first query that attends to a key of this block
        later_queries, later_gradient = _flat(queries[..., first:, :]), _flat(gradient[..., first:, :])
        block_keys, block_values = keys[:, :, start:end], values[:, :, start:end]
        shape = (batch, groups, end - start, per_group, length - first)
        visible = mask[:, :, first:, start:end].swapaxes(2, 3)[:, :, :, None]
        # Keys by queries: [B, K, s, G, t].
        scores = soft_cap(_product(block_keys, later_queries, 3, 3).reshape(shape) * scale, cap)
        # A fully masked query has weights of 1 here, because its norm is the mask's value. Its cotangent must be zero.
        weights = jnp.exp(jnp.where(visible, scores, jnp.finfo(jnp.float32).min) - norms[:, :, None, :, first:])
        slopes = _product(block_values, later_gradient, 3, 3).reshape(shape) - offset[:, :, None, :, first:]
        # The derivative of cap * tanh(x / cap) is 1 - tanh(x / cap)^2.
        slopes = weights * slopes if cap is None else weights * slopes * (1 - jnp.square(scores / cap))
        weights, slopes = (x.reshape(*shape[:3], -1).astype(values.dtype) for x in (weights, slopes))
        d_values.append(_product(weights, later_gradient, 3, 2))
        d_keys.append(_product(slopes, later_queries, 3, 2) * scale)
        transposed = jax.lax.optimization_barrier(slopes.swapaxes(2, 3))  # XLA would fold it into a slow product
        # [B, K, G * t, s] by [B, K, s, D] -> [B, K, G, t, D]
        update = _product(transposed, block_keys, 3, 2).reshape(*shape[:2], per_group, length - first, size)
        d_queries = d_queries.at[..., first:, :].add(update) if first else d_queries + update
    d_queries = (d_queries * scale).transpose(0, 3, 1, 2, 4).reshape(batch, length, -1, size)
    d_keys, d_values = (jnp.concatenate(parts, 2).transpose(0, 2, 1, 3) for parts in (d_keys, d_values))
    if sinks is not None:
        # A sink's value is zero, so only D remains of the softmax's gradient. Sum over rows and queries.
        sink_weights = jnp.exp(_by_group(sinks, groups) - norms)
        sinks = -(sink_weights * offset).sum((0, 3)).reshape(sinks.shape).astype(sinks.dtype)
    # The mask and the scale are constants.
    return *(x.astype(values.dtype) for x in (d_queries, d_keys, d_values)), None, None, sinks


attend_blocked.defvjp(_forward, _backward)


def _blocks(length: int, causal: bool) -> list[tuple[int, int]]:
    size = CAUSAL_BLOCK if causal else BLOCK
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _by_group(sinks: Array, num_groups: int) -> Array:
    """Reshape [heads] to float32 [K, G, 1]."""
    return sinks.astype(jnp.float32).reshape(num_groups, -1, 1)


def _flat(x: Array) -> Array:
    """Reshape [B, K, G, T, D] to [B, K, G * T, D]."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _product(x: Array, y: Array, axis: int, axis_of_y: int) -> Array:
    """Contract one axis of x with one of y, for each row and kv head, in float32."""
    return jax.lax.dot_general(x, y, (((axis,), (axis_of_y,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
