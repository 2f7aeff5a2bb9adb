"""Quantised weights: NF4 and FP4 (QLoRA, Dettmers et al. 2023) and int8 by rows, with the bits of bitsandbytes.

A frozen weight stays quantised on the devices. `astype` makes the matrix inside a step, for one product at a time.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmmods.core.task_fields import Quantize

BLOCK, NESTED_BLOCK = 64, 256
# Values of the sixteen codes: appendix E of the QLoRA paper; sign, two bits of exponent and one of mantissa.
CODEBOOKS = {
    "nf4": np.array([
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32),
    "fp4": np.array([sign * value for sign in (1, -1) for value in
                     (0.0, 0.0052083334885537624, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)], np.float32),
}


def _static() -> Any:
    return field(metadata={"static": True})


class Quantized(ABC):
    """A matrix kept in codes; looks like an array of the matrix to whoever counts parameters."""

    kind: str
    shape: tuple[int, ...]  # of the matrix as the layer sees it; leading axes, as of stacked layers, come first

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> str:
        """Name of the code."""
        return self.kind

    @abstractmethod
    def astype(self, dtype: Any) -> Array:
        """The matrix."""


@jax.tree_util.register_dataclass
@dataclass
class FourBit(Quantized):
    """A matrix in 4-bit codes with a scale for each 64 of them.

    Blocks run along the rows of torch's [out, in], which is one long row where `in` is not a multiple of 64.

    Args:
        packed: uint8 [..., rows, columns / 2], the earlier code in the high bits.
        absmax: Scales, float32 [..., rows, columns / 64], or with double quantisation their uint8 codes.
        nested: Of double quantisation: scales of 256 codes each [..., ceil(blocks / 256)], and the mean [...].
        kind: nf4 or fp4.
        matrix: (out, in).
        transposed: The layer keeps its matrix as [in, out] (Conv1D).
        stacked: Rows of each of several matrices, which stand below each other in this one; None: it is one.
    """

    packed: Array
    absmax: Array
    nested: tuple[Array, Array] | None
    kind: str = _static()
    matrix: tuple[int, int] = _static()
    transposed: bool = _static()
    stacked: int | None = field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, rows, _ = self.packed.shape
        if self.stacked is None:
            return (*lead, *(self.matrix[::-1] if self.transposed else self.matrix))
        rows = self.matrix[0] if rows == 1 else rows  # of a shard fewer
        return (*lead, rows // self.stacked, self.stacked, self.matrix[1])

    def astype(self, dtype: Any) -> Array:
        lead, rows = self.packed.shape[:-2], self.packed.shape[-2]
        codes = jnp.stack([self.packed >> 4, self.packed & 15], axis=-1)
        values = jnp.asarray(CODEBOOKS[self.kind])[codes].reshape(*lead, rows, -1, BLOCK) * self._scales()[..., None]
        if rows == 1:  # else no shape that joins rows, along which they may be sharded
            values = values.reshape(*lead, -1)[..., :math.prod(self.matrix)]
        if self.stacked is not None:
            return values.reshape(self.shape).astype(dtype)
        values = values.reshape(*lead, *self.matrix).astype(dtype)
        return values.swapaxes(-1, -2) if self.transposed else values

    def with_plain_scales(self) -> "FourBit":
        """The same without double quantisation, whose scales belong to all shards."""
        return replace(self, absmax=self._scales(), nested=None)

    def _scales(self) -> Array:
        """float32 [..., rows, columns / 64]."""
        if self.nested is None:
            return self.absmax
        steps, mean = self.nested
        shape = self.absmax.shape
        steps = jnp.repeat(steps, NESTED_BLOCK, axis=-1)[..., :shape[-2] * shape[-1]].reshape(shape)
        return jnp.asarray(DYNAMIC)[self.absmax] * steps + mean[..., None, None]


@jax.tree_util.register_dataclass
@dataclass
class EightBit(Quantized):
    """A matrix in int8 with a scale for each output (the weights of LLM.int8, Dettmers et al. 2022).

    Activations stay as they are: products are those of the matrix that `astype` makes.

    Args:
        codes: int8 [..., out, in].
        row_absmax: float32 [..., out].
        transposed: The layer keeps its matrix as [in, out] (Conv1D).
    """

    codes: Array
    row_absmax: Array
    transposed: bool = _static()
    kind = "int8"

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, rows, columns = self.codes.shape
        return (*lead, columns, rows) if self.transposed else (*lead, rows, columns)

    def astype(self, dtype: Any) -> Array:
        values = self.codes.astype(jnp.float32) * (self.row_absmax * np.float32(1 / 127))[..., None]
        return (values.swapaxes(-1, -2) if self.transposed else values).astype(dtype)


def outline(shape: tuple[int, ...], kind: Quantize, double: bool = True, transposed: bool = False,
            stacked: bool = False) -> Quantized:
    """Shapes and dtypes of the parts of a quantised matrix; `shape` and the rest are as of `quantize`.

    Args:
        stacked: The last three dimensions are of several matrices.
    """
    if stacked:
        *lead, num, rows, columns = shape
        return replace(outline((*lead, num * rows, columns), kind, double), stacked=rows)
    *lead, rows, columns = shape
    matrix = (columns, rows) if transposed else (rows, columns)

    def part(dtype: Any, *inner: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, *inner), dtype)

    if kind == "int8":
        return EightBit(part(jnp.int8, *matrix), part(jnp.float32, matrix[0]), transposed)
    lines, blocks = lines_of(matrix), -(-math.prod(matrix) // BLOCK)
    nested = (part(jnp.float32, -(-blocks // NESTED_BLOCK)), part(jnp.float32)) if double else None
    absmax = part(jnp.uint8 if double else jnp.float32, lines, blocks // lines)
    return FourBit(part(jnp.uint8, lines, blocks // lines * BLOCK // 2), absmax, nested, kind, matrix, transposed)


def lines_of(matrix: tuple[int, int]) -> int:
    """Rows in which a matrix's blocks are laid out."""
    return matrix[0] if matrix[1] % BLOCK == 0 else 1


def _dynamic_map() -> np.ndarray:
    """The 256 values of the signed dynamic 8-bit type (Dettmers 2016, arXiv 1511.04561), ascending."""
    values = [0.0, 1.0]
    for exponent in range(7):
        bounds = _linspace(2**exponent + 1)
        means = (bounds[:-1] + bounds[1:]) / np.float32(2) * np.float32(10.0 ** (exponent - 6))
        values += [*means, *-means]
    return np.sort(np.array(values, np.float32))


def _linspace(num: int) -> np.ndarray:
    """From 0.1 to 1 in float32, counted from the nearer end as torch does."""
    first, last, places = np.float32(0.1), np.float32(1), np.arange(num, dtype=np.float64)
    step = float((last - first) / np.float32(num - 1))
    return np.where(places < num // 2, first + step * places, last - step * (num - 1 - places)).astype(np.float32)


DYNAMIC = _dynamic_map()
