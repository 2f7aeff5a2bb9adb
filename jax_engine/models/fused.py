"""Fused attention, which never materialises the score matrix: cuDNN's flash kernel (GPU), JAX's splash kernel (TPU).

A kernel is used only after a numerical check at start-up.

Right-padded rows need no mask in a causal network, because no real token follows padding, and only the key lengths in
an encoder. For other rows (packed, other padding) the GPU kernel needs a mask [B, 1, T, T], which is added to the
scores in the compute dtype, and the TPU kernel segment ids, with attention within a segment.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from jax_engine.distributed.interface import DATA_AXES, SEQUENCE, constrain, context_parallel_size, on_mesh
from jax_engine.distributed.target import target
from jax_engine.models.architecture import Architecture, Head
from jax_engine.models.attention import attend, attention_mask
from jax_engine.models.heads import HEADS
from lmmods.core.console import say
from lmmods.core.hardware import Target

# ---------------------------------------------------------------------------------------------------------------------
# Fused attention on TPUs: JAX's splash kernel, which skips fully masked blocks of scores and stores none.

BLOCKS = (512, 256, 128)  # tokens per block of scores; lengths must be whole blocks


def attend_splash(q: Array, k: Array, v: Array, segments: Array | None, scale: float, causal: bool,
                  window: int | None, layout: PartitionSpec) -> Array:
    """Return attention [B, T, heads, head_dim] for rows whose length is a multiple of the smallest of `BLOCKS`.

    Args:
        q: [B, T, heads, head_dim].
        k: [B, T, kv_heads, head_dim]. v: the same.
        segments: [B, T] segment ids; tokens attend within their segment. None: one segment.
        window: Size of the sliding window, including the query; causal only.
        layout: Sharding of q, k, v and the result inside a step on a mesh, because XLA cannot partition the kernel.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length = q.shape[1]
    block = next(size for size in BLOCKS if length % size == 0)
    sizes = kernels.BlockSizes(**dict.fromkeys(
        ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), block))
    mask = masks.FullMask((length, length))
    if causal:
        # Keys before and after the query: (window - 1, 0); without a window, (None, 0) is the causal mask.
        mask = masks.LocalMask((length, length), (None if window is None else window - 1, 0), 0)

    def local(q: Array, k: Array, v: Array, segments: Array | None) -> Array:
        # Inside `shard_map`, because the mask has one entry per head of this device.
        attend = kernels.make_splash_mha(masks.MultiHeadMask([mask] * q.shape[2]), block_sizes=sizes, head_shards=1,
                                         q_seq_shards=1)
        ids = None if segments is None else kernels.SegmentIds(segments, segments)
        # [B, T, heads, D] -> [B, heads, T, D]. The kernel has no scale, so scale the queries.
        heads_first = ((q * scale).astype(q.dtype).swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2))
        return jax.vmap(attend)(*heads_first, ids).swapaxes(1, 2)

    if not on_mesh():
        return local(q, k, v, segments)
    specs = (layout, layout, layout, PartitionSpec(layout[0]))
    return jax.shard_map(local, in_specs=specs, out_specs=layout, check_vma=False)(q, k, v, segments)


SPLASH = "splash"
CHECK_LENGTH, CHECK_WINDOW = 130, 16  # not a multiple of any tile; reveals a window off by one
CHECK_LENGTH_SPLASH = 2 * BLOCKS[-1]


