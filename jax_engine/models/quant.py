"""Quantised weights: NF4 and FP4 (QLoRA, Dettmers et al. 2023) and row-wise int8, bit-identical to bitsandbytes.

A frozen weight stays quantised on the devices. `astype` dequantises it inside a step, for one product at a time.
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


def _static() -> Any:
    return field(metadata={"static": True})


class Quantized(ABC):
    """A quantised matrix; has the shape and size of the matrix, for code that counts parameters."""

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

    Blocks run along the rows of torch's [out, in], which is treated as one long row if `in` is not a multiple of 64.

    Args:
        packed: uint8 [..., rows, columns / 2], the first code of a pair in the high bits.
        absmax: float32 scales [..., rows, columns / 64], or with double quantisation their uint8 codes.
        nested: For double quantisation: scales of 256 codes each [..., ceil(blocks / 256)], and the mean [...].
        kind: nf4 or fp4.
        matrix: (out, in).
        transposed: The layer stores its matrix as [in, out] (Conv1D).
        stacked: Rows of each matrix, if this one is several concatenated by rows; None for a single matrix.
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
        # Only the arrays know the leading axes, such as stacked layers.
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
        if rows == 1:  # only then flatten: rows may be sharded, and a reshape that joins them would gather
            values = values.reshape(*lead, -1)[..., :math.prod(self.matrix)]
        if self.stacked is not None:
            return values.reshape(self.shape).astype(dtype)
        values = values.reshape(*lead, *self.matrix).astype(dtype)
        return values.swapaxes(-1, -2) if self.transposed else values

    def with_plain_scales(self) -> "FourBit":
        """Return the matrix without double quantisation, whose scales span shards."""
        return replace(self, absmax=self._scales(), nested=None)

    def _scales(self) -> Array:
        """Return the scales, float32 [..., rows, columns / 64]."""
        if self.nested is None:
            return self.absmax
        steps, mean = self.nested
        shape = self.absmax.shape
        # Blocks are counted through all rows of the matrix, so a group of 256 may span rows.
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
    """Return a quantised matrix of ShapeDtypeStructs; arguments as for `quantize`.

    Args:
        stacked: The last three dimensions of `shape` are those of several matrices.
    """
    # bitsandbytes takes several matrices [E, rows, columns] for one of E * rows rows.
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
    lines, blocks = lines_of(matrix), -(-math.prod(matrix) // BLOCK)
    nested = (part(jnp.float32, -(-blocks // NESTED_BLOCK)), part(jnp.float32)) if double else None
    absmax = part(jnp.uint8 if double else jnp.float32, lines, blocks // lines)
    return FourBit(part(jnp.uint8, lines, blocks // lines * BLOCK // 2), absmax, nested, kind, matrix, transposed)


def lines_of(matrix: tuple[int, int]) -> int:
    """Return the number of lines that a matrix's blocks are laid out in: its rows, or 1 if rows are not whole blocks.
    """
    return matrix[0] if matrix[1] % BLOCK == 0 else 1


def _dynamic_map() -> np.ndarray:
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
    first, last, places = np.float32(0.1), np.float32(1), np.arange(num, dtype=np.float64)
    step = float((last - first) / np.float32(num - 1))
    return np.where(places < num // 2, first + step * places, last - step * (num - 1 - places)).astype(np.float32)


DYNAMIC = _dynamic_map()


# ---------------------------------------------------------------------------------------------------------------------
# Quantising weights on the host, bit-identical to bitsandbytes and lazily: each device's shard when it is requested.
#
# Blocks of 4-bit codes and rows of 8-bit codes are independent, so a process reads and quantises only those that its
# devices hold. Scales that need all blocks of a matrix (double quantisation) are computed in equal shares by the
# processes, and gathered.

_GRID = 65535  # steps from -1 to 1 of the grid on which bitsandbytes' CPU code finds the nearest value of DYNAMIC
# Tensors that bitsandbytes saves along with a weight.
_STATE = "weight.quant_state.bitsandbytes__"
_PIECE = re.compile(r"^(.*)\.(weight\.(?:(?:nested_)?(?:absmax|quant_map)|quant_state\.\w+)|SCB|weight_format)$")
_CHUNK = 1 << 20  # elements quantised at a time, so that they stay in the cache


@dataclass(frozen=True)
class Sharers:
    """The processes that quantise the same matrices together, each its own parts.

    Args:
        rank: Rank of this process among `size`.
        gather: All-gather of arrays by rank. A collective call.
    """

    rank: int = 0
    size: int = 1
    gather: Callable[[dict[int, np.ndarray]], dict[int, np.ndarray]] = lambda own: own


class Scales:
    """Cache of computed scales for one leaf at a time, because the parts of a leaf are requested consecutively."""

    def __init__(self) -> None:
        self._owner: Hashable = None
        self._found: dict[Hashable, Any] = {}

    def of(self, owner: Hashable) -> dict[Hashable, Any]:
        """Return the cache of a leaf, after clearing that of another."""
        if owner != self._owner:
            self._owner, self._found = owner, {}
        return self._found


def quantize(weight: np.ndarray | LazyArray, kind: Quantize, double: bool = True, transposed: bool = False,
             sharers: Sharers = Sharers(), scales: Scales | None = None, place: tuple[Hashable, Hashable] = ("", None)
             ) -> Quantized:
    """Return a matrix quantised as by bitsandbytes, with lazy arrays.

    Args:
        weight: [out, in], or [in, out] if `transposed`; in 4 bits also several matrices [E, ...], which bitsandbytes
            treats as one long row.
        double: Quantise the scales of 4-bit codes, too.
        sharers: All of these processes must request the same arrays in the same order.
        scales: Shared by all matrices of a network.
        place: The leaf that the matrix belongs to, and its index in it.
    """
    weight, scales = lazy_array.lazy(weight), Scales() if scales is None else scales
    if weight.ndim == 3:
        # One long list of rows; `stacked` remembers how to cut it.
        joined = quantize(weight.below_each_other(), kind, double, False, sharers, scales, place)
        return dataclasses.replace(joined, stacked=weight.shape[1])
    like = outline(weight.shape, kind, double, transposed)
    matrix = weight.transposed() if transposed else weight
    if isinstance(like, EightBit):
        rows = _Rows(matrix, sharers, scales, place)
        return EightBit(LazyArray(like.codes.shape, np.int8, rows.codes),
                        LazyArray(like.row_absmax.shape, np.float32, lambda part: rows.scales()[part]), transposed)
    # All three arrays read the same `_Blocks`, whose scales are computed once.
    blocks = _Blocks(matrix, kind, double, sharers, scales, place)
    steps = like.nested and (
        LazyArray(like.nested[0].shape, np.float32, lambda part: blocks.scales()[1][0][part]),
        LazyArray((), np.float32, lambda part: blocks.scales()[1][1]))
    return dataclasses.replace(
        like, packed=LazyArray(like.packed.shape, np.uint8, blocks.packed), nested=steps,
        absmax=LazyArray(like.absmax.shape, like.absmax.dtype,
                         lambda part: blocks.scales()[0].reshape(like.absmax.shape)[part]))


class _Lines:
    """A matrix [out, in] as lines of whole blocks, and the scale of each block.

    Args:
        num_lines: Number of rows, or 1 for all rows in one line.
        per_line: Blocks per line.
    """

    def __init__(self, matrix: LazyArray, num_lines: int, per_line: int, sharers: Sharers, scales: Scales,
                 place: tuple[Hashable, Hashable]):
        self.matrix, self.num_lines, self.per_line = matrix, num_lines, per_line
        self._sharers, self._scales, self._place = sharers, scales, place

    def largest(self, lines: slice, blocks: slice) -> np.ndarray:
        """Return the largest absolute value of each of these blocks, in order."""
        raise NotImplementedError

    def _kept(self) -> dict[Hashable, Any]:
        return self._scales.of(self._place[0]).setdefault(self._place[1], {})

    def note(self, lines: slice, blocks: slice, found: np.ndarray) -> None:
        """Keep scales found while quantising, if there is only one process, which then finds all of them."""
        if self._sharers.size == 1:
            # NaN marks the blocks that no part has covered.
            whole = self._kept().setdefault("noted", np.full((self.num_lines, self.per_line), np.nan, np.float32))
            whole[lines, blocks] = found.reshape(lines.stop - lines.start, -1)

    def all_largest(self) -> np.ndarray:
        """Return `largest` of all blocks, in order. A collective call."""
        # Quantising all codes has found all scales on the way: the weights need not be read a second time.
        noted = self._kept().pop("noted", None)
        if noted is not None and not np.isnan(noted).any():
            return noted.reshape(-1)
        # Whole rows to each process, or blocks if the matrix is one line. Joined by rank, the shares are in order.
        rank, size = self._sharers.rank, self._sharers.size
        count = self.num_lines if self.num_lines > 1 else self.per_line
        share = slice(count * rank // size, count * (rank + 1) // size)
        lines, blocks = (share, slice(0, self.per_line)) if self.num_lines > 1 else (slice(0, 1), share)
        own = self.largest(lines, blocks) if share.start < share.stop else np.empty(0, np.float32)
        found = self._sharers.gather({rank: own})
        return np.concatenate([found[each] for each in range(size)])


class _Blocks(_Lines):
    """A matrix's 4-bit codes."""

    def __init__(self, matrix: LazyArray, kind: Quantize, double: bool, *shared: Any):
        num_lines = lines_of(matrix.shape)
        super().__init__(matrix, num_lines, -(-matrix.size // BLOCK) // num_lines, *shared)
        self._kind, self._double = kind, double

    def packed(self, part: Part) -> np.ndarray:
        """Return the packed codes of these lines and byte columns."""
        lines, columns = part
        width = BLOCK // 2
        # Quantise whole blocks, and cut the requested bytes out of them below.
        blocks = slice(columns.start // width, -(-columns.stop // width))
        codes, largest = _four_bit_codes(self._values(lines, blocks), self._kind)
        self.note(lines, blocks, largest)
        # The first code of a pair in the high bits.
        packed = (codes[::2] << 4 | codes[1::2]).reshape(lines.stop - lines.start, -1)
        packed = packed[:, columns.start - blocks.start * width:columns.stop - blocks.start * width]
        # A file of bitsandbytes ends there and is padded with 0 (see `_in_lines`), which is not NF4's code of zero.
        if self.num_lines == 1:  # zeros after the last value
            packed[:, max(-(-self.matrix.size // 2) - columns.start, 0):] = 0
        return packed

    def scales(self) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray] | None]:
        """Return the scales of all blocks and None, or with double quantisation their codes and (steps, mean)."""
        kept = self._kept()
        if "scales" not in kept:
            largest = self.all_largest()
            kept["scales"] = _nest(largest) if self._double else (largest, None)
        return kept["scales"]

    def largest(self, lines: slice, blocks: slice) -> np.ndarray:
        flat = self._values(lines, blocks)
        return np.concatenate([_blocks_of(flat[start:start + _CHUNK])[1] for start in range(0, flat.size, _CHUNK)])

    def _values(self, lines: slice, blocks: slice) -> np.ndarray:
        """Return the values of these blocks, flat; the last block of the matrix may be shorter."""
        first, last = blocks.start * BLOCK, min(blocks.stop * BLOCK, self.matrix.size)
        if self.num_lines > 1 or self.matrix.shape[0] == 1:
            return self.matrix[lines, slice(first, last)].reshape(-1)
        # Blocks of one long line may begin and end inside rows: read the rows that they touch.
        row = self.matrix.shape[1]
        begin = first // row
        return self.matrix[begin:-(-last // row), :].reshape(-1)[first - begin * row:last - begin * row]


class _Rows(_Lines):
    """A matrix's 8-bit codes, with one scale per row."""

    def __init__(self, matrix: LazyArray, *shared: Any):
        super().__init__(matrix, matrix.shape[0], 1, *shared)

    def codes(self, part: Part) -> np.ndarray:
        """Return the codes of these rows and columns."""
        rows, columns = part
        values = self._values(rows)
        absmax = np.abs(values).max(axis=1)
        self.note(rows, slice(0, 1), absmax)
        with np.errstate(divide="ignore", invalid="ignore"):
            # As torch computes 127 / absmax: the reciprocal times 127, which rounds differently from a quotient.
            codes = np.rint(values[:, columns] * (1 / absmax * np.float32(127))[:, None])
        # A row of zeros has no scale: codes of NaN become 0.
        return np.where(absmax[:, None] > 0, codes, 0).astype(np.int8)

    def scales(self) -> np.ndarray:
        """Return the scales of all rows."""
        kept = self._kept()
        if "scales" not in kept:
            kept["scales"] = self.all_largest()
        return kept["scales"]

    def largest(self, lines: slice, blocks: slice) -> np.ndarray:
        return np.abs(self._values(lines)).max(axis=1)

    def _values(self, rows: slice) -> np.ndarray:
        # bitsandbytes quantises to 8 bits from float16, whatever the dtype of the weight.
        return self.matrix.over_first(rows).astype(np.float16).astype(np.float32)


def piece_of(key: str) -> tuple[str, str]:
    """Return the weight that a saved tensor belongs to, and the name of the tensor among its pieces.

    A tensor that does not accompany a quantised weight is the piece `weight` of itself.
    """
    found = _PIECE.match(key)
    return (f"{found[1]}.weight", found[2]) if found else (key, "weight")


def from_bitsandbytes(pieces: dict[str, np.ndarray | LazyArray], transposed: bool = False) -> Quantized:
    """Return a matrix saved by bitsandbytes, with lazy arrays.

    Args:
        pieces: Tensors by name: `weight`, `weight.absmax`, ...; or `weight` and `SCB`.

    Raises:
        UserError: A piece is missing, or the block size is not 64 (nested: 256).
    """
    states = [json.loads(bytes(np.asarray(piece))) for name, piece in pieces.items() if name.startswith(_STATE)]
    wanted = {"weight"} if "SCB" in pieces else {"weight", "weight.absmax"}
    nested = bool(states) and "nested_offset" in states[0]
    missing = sorted((wanted | ({"weight.nested_absmax"} if nested else set())) - set(pieces))
    if missing or not states and "SCB" not in pieces:
        raise UserError(f"A quantised weight is saved without {', '.join(missing) or _STATE + '...'}: the model folder "
                        "is incomplete. Fetch or save it again.")
    pieces = {name: lazy_array.lazy(piece) for name, piece in pieces.items()}
    if not states:
        scales = pieces["SCB"]
        return EightBit(pieces["weight"], LazyArray((scales.size,), scales.dtype, lambda part: np.asarray(
            scales).reshape(-1)[part]), transposed)
    state = states[0]
    if (state["blocksize"], state.get("nested_blocksize", NESTED_BLOCK)) != (BLOCK, NESTED_BLOCK):
        raise UserError(f"model.pretrained: its weights are quantised in blocks of {state['blocksize']}. The JAX "
                        f"engine reads blocks of {BLOCK}: use engine: torch.")
    absmax, matrix = pieces["weight.absmax"], tuple(state["shape"])
    lines = lines_of(matrix)
    steps = (pieces["weight.nested_absmax"], lazy_array.lazy(np.asarray(state["nested_offset"], np.float32))
             ) if nested else None
    packed = pieces["weight"]
    if packed.dtype != np.uint8:  # bytes stored as a wider dtype
        packed = lazy_array.lazy(np.asarray(packed).view(np.uint8))
    return FourBit(_in_lines(packed, (lines, absmax.size * BLOCK // 2 // lines)),
                   _in_lines(absmax, (lines, absmax.size // lines)), steps, state["quant_type"], matrix, transposed)


def _in_lines(flat: LazyArray, shape: tuple[int, int]) -> LazyArray:
    """Reshape a file's flat array, [n] or [n, 1], to lines, lazily; zeros after its end."""
    def read(part: Part) -> np.ndarray:
        lines, columns = part
        if shape[0] == 1:
            # The file may end before the last whole block.
            found = flat.over_first(columns).reshape(-1)
            return np.pad(found, (0, columns.stop - columns.start - found.size))[None]
        found = flat.over_first(slice(lines.start * shape[1], lines.stop * shape[1]))
        return found.reshape(-1, shape[1])[:, columns]

    return LazyArray(shape, flat.dtype, read)


def _blocks_of(flat: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return float32 blocks [N, 64], zero-padded; the largest absolute value of each; and the divisor of each."""
    rest = flat.size % BLOCK
    blocks = np.pad(flat.astype(np.float32), (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    largest = np.abs(blocks).max(axis=1)
    divisor = np.maximum(largest, np.float32(1e-38))
    if rest:
        # bitsandbytes stores the clipped scale of the shorter last block.
        largest[-1] = divisor[-1]
    return blocks, largest, divisor


def _four_bit_codes(flat: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes, one per byte and padded to whole blocks, and the absmax of each block."""
    # The number of midpoints below a value is its rank among the sorted codes. A midpoint itself goes to the lower
    # code.
    order = np.argsort(CODEBOOKS[kind], kind="stable").astype(np.uint8)
    bounds = CODEBOOKS[kind][order]
    bounds = (bounds[:-1] + bounds[1:]) / 2
    num_blocks = -(-flat.size // BLOCK)
    codes, absmax = np.empty(num_blocks * BLOCK, np.uint8), np.empty(num_blocks, np.float32)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start:start + _CHUNK]
        blocks, largest, divisor = _blocks_of(part)
        scaled = blocks * (1 / divisor)[:, None]
        if part.size % BLOCK:  # bitsandbytes divides in the last, shorter block, and multiplies in the others
            scaled[-1] = blocks[-1] / divisor[-1]
        scaled = np.clip(scaled, -1, 1)
        ranks = np.zeros(scaled.shape, np.uint8)
        for bound in bounds:
            ranks += scaled > bound
        codes[start:start + ranks.size] = order[ranks].reshape(-1)
        absmax[start // BLOCK:start // BLOCK + len(largest)] = largest
    return codes, absmax


def _nest(absmax: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Return scales as 8-bit codes around their mean (double quantisation), on the grid of bitsandbytes' CPU code."""
    # Summed in float64: in float32 the mean would depend on the order of summation.
    mean = absmax.mean(dtype=np.float64).astype(np.float32)
    # Scales are positive and close to each other: around their mean they use both signs of the 8-bit type.
    blocks = np.pad(absmax - mean, (0, -absmax.size % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    steps = np.abs(blocks).max(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(steps[:, None] > 0, blocks / steps[:, None], 0)
    scaled = np.rint((scaled + 1) * np.float32(_GRID / 2)) / np.float32(_GRID) * 2 - 1
    # The nearest value of DYNAMIC, from the midpoints.
    codes = np.searchsorted((DYNAMIC[:-1] + DYNAMIC[1:]) / 2, scaled).astype(np.uint8)
    return codes.reshape(-1)[:absmax.size], (steps, np.asarray(mean))
