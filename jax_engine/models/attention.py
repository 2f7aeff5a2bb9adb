"""Attention: who sees whom, rotary positions, and the scores in float32."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, Rope
from jax_engine.models.cpu_attention import attend_blocked
from jax_engine.models.dropout import Seeds, dropped_weights
from jax_engine.models.linear import Build, Linear, Norm
from lmmods.core.errors import UserError


def attention_mask(batch: dict[str, Array], causal: bool, window: int | None) -> Array:
    """Who sees whom: [B, 1, T, T] booleans, query by key.

    Args:
        batch: `input_ids` [B, T]; `segment_ids` (documents 1, 2, ...; 0 is padding) or `attention_mask` or neither.
        window: How many tokens back a query sees, itself included.
    """
    length = batch["input_ids"].shape[1]
    seen = _places_seen(jnp.arange(length)[:, None], jnp.arange(length)[None], causal, window)[None, None]
    if "segment_ids" in batch:
        segments = batch["segment_ids"]
        same = (segments[:, :, None] == segments[:, None]) & (segments[:, None] > 0)
        return seen & same[:, None]
    if "attention_mask" in batch:
        return seen & (batch["attention_mask"] > 0)[:, None, None]
    return jnp.broadcast_to(seen, (batch["input_ids"].shape[0], 1, length, length))


def cached_mask(valid: Array, start: Array, length: int, window: int | None) -> Array:
    """Who sees whom when `length` new tokens follow `start` cached ones: [B, 1, length, S].

    Args:
        valid: [B, S] which slots of the cache hold real tokens, the new ones included.
    """
    queries = start + jnp.arange(length)[:, None]
    seen = _places_seen(queries, jnp.arange(valid.shape[1])[None], True, window)
    return seen[None, None] & valid[:, None, None]


def _places_seen(queries: Array, keys: Array, causal: bool, window: int | None) -> Array:
    seen = keys <= queries if causal else jnp.broadcast_to(True, jnp.broadcast_shapes(queries.shape, keys.shape))
    return seen if window is None else seen & (keys > queries - window)


def rope_of(config: PreTrainedConfig) -> Rope:
    """Inverse frequencies from `rope_parameters` of a configuration.

    Raises:
        UserError: A kind of scaling that is not supported.
    """
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3") or parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"model.config: rope_parameters {parameters} are not supported by the JAX engine, which knows "
                        "the types default, linear and llama3 on whole heads. Use engine: torch.")
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies = 1.0 / np.float32(parameters["rope_theta"]) ** (np.arange(0, size, 2, dtype=np.float32) / size)
    if kind == "linear":
        frequencies = frequencies / parameters["factor"]
    if kind == "llama3":
        frequencies = _llama3(frequencies, parameters)
    return Rope(tuple(float(f) for f in frequencies.astype(np.float32)))


def _llama3(frequencies: np.ndarray, parameters: dict) -> np.ndarray:
    """Long waves are stretched, short ones kept, those between blended (Llama 3.1)."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - share) * frequencies / parameters["factor"] + share * frequencies


def rope_angles(rope: Rope, position_ids: Array) -> tuple[Array, Array]:
    """Cosine and sine of each position [B, T] for each feature, [B, T, 1, head_dim] float32."""
    angles = position_ids[..., None].astype(jnp.float32) * jnp.array(rope.inverse_frequencies, jnp.float32)
    angles = jnp.concatenate([angles, angles], -1)[:, :, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, angles: tuple[Array, Array]) -> Array:
    """Turn the pairs (i, i + head_dim / 2) of x [B, T, heads, head_dim] by their angles, in float32."""
    cos, sin = angles
    wide = x.astype(jnp.float32)
    first, second = jnp.split(wide, 2, axis=-1)
    return (wide * cos + jnp.concatenate([-second, first], -1) * sin).astype(x.dtype)


