"""Fused attention on TPUs: JAX's splash kernel, which skips blocks of scores that nobody sees and never stores any."""

import jax
from jax import Array
from jax.sharding import PartitionSpec

from jax_engine.distributed.interface import on_mesh

BLOCKS = (512, 256, 128)  # tokens of a block of scores, of which there must be whole ones


def attend_splash(q: Array, k: Array, v: Array, segments: Array | None, scale: float, causal: bool,
                  window: int | None, layout: PartitionSpec) -> Array:
    """Attention [B, T, heads, head_dim] of rows whose length is a multiple of the smallest of `BLOCKS`.

    Args:
        q: [B, T, heads, head_dim].
        k: [B, T, kv_heads, head_dim]. v: the same.
        segments: [B, T] numbers; a token sees those of its own. None: all are of one.
        window: How many tokens back a query sees, itself included; causal only.
        layout: Inside a step on a mesh, of q, k, v and the result: XLA cannot part the kernel by itself.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length = q.shape[1]
    block = next(size for size in BLOCKS if length % size == 0)
    sizes = kernels.BlockSizes(**dict.fromkeys(
        ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), block))
    seen = masks.FullMask((length, length))
    if causal:
        seen = masks.LocalMask((length, length), (None if window is None else window - 1, 0), 0)

    def local(q: Array, k: Array, v: Array, segments: Array | None) -> Array:
        attend = kernels.make_splash_mha(masks.MultiHeadMask([seen] * q.shape[2]), block_sizes=sizes, head_shards=1,
                                         q_seq_shards=1)
        ids = None if segments is None else kernels.SegmentIds(segments, segments)
        heads_first = ((q * scale).astype(q.dtype).swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2))
        return jax.vmap(attend)(*heads_first, ids).swapaxes(1, 2)

    if not on_mesh():
        return local(q, k, v, segments)
    specs = (layout, layout, layout, PartitionSpec(layout[0]))
    return jax.shard_map(local, in_specs=specs, out_specs=layout, check_vma=False)(q, k, v, segments)
