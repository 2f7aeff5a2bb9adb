"""Dropout masks and noise as a function of (seed, epoch, row, position, site), the same bits on both engines.

A token's seed is MurmurHash3 (Austin Appleby, SMHasher, `MurmurHash3_x86_32`) of its epoch, row and position. All other
steps use that hash's finaliser, in which each of 32 bits affects all others. The token's seed and a site's seed give
the token's word at that site. That word and a feature's seed (in attention: a key's) give 32 bits for two features.

So a mask does not depend on batches, padding, devices, or other random numbers. This is the reference, in numpy; the
engines compute the same in torch and in JAX. Arrays of 32 bits are uint32 here; token seeds are passed as int32.
"""

import zlib
from functools import lru_cache

import numpy as np

from lmmods.core.errors import UserError

GOLDEN = 0x9E3779B9  # 2^32 divided by the golden ratio: spreads small numbers over 32 bits
FINAL_1, FINAL_2 = 0x85EBCA6B, 0xC2B2AE35  # the finaliser's factors
BLOCK_1, BLOCK_2 = 0xCC9E2D51, 0x1B873593  # factors of a block
STEPS = 2**16  # a rate is a multiple of 1 / STEPS


def finalise(h: np.ndarray) -> np.ndarray:
    """Apply MurmurHash3's finaliser, a bijection of 32 bits."""
    # uint32 products wrap modulo 2^32, as the hash requires: silently for arrays, with a warning for numpy scalars.
    h = (h ^ (h >> np.uint32(16))) * np.uint32(FINAL_1)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(FINAL_2)
    return h ^ (h >> np.uint32(16))


def murmur3(seed: int, blocks: list[np.ndarray]) -> np.ndarray:
    """Return MurmurHash3_x86_32 of each sequence of 4-byte blocks; blocks are uint32 and broadcast to each other."""
    # An array rather than a scalar, so that overflow is silent.
    h = np.full((1,), seed, np.uint32)
    for block in blocks:
        mixed = _rotate(block * np.uint32(BLOCK_1), 15) * np.uint32(BLOCK_2)
        h = _rotate(h ^ mixed, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    return finalise(h ^ np.uint32(4 * len(blocks)))  # the length in bytes


def _rotate(x: np.ndarray, bits: int) -> np.ndarray:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def token_seeds(seed: int, epoch: int | np.ndarray, row: int | np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return the seeds of tokens, int32; arguments may have any shapes that broadcast.

    Two tokens of a run have the same seed with a probability of 2^-32, and then merely share their masks.

    Args:
        seed: Seed of the run.
        epoch: Index of the epoch.
        row: Index of the row in the epoch's data, independent of its position in a batch.
        position: Position in the row, from 0.
    """
    # Epoch and row are 64 bits, low half first as MurmurHash3 reads them; a position fits in 32.
    words = [part for index in (epoch, row) for part in _split_halves(np.asarray(index, np.int64))]
    return murmur3(seed, [*words, np.asarray(position).astype(np.uint32)]).view(np.int32)


def _split_halves(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values = np.atleast_1d(values)
    return (values & 0xFFFFFFFF).astype(np.uint32), (values >> 32).astype(np.uint32)  # low, high


@lru_cache(2**14)
def site_seed(site: str, call: int = 0) -> int:
    """Return the seed of a place in the model that applies dropout, below 2^32.

    Args:
        site: Name of the torch module without PEFT's wrapping, for example `transformer.h.0.mlp.dropout`.
        call: Number of earlier calls of the module in the same forward pass (layers that share weights).
    """
    # CRC-32 is the same in every process and version, unlike Python's `hash`.
    return int(finalise(np.array([(zlib.crc32(site.encode()) + GOLDEN * call) % 2**32], np.uint32))[0])


def feature_seeds(num: int) -> np.ndarray:
    """Return [num] uint32, one for every two features."""
    return finalise(np.arange(1, num + 1, dtype=np.uint32) * np.uint32(GOLDEN))


def dropped_steps(rate: float) -> int:
    """Return `rate` as a multiple of 1 / STEPS. Raises UserError unless 0 <= rate < 1."""
    if not 0 <= rate < 1:
        raise UserError(f"A dropout rate of the model's configuration is {rate}. Set it to a value from 0 up to but "
                        "not including 1.")
    # A rate above 0 drops something, and a rate below 1 keeps something: `keep_scale` stays finite.
    return min(max(round(rate * STEPS), int(rate > 0)), STEPS - 1)


def keep_scale(rate: float) -> float:
    """Return the factor of kept features: 1 / (fraction of kept features)."""
    return STEPS / (STEPS - dropped_steps(rate))


def min_kept(rate: float) -> int:
    """Return the smallest int32 whose upper half keeps a feature."""
    # Words are read as signed, so they start at -STEPS / 2 * STEPS: dropped_steps of STEPS equal parts are below the
    # result. Its lower half is 0, so the lower half of a word has no effect.
    return (dropped_steps(rate) - STEPS // 2) * STEPS


def feature_mask(seeds: np.ndarray, site: int, num: int, rate: float) -> np.ndarray:
    """Return the mask of kept features of tokens.

    Args:
        seeds: [...] int32, seeds of tokens.
        site: From `site_seed`.

    Returns:
        [..., num] bool. Feature j and feature j + ceil(num / 2) share 32 bits.
    """
    words = finalise(seeds.view(np.uint32) ^ np.uint32(site))  # [...]
    # [..., 1] ^ [ceil(num / 2)] -> [..., ceil(num / 2)], split to twice as many; an odd `num` leaves one unused.
    return _split(words[..., None] ^ feature_seeds(-(-num // 2)), rate, -1)[..., :num]


NOISE_SITE = "neftune"


def feature_noise(seeds: np.ndarray, site: int, num: int) -> np.ndarray:
    """Return uniform numbers in (-1, 1) for features of tokens: odd multiples of 2^-24, each from 32 separate bits.

    Args:
        seeds: [...] int32, seeds of tokens.
        site: From `site_seed`.

    Returns:
        [..., num] float32.
    """
    words = finalise(seeds.view(np.uint32) ^ np.uint32(site))
    bits = finalise(words[..., None] ^ feature_seeds(num)).view(np.int32)
    # The upper 24 bits, read as signed, and a half: 25 bits with the sign, which fit in float32.
    return ((bits >> 8).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def attention_mask(seeds: np.ndarray, site: int, num_heads: int, rate: float) -> np.ndarray:
    """Return the mask of kept attention weights: [B, num_heads, T, T] bool, query by key; heads share bits as features.

    Args:
        seeds: [B, T] int32, seeds of tokens. The mask of a weight depends only on its two tokens.
    """
    queries = finalise(seeds.view(np.uint32) ^ np.uint32(site))  # [B, T]
    pairs = feature_seeds(-(-num_heads // 2))  # [P], P = ceil(num_heads / 2)
    keys = finalise(seeds.view(np.uint32)[:, None] ^ pairs[:, None])  # [B, P, T]
    # [B, 1, T, 1] ^ [B, P, 1, T] -> [B, P, T, T]. Only the key side depends on the head.
    return _split(queries[:, None, :, None] ^ keys[:, :, None], rate, 1)[:, :num_heads]


def _split(mixed: np.ndarray, rate: float, axis: int) -> np.ndarray:
    """Return two decisions per word, the ones of the upper halves first."""
    bits = finalise(mixed)
    # The shift moves the lower half up, where `min_kept` compares.
    halves = np.concatenate([bits, bits << np.uint32(16)], axis)
    return halves.view(np.int32) >= np.int32(min_kept(rate))
