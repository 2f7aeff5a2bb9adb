"""Context parallelism: attention over sharded rows. Each device has its shard's queries, and all keys.

Keys and values are all-gathered (section 3.3.2 of Dubey et al. 2024); their gradients are reduce-scattered. Scores are
computed for one block of queries at a time, and recomputed in the backward pass, so that memory grows linearly with the
length.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jax_engine.distributed.interface import DATA_AXES, SEQUENCE
from jax_engine.models.attention import attend, in_block, real_tokens, visibility_mask
from jax_engine.models.dropout import Seeds

SCORE_BYTES = 512 * 2**20  # maximum bytes of a block's float32 scores, on each device


@jax.tree_util.register_dataclass
@dataclass
class ContextParallel:
    """Attention pattern of rows sharded along the sequence. It replaces a mask, which is quadratic in the length.

    Args:
        segments: [B, T] document indices 1, 2, ..., or 1 for real tokens; 0 is padding, which is not attended to.
        window: Size of the sliding window, the query included; without `causal` it also extends as far ahead.
        blocks: [B, T], as for `attention_mask`; None if no tokens attend to later ones.
        packed: True if tokens attend only within their segment.
    """

    segments: Array
    window: Array
    blocks: Array | None
    causal: bool = field(metadata={"static": True})
    packed: bool = field(metadata={"static": True})

    @classmethod
    def from_batch(cls, batch: dict[str, Array], causal: bool, window: int | None, blocks: Array | None = None
                   ) -> "ContextParallel":
        """Create the pattern of a batch; arguments as for `attention_mask`."""
        packed, length = "segment_ids" in batch, batch["input_ids"].shape[1]
        segments = batch["segment_ids"] if packed else real_tokens(batch).astype(jnp.int32)
        return cls(segments, jnp.array(length if window is None else window), blocks, causal, packed)

    def attend(self, q: Array, k: Array, v: Array, scale: Array, rate: float = 0.0, seeds: Seeds | None = None,
               cap: float | None = None, sinks: Array | None = None) -> Array:
        """Compute `attend` for sharded [B, T, ...] arrays. Call it inside a step on a mesh."""
        has_dropout = bool(rate) and seeds is not None
        tensor = jax.sharding.get_abstract_mesh().shape["tensor"]
        over_heads = None if k.shape[2] % tensor or has_dropout else "tensor"  # dropout masks depend on the global head
        sharded, rows = PartitionSpec(DATA_AXES, SEQUENCE, over_heads), PartitionSpec(DATA_AXES)
        replicated = PartitionSpec()
        layouts = (sharded, sharded, sharded, rows, replicated, rows, replicated, rows, replicated,
                   PartitionSpec(over_heads))

        def local(q, k, v, segments, window, blocks, scale, words, site, sinks):
            # [B, T / parts, K, D] -> [B, T, K, D]
            k, v = (jax.lax.all_gather(x, SEQUENCE, axis=1, tiled=True) for x in (k, v))
            rows = ContextParallel(segments, window, blocks, self.causal, self.packed)
            seeds = Seeds(words, {"layers.attn.weights": site}) if has_dropout else None
            # Position of this device's first query in the row.
            first = jax.lax.axis_index(SEQUENCE) * q.shape[1]
            return rows._attend_by_blocks(q, k, v, first, scale, rate, seeds, cap, sinks)

        words, site = (seeds.tokens, seeds.sites["layers.attn.weights"]) if has_dropout else (None, None)
        return jax.shard_map(local, in_specs=layouts, out_specs=sharded, check_vma=False)(
            q, k, v, self.segments, self.window, self.blocks, scale, words, site, sinks)

    def _attend_by_blocks(self, q: Array, k: Array, v: Array, first: Array, scale: Array, rate: float,
                          seeds: Seeds | None, cap: float | None, sinks: Array | None) -> Array:
        """Compute `attend` for queries [B, t, heads, head_dim]; their positions in the rows start at `first`."""
        batch, length, heads, _ = q.shape
        # Blocks of equal size need little padding. Compute their number, then their size, then the number again,
        # because a rounded size may need fewer.
        num_blocks = -(-length // max(SCORE_BYTES // (4 * batch * heads * k.shape[1]), 1))
        size = -(-length // num_blocks)
        num_blocks = -(-length // size)
        # [B, t, heads, D] -> [num_blocks, B, size, heads, D]
        padded = jnp.pad(q, ((0, 0), (0, num_blocks * size - length), (0, 0), (0, 0)))
        blocks = padded.reshape(batch, num_blocks, size, *q.shape[2:]).swapaxes(0, 1)
        wide = k.astype(jnp.float32), v.astype(jnp.float32)  # so that gradients are summed over blocks in float32

        @jax.checkpoint
        def block(index_and_queries: tuple[Array, Array]) -> Array:
            index, queries = index_and_queries
            # Padded queries get the position of the last token; their output is removed.
            positions = jnp.minimum(first + index * size + jnp.arange(size), k.shape[1] - 1)
            block_seeds = None if seeds is None else seeds._replace(queries=seeds.tokens[:, positions])
            keys, values = (x.astype(q.dtype) for x in wide)
            return attend(queries, keys, values, self._mask(positions), scale, rate, block_seeds, cap, sinks=sinks)

        mixed = jax.lax.map(block, (jnp.arange(num_blocks), blocks))
        return mixed.swapaxes(0, 1).reshape(batch, num_blocks * size, -1)[:, :length]

    def _mask(self, positions: Array) -> Array:
        """Return the mask [B, 1, queries, T] of queries at these positions of their rows."""
        keys = jnp.arange(self.segments.shape[1])
        visible = visibility_mask(positions[:, None], keys[None], self.causal, self.window)[None]
        if self.blocks is not None:
            visible = visible | in_block(self.blocks[:, positions], self.blocks) & (keys > positions[:, None])
        visible &= (self.segments > 0)[:, None]
        if self.packed:
            visible &= self.segments[:, positions][:, :, None] == self.segments[:, None]
        return visible[:, None]
