"""MXFP4 (OCP Microscaling 1.0): 4-bit floating-point codes, with a power-of-two scale per block of 32."""

import re

import numpy as np

from lmmods.core.lazy_array import LazyArray, Part, size_of

TENSORS = {"blocks", "scales"}
# Sign, two bits of exponent, one of mantissa.
VALUES = np.array([sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)
_KEY = re.compile(r"^(.*_proj)_(blocks|scales)$")
_BIAS = 127  # exponent bias of the scales


def split_key(key: str) -> tuple[str, str] | None:
    """Split a tensor's key in a file into its weight's name and one of `TENSORS`; None for other keys."""
    match = _KEY.match(key)
    return (match[1], match[2]) if match else None


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
        for index, expert in enumerate(range(experts.start, experts.stop)):  # one at a time, to bound memory
            row = slice(expert, expert + 1)
            # Files have [out, in / 32, 16], so the last dimension of the weight [in, out] selects rows.
            codes, exponents = (source[row, rows, *[slice(None)] * (source.ndim - 2)][0] for source in (blocks, scales))
            decoded = VALUES[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*exponents.shape, -1)
            # [out, in / 32, 32] times 2^exponent per group.
            decoded = np.ldexp(decoded, exponents.astype(np.int32)[..., None] - _BIAS)
            # All of `in` is decoded: select the requested columns, and transpose to [in, out].
            weights[index] = decoded.reshape(len(decoded), -1)[:, columns].T
        return weights

    return LazyArray(shape(blocks), dtype, read)
