"""MXFP4 (OCP Microscaling 1.0): 4-bit floating-point codes, with a power-of-two scale per block of 32."""

import re

import numpy as np

from lmmods.core.lazy_array import LazyArray, Part, size_of

PIECES = {"blocks", "scales"}
# Sign, two bits of exponent, one of mantissa.
VALUES = np.array([sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)
_PIECE = re.compile(r"^(.*_proj)_(blocks|scales)$")
_BIAS = 127  # exponent bias of the scales


def piece_of(key: str) -> tuple[str, str] | None:
    """Return the weight that a file's tensor belongs to, and which of `PIECES` it is; None if it is neither."""
    found = _PIECE.match(key)
    return (found[1], found[2]) if found else None


def shape(blocks: LazyArray) -> tuple[int, ...]:
    """Return the shape of the weights [E, in, out] for codes [E, out, in / 32, 16]."""
    num, size, groups, num_bytes = blocks.shape
    return num, groups * num_bytes * 2, size


def values(blocks: LazyArray, scales: LazyArray, dtype: np.dtype) -> LazyArray:
    """Return the dequantised weights [E, in, out], lazily.

    Args:
        blocks: uint8 [E, out, in / 32, 16], the first code of a pair in the low bits.
        scales: uint8 [E, out, in / 32], biased exponents of two.
    """
    def read(part: Part) -> np.ndarray:
        experts, columns, rows = part
        weights = np.empty(size_of(part), dtype)
        for place, expert in enumerate(range(experts.start, experts.stop)):  # one at a time, to bound memory
            one = slice(expert, expert + 1)
            # Files have [out, in / 32, 16]; the last dimension of the weight [in, out] selects rows there.
            codes, exponents = (source[one, rows, *[slice(None)] * (source.ndim - 2)][0] for source in (blocks, scales))
            found = VALUES[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*exponents.shape, -1)
            # [out, in / 32, 32] times 2^exponent per group.
            found = np.ldexp(found, exponents.astype(np.int32)[..., None] - _BIAS)
            # All of `in` was decoded, to be cut and transposed to [in, out].
            weights[place] = found.reshape(len(found), -1)[:, columns].T
        return weights

    return LazyArray(shape(blocks), dtype, read)
