"""MXFP4 (OCP Microscaling 1.0): 4-bit floating-point codes in blocks of 32 with a power of two for each."""

import re

import numpy as np

PIECES = {"blocks", "scales"}
# Sign, two bits of exponent, one of mantissa.
VALUES = np.array([sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)
_PIECE = re.compile(r"^(.*_proj)_(blocks|scales)$")
_BIAS = 127  # of the exponents


def piece_of(key: str) -> tuple[str, str] | None:
    """Name of the weight that a tensor of a file belongs to, and which of `PIECES` it is; None: neither."""
    found = _PIECE.match(key)
    return (found[1], found[2]) if found else None


def shape(blocks: np.ndarray) -> tuple[int, ...]:
    """That of the weights [E, in, out] of codes [E, out, in / 32, 16]."""
    num, size, groups, num_bytes = blocks.shape
    return num, groups * num_bytes * 2, size


def fill(weights: np.ndarray, blocks: np.ndarray, scales: np.ndarray) -> None:
    """Write the values of codes into weights, one expert at a time.

    Args:
        weights: [E, in, out].
        blocks: uint8 [E, out, in / 32, 16], the earlier code in the low bits.
        scales: uint8 [E, out, in / 32], exponents of two.
    """
    for expert, (codes, exponents) in enumerate(zip(blocks, scales, strict=True)):
        values = VALUES[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*exponents.shape, -1)
        values = np.ldexp(values, exponents.astype(np.int32)[..., None] - _BIAS)
        weights[expert] = values.reshape(len(values), -1).T