def attend(q: Array, k: Array, v: Array, mask: Array, scale: Array, rate: float, seeds: Seeds | None) -> Array:
    """Softmax attention with float32 scores; a query that sees nothing gets the mean of all values, not NaN.

    Args:
        q: [B, T, heads, head_dim].
        k: [B, S, kv_heads, head_dim]; each serves heads / kv_heads queries (Ainslie et al. 2023). v: the same.
        mask: [B, 1, T, S] booleans.
        rate: Dropout of the weights.
        seeds: None is for no dropout.

    Returns:
        [B, T, heads * head_dim].
    """
    batch, length, heads, size = q.shape
    q = q.reshape(batch, length, k.shape[2], -1, size)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(mask[:, :, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if seeds is not None and rate:
        by_head = weights.reshape(batch, heads, length, -1)
        weights = dropped_weights(by_head, rate, seeds, "layers.attn.weights").reshape(weights.shape)
    mixed = jnp.einsum("bkgts,bskd->btkgd", weights.astype(v.dtype), v)
    return mixed.reshape(batch, length, heads * size)


class Attention(nnx.Module):
    """Self-attention of one layer with its projections."""

    def __init__(self, arch: Architecture, build: Build):
        self.arch, self.blocked = arch, build.blocked
        inner, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        kwargs = {"build": build, "conv1d": arch.conv1d}
        if arch.fused_qkv:
            self.qkv = Linear(arch.hidden_size, inner + 2 * kv, "layers.attn.qkv", std=arch.layer_std,
                              bias=arch.qkv_bias, **kwargs)
        else:
            self.q = Linear(arch.hidden_size, inner, "layers.attn.q", std=arch.layer_std, bias=arch.qkv_bias, **kwargs)
            self.k = Linear(arch.hidden_size, kv, "layers.attn.k", std=arch.layer_std, bias=arch.qkv_bias, **kwargs)
            self.v = Linear(arch.hidden_size, kv, "layers.attn.v", std=arch.layer_std, bias=arch.qkv_bias, **kwargs)
        self.o = Linear(inner, arch.hidden_size, "layers.attn.o", std=arch.residual_std, bias=arch.out_bias, **kwargs)
        if arch.qk_norm:
            self.q_norm = Norm(arch.head_dim, arch.norm, arch.norm_eps)
            self.k_norm = Norm(arch.head_dim, arch.norm, arch.norm_eps)

    def __call__(self, x: Array, mask: Array | Callable[[Array, Array, Array], Array], scale: Array,
                 angles: tuple[Array, Array] | None, seeds: Seeds | None, cache: dict[str, Array] | None = None,
                 start: Array | None = None) -> tuple[Array, dict[str, Array] | None]:
        """Mixed features [B, T, D] of x, and the cache with the new keys and values written from slot `start` on.

        Args:
            mask: [B, 1, T, S] booleans, or a fused kernel that knows who sees whom.
        """
        q, k, v = self._project(x, seeds)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        if cache is not None:
            k, v = (jax.lax.dynamic_update_slice_in_dim(cache[name], new.astype(cache[name].dtype), start, axis=1)
                    for name, new in (("k", k), ("v", v)))
            cache = {"k": k, "v": v}
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        return self.o(self._mix(q, k, v, mask, scale, seeds, cache is None), seeds), cache

    def _mix(self, q: Array, k: Array, v: Array, mask: Array | Callable[[Array, Array, Array], Array], scale: Array,
             seeds: Seeds | None, whole_rows: bool) -> Array:
        if callable(mask):
            return mask(q, k, v)
        rate = 0.0 if seeds is None else self.arch.attention_dropout
        if whole_rows and not rate and self.blocked:
            return attend_blocked(self.arch.causal, q, k, v, mask, scale)
        return attend(q, k, v, mask, scale, rate, seeds)

    def _project(self, x: Array, seeds: Seeds | None) -> tuple[Array, Array, Array]:
        arch = self.arch
        if arch.fused_qkv:
            inner, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
            parts = jnp.split(self.qkv(x, seeds), [inner, inner + kv], axis=-1)
        else:
            parts = self.q(x, seeds), self.k(x, seeds), self.v(x, seeds)
        q, k, v = (part.reshape(*part.shape[:2], -1, arch.head_dim) for part in parts)
        return (self.q_norm(q), self.k_norm(k), v) if arch.qk_norm else (q, k, v)
