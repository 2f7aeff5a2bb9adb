"""Quantised weights: NF4 and FP4 (QLoRA, Dettmers et al. 2023) and row-wise int8, bit-identical to bitsandbytes.

A frozen weight stays quantised on the devices. Inside a step, `astype` dequantises it for one product at a time.
"""

import dataclasses
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmmods.core import lazy_array
from lmmods.core.errors import UserError
from lmmods.core.lazy_array import LazyArray, Part
from lmmods.recipe.tasks.base import Quantize

BLOCK, NESTED_BLOCK = 64, 256
# Values of the sixteen codes. NF4: appendix E of the QLoRA paper. FP4: sign, two bits of exponent and one of mantissa.
CODEBOOKS = {
    "nf4": np.array([
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32),
    "fp4": np.array([sign * value for sign in (1, -1) for value in
                     (0.0, 0.0052083334885537624, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)], np.float32),
}


def _static_field() -> Any:
    return field(metadata={"static": True})


class Quantized(ABC):
    """A quantised matrix. It has the shape and size of the matrix, for code that counts parameters."""

    kind: str
    shape: tuple[int, ...]  # shape of the matrix as the layer sees it, after leading axes such as stacked layers

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> str:
        """Name of the quantised format."""
        return self.kind

    @abstractmethod
    def astype(self, dtype: Any) -> Array:
        """Return the dequantised matrix."""


@jax.tree_util.register_dataclass
@dataclass
class FourBit(Quantized):
    """A matrix in 4-bit codes, with one scale per block of 64.

    Blocks run along the rows of torch's [out, in]. If `in` is not a multiple of 64, the matrix is one long row.

    Args:
        packed: uint8 [..., rows, columns / 2], the first code of a pair in the high bits.
        absmax: float32 scales [..., rows, columns / 64], or with double quantisation their uint8 codes.
        nested: With double quantisation, scales of 256 codes each [..., ceil(blocks / 256)], and the mean [...].
        kind: nf4 or fp4.
        matrix: (out, in).
        transposed: The layer stores its matrix as [in, out] (Conv1D).
        stacked: Rows per matrix, if several are concatenated by rows; None for a single matrix.
    """

    packed: Array
    absmax: Array
    nested: tuple[Array, Array] | None
    kind: str = _static_field()
    matrix: tuple[int, int] = _static_field()
    transposed: bool = _static_field()
    stacked: int | None = field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        # Only the arrays have the leading axes, such as stacked layers.
        *lead, rows, _ = self.packed.shape
        if self.stacked is None:
            return (*lead, *(self.matrix[::-1] if self.transposed else self.matrix))
        rows = self.matrix[0] if rows == 1 else rows  # a shard has fewer rows than `matrix`
        return (*lead, rows // self.stacked, self.stacked, self.matrix[1])

    def astype(self, dtype: Any) -> Array:
        lead, rows = self.packed.shape[:-2], self.packed.shape[-2]
        # [..., rows, C / 2] -> [..., rows, C / 2, 2] -> [..., rows, C / 64, 64], in float32 until the last cast.
        codes = jnp.stack([self.packed >> 4, self.packed & 15], axis=-1)
        values = jnp.asarray(CODEBOOKS[self.kind])[codes].reshape(*lead, rows, -1, BLOCK) * self._scales()[..., None]
        if rows == 1:  # flatten only then: rows may be sharded, and merging them would gather
            values = values.reshape(*lead, -1)[..., :math.prod(self.matrix)]
        if self.stacked is not None:
            return values.reshape(self.shape).astype(dtype)
        values = values.reshape(*lead, *self.matrix).astype(dtype)
        return values.swapaxes(-1, -2) if self.transposed else values

    def with_plain_scales(self) -> "FourBit":
        """Return the matrix without double quantisation, since its scales span shards."""
        return replace(self, absmax=self._scales(), nested=None)

    def _scales(self) -> Array:
        """Return the scales, float32 [..., rows, columns / 64]."""
        if self.nested is None:
            return self.absmax
        steps, mean = self.nested
        shape = self.absmax.shape
        # Blocks are counted over all rows of the matrix, so a group of 256 may span rows.
        steps = jnp.repeat(steps, NESTED_BLOCK, axis=-1)[..., :shape[-2] * shape[-1]].reshape(shape)
        return jnp.asarray(DYNAMIC)[self.absmax] * steps + mean[..., None, None]


@jax.tree_util.register_dataclass
@dataclass
class EightBit(Quantized):
    """A matrix in int8 with one scale per output (the weights of LLM.int8, Dettmers et al. 2022).

    Activations are not quantised: products use the dequantised matrix.

    Args:
        codes: int8 [..., out, in].
        row_absmax: float32 [..., out].
        transposed: The layer stores its matrix as [in, out] (Conv1D).
    """

    codes: Array
    row_absmax: Array
    transposed: bool = _static_field()
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
    """Return a quantised matrix of ShapeDtypeStructs; arguments as for `quantize`.

    Args:
        stacked: The last three dimensions of `shape` are [matrices, rows, columns].
    """
    # bitsandbytes treats several matrices [E, rows, columns] as one of E * rows rows.
    if stacked:
        *lead, num, rows, columns = shape
        return replace(outline((*lead, num * rows, columns), kind, double), stacked=rows)
    *lead, rows, columns = shape
    matrix = (columns, rows) if transposed else (rows, columns)

    def part(dtype: Any, *inner: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, *inner), dtype)

    if kind == "int8":
        return EightBit(part(jnp.int8, *matrix), part(jnp.float32, matrix[0]), transposed)
    # If rows are not whole blocks, `lines` is 1, and the last block is padded.
    lines, blocks = count_lines(matrix), -(-math.prod(matrix) // BLOCK)
    nested = (part(jnp.float32, -(-blocks // NESTED_BLOCK)), part(jnp.float32)) if double else None
    absmax = part(jnp.uint8 if double else jnp.float32, lines, blocks // lines)
    return FourBit(part(jnp.uint8, lines, blocks // lines * BLOCK // 2), absmax, nested, kind, matrix, transposed)


def count_lines(matrix: tuple[int, int]) -> int:
    """Return the number of lines of blocks in a matrix: its number of rows, or 1 if rows are not whole blocks."""
    return matrix[0] if matrix[1] % BLOCK == 0 else 1


def _build_dynamic_map() -> np.ndarray:
    """Return the 256 values of the signed dynamic 8-bit type (Dettmers 2016, arXiv 1511.04561), ascending."""
    # 127 magnitudes with both signs, 0 and 1: 256 values. Exponent e has 2^e of them, within 0.1 to 1 times 10^(e-6).
    values = [0.0, 1.0]
    for exponent in range(7):
        bounds = _linspace(2**exponent + 1)
        means = (bounds[:-1] + bounds[1:]) / np.float32(2) * np.float32(10.0 ** (exponent - 6))
        values += [*means, *-means]
    return np.sort(np.array(values, np.float32))


def _linspace(num: int) -> np.ndarray:
    """Return float32 steps from 0.1 to 1, each computed from the nearer end, as torch.linspace does."""
    first, last, indices = np.float32(0.1), np.float32(1), np.arange(num, dtype=np.float64)
    step = float((last - first) / np.float32(num - 1))
    return np.where(indices < num // 2, first + step * indices, last - step * (num - 1 - indices)).astype(np.float32)


DYNAMIC = _build_dynamic_map()


# ---------------------------------------------------------------------------------------------------------------------
# Quantising weights on the host, bit-identical to bitsandbytes and lazily: each device's shard when it is requested.
#
# Blocks of 4-bit codes and rows of 8-bit codes are independent, so a process reads and quantises only those of its
# devices. For scales that need all blocks of a matrix (double quantisation), each process computes an equal part, and
# the parts are gathered.

_GRID = 65535  # steps from -1 to 1 of the grid on which bitsandbytes' CPU code finds the nearest value of DYNAMIC
# Tensors that bitsandbytes saves along with a weight.
_STATE = "weight.quant_state.bitsandbytes__"
_SAVED_TENSOR = re.compile(r"^(.*)\.(weight\.(?:(?:nested_)?(?:absmax|quant_map)|quant_state\.\w+)|SCB|weight_format)$")
_CHUNK = 1 << 20  # elements quantised at a time, so that they stay in the cache


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that quantise the same matrices together, each a part of them.

    Args:
        rank: Rank of this process.
        size: Number of processes.
        gather: Function that gathers arrays by rank on every process. A collective call.
    """

    rank: int = 0
    size: int = 1
    gather: Callable[[dict[int, np.ndarray]], dict[int, np.ndarray]] = lambda arrays: arrays


class Scales:
    """Cache of computed scales for one leaf at a time: the parts of a leaf are requested consecutively."""

    def __init__(self) -> None:
        self._owner: Hashable = None
        self._values_by_key: dict[Hashable, Any] = {}

    def for_leaf(self, owner: Hashable) -> dict[Hashable, Any]:
        """Return the cache of a leaf; clear another leaf's."""
        if owner != self._owner:
            self._owner, self._values_by_key = owner, {}
        return self._values_by_key


def quantize(weight: np.ndarray | LazyArray, kind: Quantize, double: bool = True, transposed: bool = False,
             processes: ProcessGroup = ProcessGroup(), scales: Scales | None = None,
             key: tuple[Hashable, Hashable] = ("", None)) -> Quantized:
    """Return a matrix quantised as by bitsandbytes, with lazy arrays.

    Args:
        weight: [out, in], or [in, out] if `transposed`; in 4 bits also several matrices [E, ...], which bitsandbytes
            treats as one long row.
        double: Also quantise the scales of 4-bit codes.
        processes: Processes that quantise together. All must request the same arrays in the same order.
        scales: Cache for all matrices of a network.
        key: The matrix's leaf, and its index in the leaf.
    """
    weight, scales = lazy_array.lazy(weight), Scales() if scales is None else scales
    if weight.ndim == 3:
        # Concatenate the rows; `stacked` is the size to split them again.
        flat = quantize(weight.concatenate_rows(), kind, double, False, processes, scales, key)
        return dataclasses.replace(flat, stacked=weight.shape[1])
    abstract = outline(weight.shape, kind, double, transposed)
    matrix = weight.transposed() if transposed else weight
    if isinstance(abstract, EightBit):
        rows = _Rows(matrix, processes, scales, key)
        return EightBit(LazyArray(abstract.codes.shape, np.int8, rows.codes),
                        LazyArray(abstract.row_absmax.shape, np.float32, lambda part: rows.scales()[part]), transposed)
    # All three arrays read the same `_Blocks`, which computes its scales once.
    blocks = _Blocks(matrix, kind, double, processes, scales, key)
    steps = abstract.nested and (
        LazyArray(abstract.nested[0].shape, np.float32, lambda part: blocks.scales()[1][0][part]),
        LazyArray((), np.float32, lambda part: blocks.scales()[1][1]))
    return dataclasses.replace(
        abstract, packed=LazyArray(abstract.packed.shape, np.uint8, blocks.packed), nested=steps,
        absmax=LazyArray(abstract.absmax.shape, abstract.absmax.dtype,
                         lambda part: blocks.scales()[0].reshape(abstract.absmax.shape)[part]))


class _Lines(ABC):
    """A matrix [out, in] as lines of whole blocks, and the scale of each block.

    Args:
        num_lines: Number of rows, or 1 for all rows in one line.
        per_line: Blocks per line.
    """

    def __init__(self, matrix: LazyArray, num_lines: int, per_line: int, processes: ProcessGroup, scales: Scales,
                 key: tuple[Hashable, Hashable]):
        self.matrix, self.num_lines, self.per_line = matrix, num_lines, per_line
        self._processes, self._scales, self._key = processes, scales, key

    @abstractmethod
    def compute_absmax(self, lines: slice, blocks: slice) -> np.ndarray:
        """Return the largest absolute value of each block, in order."""

    def _cache(self) -> dict[Hashable, Any]:
        return self._scales.for_leaf(self._key[0]).setdefault(self._key[1], {})

    def record(self, lines: slice, blocks: slice, absmax: np.ndarray) -> None:
        """Store scales computed while quantising, if a single process computes all of them."""
        if self._processes.size == 1:
            # NaN marks the blocks that no part has covered.
            shape = (self.num_lines, self.per_line)
            recorded = self._cache().setdefault("recorded", np.full(shape, np.nan, np.float32))
            recorded[lines, blocks] = absmax.reshape(lines.stop - lines.start, -1)

    def compute_all_absmax(self) -> np.ndarray:
        """Return `compute_absmax` of all blocks, in order. A collective call."""
        # Quantising all codes has already computed all scales, so the weights need not be read again.
        recorded = self._cache().pop("recorded", None)
        if recorded is not None and not np.isnan(recorded).any():
            return recorded.reshape(-1)
        # Each process gets whole rows, or blocks if the matrix is one line. By rank, the parts are in order.
        rank, size = self._processes.rank, self._processes.size
        count = self.num_lines if self.num_lines > 1 else self.per_line
        own_part = slice(count * rank // size, count * (rank + 1) // size)
        lines, blocks = (own_part, slice(0, self.per_line)) if self.num_lines > 1 else (slice(0, 1), own_part)
        absmax = self.compute_absmax(lines, blocks) if own_part.start < own_part.stop else np.empty(0, np.float32)
        by_rank = self._processes.gather({rank: absmax})
        return np.concatenate([by_rank[index] for index in range(size)])


class _Blocks(_Lines):
    """A matrix's 4-bit codes."""

    def __init__(self, matrix: LazyArray, kind: Quantize, double: bool, *shared: Any):
        num_lines = count_lines(matrix.shape)
        super().__init__(matrix, num_lines, -(-matrix.size // BLOCK) // num_lines, *shared)
        self._kind, self._double = kind, double

    def packed(self, part: Part) -> np.ndarray:
        """Return the packed codes of these lines and byte columns."""
        lines, columns = part
        width = BLOCK // 2
        # Quantise whole blocks; below, select the requested bytes.
        blocks = slice(columns.start // width, -(-columns.stop // width))
        codes, absmax = _encode_4_bit(self._values(lines, blocks), self._kind)
        self.record(lines, blocks, absmax)
        # The first code of a pair in the high bits.
        packed = (codes[::2] << 4 | codes[1::2]).reshape(lines.stop - lines.start, -1)
        packed = packed[:, columns.start - blocks.start * width:columns.stop - blocks.start * width]
        # A bitsandbytes file ends after the last value and is padded with 0 (see `_to_lines`), which is not NF4's code
        # of zero.
        if self.num_lines == 1:
            packed[:, max(-(-self.matrix.size // 2) - columns.start, 0):] = 0
        return packed

    def scales(self) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray] | None]:
        """Return the scales of all blocks and None, or with double quantisation their codes and (steps, mean)."""
        cache = self._cache()
        if "scales" not in cache:
            absmax = self.compute_all_absmax()
            cache["scales"] = _quantise_scales(absmax) if self._double else (absmax, None)
        return cache["scales"]

    def compute_absmax(self, lines: slice, blocks: slice) -> np.ndarray:
        flat = self._values(lines, blocks)
        return np.concatenate([_to_blocks(flat[start:start + _CHUNK])[1] for start in range(0, flat.size, _CHUNK)])

    def _values(self, lines: slice, blocks: slice) -> np.ndarray:
        """Return the values of these blocks, flat; the last block of the matrix may be shorter."""
        first, last = blocks.start * BLOCK, min(blocks.stop * BLOCK, self.matrix.size)
        if self.num_lines > 1 or self.matrix.shape[0] == 1:
            return self.matrix[lines, slice(first, last)].reshape(-1)
        # Blocks of one long line may start and end inside rows, so read all rows that they overlap.
        row_size = self.matrix.shape[1]
        top = first // row_size
        return self.matrix[top:-(-last // row_size), :].reshape(-1)[first - top * row_size:last - top * row_size]


class _Rows(_Lines):
    """A matrix's 8-bit codes, with one scale per row."""

    def __init__(self, matrix: LazyArray, *shared: Any):
        super().__init__(matrix, matrix.shape[0], 1, *shared)

    def codes(self, part: Part) -> np.ndarray:
        """Return the codes of these rows and columns."""
        rows, columns = part
        values = self._values(rows)
        absmax = np.abs(values).max(axis=1)
        self.record(rows, slice(0, 1), absmax)
        with np.errstate(divide="ignore", invalid="ignore"):
            # As torch computes 127 / absmax: the reciprocal times 127, which rounds differently from a quotient.
            codes = np.rint(values[:, columns] * (1 / absmax * np.float32(127))[:, None])
        # A row of zeros has no scale: codes of NaN become 0.
        return np.where(absmax[:, None] > 0, codes, 0).astype(np.int8)

    def scales(self) -> np.ndarray:
        """Return the scales of all rows."""
        cache = self._cache()
        if "scales" not in cache:
            cache["scales"] = self.compute_all_absmax()
        return cache["scales"]

    def compute_absmax(self, lines: slice, blocks: slice) -> np.ndarray:
        return np.abs(self._values(lines)).max(axis=1)

    def _values(self, rows: slice) -> np.ndarray:
        # bitsandbytes quantises to 8 bits from float16, whatever the dtype of the weight.
        return self.matrix.read_rows(rows).astype(np.float16).astype(np.float32)


def split_key(key: str) -> tuple[str, str]:
    """Split a saved tensor's key into the name of its weight, and the tensor's name among those of the weight.

    Any tensor that is not part of a quantised weight is `weight` itself.
    """
    match = _SAVED_TENSOR.match(key)
    return (f"{match[1]}.weight", match[2]) if match else (key, "weight")


def from_bitsandbytes(tensors: dict[str, np.ndarray | LazyArray], transposed: bool = False) -> Quantized:
    """Return a matrix saved by bitsandbytes, with lazy arrays.

    Args:
        tensors: By name: `weight`, `weight.absmax`, ...; or `weight` and `SCB`.

    Raises:
        UserError: A tensor is missing, or the block size is not 64 (nested: 256).
    """
    states = [json.loads(bytes(np.asarray(tensor))) for name, tensor in tensors.items() if name.startswith(_STATE)]
    required = {"weight"} if "SCB" in tensors else {"weight", "weight.absmax"}
    nested = bool(states) and "nested_offset" in states[0]
    missing = sorted((required | ({"weight.nested_absmax"} if nested else set())) - set(tensors))
    if missing or not states and "SCB" not in tensors:
        raise UserError(f"A quantised weight is saved without {', '.join(missing) or _STATE + '...'}, so the model "
                        "folder is incomplete. Download or save it again.")
    tensors = {name: lazy_array.lazy(tensor) for name, tensor in tensors.items()}
    if not states:
        scales = tensors["SCB"]
        return EightBit(tensors["weight"], LazyArray((scales.size,), scales.dtype, lambda part: np.asarray(
            scales).reshape(-1)[part]), transposed)
    state = states[0]
    if (state["blocksize"], state.get("nested_blocksize", NESTED_BLOCK)) != (BLOCK, NESTED_BLOCK):
        raise UserError(f"model.pretrained: its weights are quantised in blocks of {state['blocksize']}, but the JAX "
                        f"engine supports only blocks of {BLOCK}. Use engine: torch.")
    absmax, matrix = tensors["weight.absmax"], tuple(state["shape"])
    lines = count_lines(matrix)
    steps = (tensors["weight.nested_absmax"], lazy_array.lazy(np.asarray(state["nested_offset"], np.float32))
             ) if nested else None
    packed = tensors["weight"]
    if packed.dtype != np.uint8:  # bytes stored as a wider dtype
        packed = lazy_array.lazy(np.asarray(packed).view(np.uint8))
    return FourBit(_to_lines(packed, (lines, absmax.size * BLOCK // 2 // lines)),
                   _to_lines(absmax, (lines, absmax.size // lines)), steps, state["quant_type"], matrix, transposed)


def _to_lines(flat: LazyArray, shape: tuple[int, int]) -> LazyArray:
    """Reshape a file's flat array, [n] or [n, 1], to lines, lazily, with zeros after its end."""
    def read(part: Part) -> np.ndarray:
        lines, columns = part
        if shape[0] == 1:
            # The file may end before the last whole block.
            values = flat.read_rows(columns).reshape(-1)
            return np.pad(values, (0, columns.stop - columns.start - values.size))[None]
        values = flat.read_rows(slice(lines.start * shape[1], lines.stop * shape[1]))
        return values.reshape(-1, shape[1])[:, columns]

    return LazyArray(shape, flat.dtype, read)


def _to_blocks(flat: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return float32 blocks [N, 64], zero-padded; the largest absolute value of each; and the divisor of each."""
    remainder = flat.size % BLOCK
    blocks = np.pad(flat.astype(np.float32), (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    absmax = np.abs(blocks).max(axis=1)
    divisor = np.maximum(absmax, np.float32(1e-38))
    if remainder:
        # bitsandbytes stores the clipped scale of the shorter last block.
        absmax[-1] = divisor[-1]
    return blocks, absmax, divisor


def _encode_4_bit(flat: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes, one per byte and padded to whole blocks, and the absmax of each block."""
    # The number of midpoints below a value is its rank among the sorted codes. A midpoint itself gets the lower code.
    order = np.argsort(CODEBOOKS[kind], kind="stable").astype(np.uint8)
    bounds = CODEBOOKS[kind][order]
    bounds = (bounds[:-1] + bounds[1:]) / 2
    num_blocks = -(-flat.size // BLOCK)
    codes, absmax = np.empty(num_blocks * BLOCK, np.uint8), np.empty(num_blocks, np.float32)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start:start + _CHUNK]
        blocks, block_absmax, divisor = _to_blocks(part)
        scaled = blocks * (1 / divisor)[:, None]
        if part.size % BLOCK:  # bitsandbytes divides in the last, shorter block, and multiplies in the others
            scaled[-1] = blocks[-1] / divisor[-1]
        scaled = np.clip(scaled, -1, 1)
        ranks = np.zeros(scaled.shape, np.uint8)
        for bound in bounds:
            ranks += scaled > bound
        codes[start:start + ranks.size] = order[ranks].reshape(-1)
        absmax[start // BLOCK:start // BLOCK + len(block_absmax)] = block_absmax
    return codes, absmax


def _quantise_scales(absmax: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Return scales as 8-bit codes around their mean (double quantisation), on the grid of bitsandbytes' CPU code."""
    # Sum in float64: in float32 the mean would depend on the order of summation.
    mean = absmax.mean(dtype=np.float64).astype(np.float32)
    # Scales are positive and similar; around their mean they use both signs of the 8-bit type.
    blocks = np.pad(absmax - mean, (0, -absmax.size % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    steps = np.abs(blocks).max(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(steps[:, None] > 0, blocks / steps[:, None], 0)
    scaled = np.rint((scaled + 1) * np.float32(_GRID / 2)) / np.float32(_GRID) * 2 - 1
    # The nearest value of DYNAMIC, from the midpoints.
    codes = np.searchsorted((DYNAMIC[:-1] + DYNAMIC[1:]) / 2, scaled).astype(np.uint8)
    return codes.reshape(-1)[:absmax.size], (steps, np.asarray(mean))