@dataclass(frozen=True)
class Fused:
    """A fused kernel with the settings that are fixed when a network is built.

    Args:
        scale: Factor on the scores.
        window: Size of the sliding window, including the query; causal networks only.
        by_length: Use the kernel for right-padded rows.
        by_mask: Use the kernel for all other rows.
        implementation: `splash`, or one of `jax.nn.dot_product_attention`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    causal: bool
    scale: float
    window: int | None = None
    by_length: bool = True
    by_mask: bool = True
    implementation: str = "cudnn"

    def for_batch(self, batch: dict[str, Array]) -> Callable[[Array, Array, Array], Array] | None:
        """Return the replacement of `attend` for these rows, (q, k, v) -> [B, T, heads * head_dim]; None: use `attend`.

        Args:
            batch: `input_ids` [B, T]; `segment_ids`, or an `attention_mask` of right padding, or neither.
        """
        length, by_mask = batch["input_ids"].shape[1], "segment_ids" in batch or not self.by_length
        # `ContextParallel` computes these rows instead: it needs no mask [T, T], and does not divide the heads.
        if context_parallel_size() > 1 and (by_mask or self.num_kv_heads % _model_parallel_size()):
            return None
        if self.implementation == SPLASH:
            return self._splash(batch, by_mask)
        options = {"scale": self.scale, "is_causal": self.causal, "implementation": self.implementation}
        if by_mask:
            if not self.by_mask or length % 2 or length == 1:  # the kernel has no gradient for odd lengths under a mask
                return None
            # The mask includes the window; its causal order repeats `is_causal`.
            options["mask"] = constrain(attention_mask(batch, self.causal, self.window), PartitionSpec(DATA_AXES))
        elif length == 1:
            return None
        elif self.window is not None and self.window < length:
            options["local_window_size"] = (self.window - 1, 0)
        elif not self.causal and ("attention_mask" in batch or length % 2):
            # Without a causal order, real queries would attend to the padding after them.
            real = batch.get("attention_mask", jnp.ones_like(batch["input_ids"]))
            options["key_value_seq_lengths"] = real.sum(1).astype(jnp.int32)

        def attend_fused(q: Array, k: Array, v: Array) -> Array:
            # With context parallelism, exchange shards of rows with all heads for whole rows of some heads, and back
            # below.
            q, k, v = (_shard_heads(_shard_rows(x), self.num_kv_heads) for x in (q, k, v))
            if length % 2:  # the kernel has no gradient for odd lengths: add a token of padding
                q, k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v))
            mixed = jax.nn.dot_product_attention(q, k, v, **options)[:, :length]
            mixed = _shard_heads(mixed, self.num_kv_heads)
            return _shard_rows(mixed).reshape(*mixed.shape[:2], -1)

        return attend_fused

    def _splash(self, batch: dict[str, Array], by_mask: bool) -> Callable[[Array, Array, Array], Array] | None:
        """Return `for_batch` on TPUs, where the kernel supports only whole rows, and lengths of whole blocks."""
        if context_parallel_size() > 1 or by_mask and not self.by_mask or batch["input_ids"].shape[1] % BLOCKS[-1]:
            return None
        # Right padding is a separate segment (0), which a causal kernel does not need.
        segments = batch.get("segment_ids", batch.get("attention_mask") if by_mask or not self.causal else None)

        def attend_fused(q: Array, k: Array, v: Array) -> Array:
            mixed = attend_splash(q, k, v, segments, self.scale, self.causal, self.window, _layout(self.num_kv_heads))
            return mixed.reshape(*q.shape[:2], -1)

        return attend_fused


def choose(arch: Architecture, dtype: jnp.dtype, head: Head, requested: str | None, on: Target | None = None,
           name: str = "Attention") -> Fused | None:
    """Return the fused kernel for a network, or None if there is none or it fails its check. Report it, except on CPUs.

    Args:
        requested: The recipe's choice of attention; `eager` is unfused attention.
        on: The `target`.
        name: What the report calls this attention.
    """
    on = target(on)
    if on.platform == "cpu":
        return None
    reason = unsupported_reason(arch, dtype, requested)
    if reason is not None:
        return _report(None, f"{name}: plain, because {reason}. It takes more time and memory.")
    if on.is_simulated:
        return _report(None, f"{name}: in blocks, because simulated devices have no fused kernel.")
    # `unsupported_reason` has checked that all layers have the same scale and window.
    fused = Fused(arch.num_heads, arch.num_kv_heads, arch.head_dim, str(dtype), arch.causal, arch.attention_scales[0],
                  arch.windows[0])
    if on.platform == "tpu":
        fused = replace(fused, implementation=SPLASH)
    # Left-padded rows need the mask: key lengths would treat padding as text.
    fused = replace(fused, by_length=False) if HEADS[head].may_pad_left else fused
    if not on.is_here:
        return _report(fused, f"{name}: {fused.implementation}'s fused kernel, assumed to pass its check, which "
                              "needs the device.")
    return keep_passing_uses(fused, name)


def is_replaced_by_blocks(arch: Architecture, dtype: str, requested: str | None, on: Target | None = None) -> bool:
    """Return True if blocked attention replaces the kernel, so that a simulated program needs as little memory."""
    on = target(on)
    return on.is_simulated and on.platform != "cpu" and unsupported_reason(arch, jnp.dtype(dtype), requested) is None


def unsupported_reason(arch: Architecture, dtype: jnp.dtype, requested: str | None) -> str | None:
    """Return the reason why this network cannot use the fused kernel; None if it can."""
    if requested == "eager":
        return "the recipe sets attention: eager"
    if arch.images is not None and arch.images.in_both_directions:
        return "image tokens attend to later ones"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"the fused kernel computes in 16 bits, not in {dtype}"
    if arch.head_dim % 8 or arch.head_dim > 128:
        return f"the fused kernel supports heads of up to 128 features, a multiple of 8, not {arch.head_dim}"
    if arch.attention_cap is not None:
        return f"the fused kernel does not support capped scores (at {arch.attention_cap} here)"
    if arch.sinks:
        return "the fused kernel does not support sinks"
    if arch.attention_dropout:
        return f"the fused kernel does not support attention dropout ({arch.attention_dropout} here)"
    if arch.relative is not None:
        return "the fused kernel does not support relative positions"
    if arch.wide_heads is not None or arch.num_borrowing:
        return "the layers of this network differ in their heads"
    if len(set(arch.windows)) > 1 or len(set(arch.attention_scales)) > 1:
        return "the layers of this network differ in window or scale"
    if not arch.causal and arch.windows[0] is not None:
        return "the fused kernel does not support a window to both sides"
    return None


def keep_passing_uses(fused: Fused, name: str = "Attention") -> Fused | None:
    """Return `fused` with only the uses that pass their check; None if all fail."""
    problems = {use: find_mismatch(fused, use == "by_mask") for use in ("by_length", "by_mask") if getattr(fused, use)}
    # Keep one use if only the other fails.
    failed = {use: problem for use, problem in problems.items() if problem is not None}
    passed = replace(fused, **dict.fromkeys(failed, False))
    reasons = "; ".join(f"{_USES[use]}: {problem}" for use, problem in failed.items())
    if len(failed) == len(problems):
        return _report(None, f"{name}: plain, because the fused kernel fails its check ({reasons}). It takes more "
                             "time and memory.")
    return _report(passed, f"{name}: {fused.implementation}'s fused kernel, which agrees with plain attention"
                   + (f"; rows that fail its check use plain attention ({reasons})." if failed else "."))


_USES = {"by_length": "padded rows", "by_mask": "packed rows"}


@cache
def _report(chosen: Fused | None, line: str) -> Fused | None:
    say(line)
    return chosen


@cache
def find_mismatch(fused: Fused, by_mask: bool) -> str | None:
    """Return how the kernel differs from `attend` in float32 on two random rows, one of them padded; None if it agrees.

    Compare the outputs of real tokens, and the gradients of queries, keys and values.
    """
    random = np.random.default_rng(0)
    # Check one use at a time; `by_length=False` uses the mask for all rows.
    fused = replace(fused, by_length=not by_mask, window=None if fused.window is None else CHECK_WINDOW)
    length = CHECK_LENGTH_SPLASH if fused.implementation == SPLASH else CHECK_LENGTH
    shapes = [(2, length, heads, fused.head_dim) for heads in
              (fused.num_heads, fused.num_kv_heads, fused.num_kv_heads, fused.num_heads)]
    q, k, v, weights = (jnp.asarray(random.normal(size=shape), fused.dtype) for shape in shapes)
    positions = np.arange(length)
    # Row 0: three documents. Row 1: two documents, and padding from position 90.
    segments = np.stack([1 + (positions > 40) + (positions > 77), np.where(positions < 90, 1 + (positions > 50), 0)])
    batch = {"input_ids": jnp.zeros(segments.shape, jnp.int32), "attention_mask": jnp.asarray(segments > 0, jnp.int32)}
    batch |= {"segment_ids": jnp.asarray(segments, jnp.int32)} if by_mask else {}
    # A random linear loss of the output of real tokens: the output of padding is arbitrary.
    weights *= jnp.asarray(segments > 0, weights.dtype)[:, :, None, None]

    def plain(q: Array, k: Array, v: Array) -> Array:
        return attend(q, k, v, attention_mask(batch, fused.causal, fused.window), fused.scale)

    def run(function: Callable, *qkv: Array) -> list[np.ndarray]:
        def loss(*qkv: Array) -> tuple[Array, Array]:
            mixed = function(*qkv).astype(jnp.float32)
            return (mixed * weights.reshape(mixed.shape).astype(jnp.float32)).sum(), mixed

        (_, mixed), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*qkv)
        return [np.asarray(x, np.float32) for x in (mixed, *gradients)]

    reference = run(plain, *(x.astype(jnp.float32) for x in (q, k, v)))
    try:
        outputs = run(fused.for_batch(batch), q, k, v)
    except Exception as error:  # noqa: BLE001 - `attend` replaces a kernel that fails in any way
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
    if not all(np.isfinite(x).all() for x in outputs):
        return "not all numbers are finite"
    # Compare gradients at all positions: at padding they are zero in both.
    reference[0], outputs[0] = (x[segments > 0] for x in (reference[0], outputs[0]))
    for name, expected, actual in zip(("output", "d query", "d key", "d value"), reference, outputs, strict=True):
        # Allow a few roundings in the compute dtype; a wrong mask or scale differs by far more.
        difference = np.abs(expected - actual).max() / np.abs(expected).max()
        if difference > 4 * float(jnp.finfo(fused.dtype).eps):
            return f"{name} differs by {difference:.1%} of the largest number"
    return None


def _shard_heads(x: Array, num_kv_heads: int) -> Array:
    """On a mesh, shard rows over ranks, and heads over `tensor` if divisible, but not positions and features.

    With context parallelism, devices along `sequence` exchange their shard of every row for some heads of whole rows
    (all-to-all, Jacobs et al. 2023).
    """
    return constrain(x, _layout(num_kv_heads))


def _layout(num_kv_heads: int) -> PartitionSpec:
    axes = ("tensor", SEQUENCE) if context_parallel_size() > 1 else "tensor"
    return PartitionSpec(DATA_AXES, None, axes if num_kv_heads % _model_parallel_size() == 0 else None)


def _shard_rows(x: Array) -> Array:
    """Shard rows as before and after that exchange. Without this constraint XLA all-gathers whole rows instead."""
    return constrain(x, PartitionSpec(DATA_AXES, SEQUENCE, "tensor")) if context_parallel_size() > 1 else x


def _model_parallel_size() -> int:
    """Return the number of devices over which heads are sharded."""
    return jax.sharding.get_abstract_mesh().shape.get("tensor", 1) * context_parallel_size()
