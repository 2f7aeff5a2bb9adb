"""Quantised weights: NF4 and FP4 (QLoRA, Dettmers et al. 2023) and int8 by rows, with the bits of bitsandbytes.

A frozen weight stays quantised on the devices. `astype` makes the matrix inside a step, for one product at a time.
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


# ---------------------------------------------------------------------------------------------------------------------
# Quantising weights on the host, with the bits of bitsandbytes: part by part, as devices ask for their shards.
#
# Blocks of 4-bit codes and rows of 8-bit ones do not depend on each other, so a process reads and quantises those that
# its devices keep. Double quantisation needs all scales of a matrix: each process finds an equal share of them, and
# gets
# the others'.

_GRID = 65535  # steps from -1 to 1 on which bitsandbytes' CPU code looks for the nearest value of the dynamic type
# What bitsandbytes saves beside a weight.
_STATE = "weight.quant_state.bitsandbytes__"
_PIECE = re.compile(r"^(.*)\.(weight\.(?:(?:nested_)?(?:absmax|quant_map)|quant_state\.\w+)|SCB|weight_format)$")
_CHUNK = 1 << 20  # elements quantised at a time, so that they stay in the cache


@dataclass(frozen=True)
class Sharers:
    """The processes that quantise the same matrices at the same time, each the parts that it keeps.

    Args:
        rank: Of this process, of `size`.
        gather: Of each one's numbers, by rank, all. A collective call.
    """

    rank: int = 0
    size: int = 1
    gather: Callable[[dict[int, np.ndarray]], dict[int, np.ndarray]] = lambda own: own


class Scales:
    """Scales that have been found, of one leaf at a time: its parts are asked for one after the other."""

    def __init__(self) -> None:
        self._owner: Hashable = None
        self._found: dict[Hashable, Any] = {}

    def of(self, owner: Hashable) -> dict[Hashable, Any]:
        """Those of a leaf; what is kept of another one is forgotten."""
        if owner != self._owner:
            self._owner, self._found = owner, {}
        return self._found


def quantize(weight: np.ndarray | LazyArray, kind: Quantize, double: bool = True, transposed: bool = False,
             sharers: Sharers = Sharers(), scales: Scales | None = None, place: tuple[Hashable, Hashable] = ("", None)
             ) -> Quantized:
    """A matrix in the codes that bitsandbytes gives it; its arrays are lazy.

    Args:
        weight: [out, in], or [in, out] where `transposed`; in 4 bits also several [E, ...], to bitsandbytes one
            one long row.
        double: Quantise the scales of 4-bit codes too.
        sharers: All of them must ask for the same arrays in the same order.
        scales: Shared by the matrices of a network.
        place: Leaf that the matrix belongs to, and which of it.
    """
    weight, scales = lazy_array.of(weight), Scales() if scales is None else scales
    if weight.ndim == 3:
        joined = quantize(weight.below_each_other(), kind, double, False, sharers, scales, place)
        return dataclasses.replace(joined, stacked=weight.shape[1])
    like = outline(weight.shape, kind, double, transposed)
    matrix = weight.transposed() if transposed else weight
    if isinstance(like, EightBit):
        rows = _Rows(matrix, sharers, scales, place)
        return EightBit(LazyArray(like.codes.shape, np.int8, rows.codes),
                        LazyArray(like.row_absmax.shape, np.float32, lambda part: rows.scales()[part]), transposed)
    blocks = _Blocks(matrix, kind, double, sharers, scales, place)
    steps = like.nested and (
        LazyArray(like.nested[0].shape, np.float32, lambda part: blocks.scales()[1][0][part]),
        LazyArray((), np.float32, lambda part: blocks.scales()[1][1]))
    return dataclasses.replace(
        like, packed=LazyArray(like.packed.shape, np.uint8, blocks.packed), nested=steps,
        absmax=LazyArray(like.absmax.shape, like.absmax.dtype,
                         lambda part: blocks.scales()[0].reshape(like.absmax.shape)[part]))


class _Lines:
    """A matrix [out, in] in lines of which each begins with a block, and the scale of each block.

    Args:
        num_lines: Rows, or one line of all of them.
        per_line: Blocks of a line.
    """

    def __init__(self, matrix: LazyArray, num_lines: int, per_line: int, sharers: Sharers, scales: Scales,
                 place: tuple[Hashable, Hashable]):
        self.matrix, self.num_lines, self.per_line = matrix, num_lines, per_line
        self._sharers, self._scales, self._place = sharers, scales, place

    def largest(self, lines: slice, blocks: slice) -> np.ndarray:
        """Absolute largest values of these blocks, in order."""
        raise NotImplementedError

    def _kept(self) -> dict[Hashable, Any]:
        return self._scales.of(self._place[0]).setdefault(self._place[1], {})

    def note(self, lines: slice, blocks: slice, found: np.ndarray) -> None:
        """Keep what quantising has found on the way, where nobody else has the rest."""
        if self._sharers.size == 1:
            whole = self._kept().setdefault("noted", np.full((self.num_lines, self.per_line), np.nan, np.float32))
            whole[lines, blocks] = found.reshape(lines.stop - lines.start, -1)

    def all_largest(self) -> np.ndarray:
        """Of all blocks, in order. A collective call."""
        noted = self._kept().pop("noted", None)
        if noted is not None and not np.isnan(noted).any():
            return noted.reshape(-1)
        rank, size = self._sharers.rank, self._sharers.size
        count = self.num_lines if self.num_lines > 1 else self.per_line
        share = slice(count * rank // size, count * (rank + 1) // size)
        lines, blocks = (share, slice(0, self.per_line)) if self.num_lines > 1 else (slice(0, 1), share)
        own = self.largest(lines, blocks) if share.start < share.stop else np.empty(0, np.float32)
        found = self._sharers.gather({rank: own})
        return np.concatenate([found[each] for each in range(size)])


class _Blocks(_Lines):
    """4-bit codes."""

    def __init__(self, matrix: LazyArray, kind: Quantize, double: bool, *shared: Any):
        num_lines = lines_of(matrix.shape)
        super().__init__(matrix, num_lines, -(-matrix.size // BLOCK) // num_lines, *shared)
        self._kind, self._double = kind, double

    def packed(self, part: Part) -> np.ndarray:
        """Bytes of these lines and of these bytes of a line."""
        lines, columns = part
        width = BLOCK // 2
        blocks = slice(columns.start // width, -(-columns.stop // width))
        codes, largest = _four_bit_codes(self._values(lines, blocks), self._kind)
        self.note(lines, blocks, largest)
        packed = (codes[::2] << 4 | codes[1::2]).reshape(lines.stop - lines.start, -1)
        packed = packed[:, columns.start - blocks.start * width:columns.stop - blocks.start * width]
        if self.num_lines == 1:  # behind the last value stand zeros
            packed[:, max(-(-self.matrix.size // 2) - columns.start, 0):] = 0
        return packed

    def scales(self) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray] | None]:
        """Of all blocks, or their codes; and what belongs to these."""
        kept = self._kept()
        if "scales" not in kept:
            largest = self.all_largest()
            kept["scales"] = _nest(largest) if self._double else (largest, None)
        return kept["scales"]

    def largest(self, lines: slice, blocks: slice) -> np.ndarray:
        flat = self._values(lines, blocks)
        return np.concatenate([_blocks_of(flat[start:start + _CHUNK])[1] for start in range(0, flat.size, _CHUNK)])

    def _values(self, lines: slice, blocks: slice) -> np.ndarray:
        """Flat, of whole blocks but for the end of the matrix."""
        first, last = blocks.start * BLOCK, min(blocks.stop * BLOCK, self.matrix.size)
        if self.num_lines > 1 or self.matrix.shape[0] == 1:
            return self.matrix[lines, slice(first, last)].reshape(-1)
        row = self.matrix.shape[1]
        begin = first // row
        return self.matrix[begin:-(-last // row), :].reshape(-1)[first - begin * row:last - begin * row]


class _Rows(_Lines):
    """8-bit codes, which have a scale for each row."""

    def __init__(self, matrix: LazyArray, *shared: Any):
        super().__init__(matrix, matrix.shape[0], 1, *shared)

    def codes(self, part: Part) -> np.ndarray:
        """Of these rows and columns."""
        rows, columns = part
        values = self._values(rows)
        absmax = np.abs(values).max(axis=1)
        self.note(rows, slice(0, 1), absmax)
        with np.errstate(divide="ignore", invalid="ignore"):
            codes = np.rint(values[:, columns] * (1 / absmax * np.float32(127))[:, None])
        return np.where(absmax[:, None] > 0, codes, 0).astype(np.int8)

    def scales(self) -> np.ndarray:
        """Of all rows."""
        kept = self._kept()
        if "scales" not in kept:
            kept["scales"] = self.all_largest()
        return kept["scales"]

    def largest(self, lines: slice, blocks: slice) -> np.ndarray:
        return np.abs(self._values(lines)).max(axis=1)

    def _values(self, rows: slice) -> np.ndarray:
        return self.matrix.over_first(rows).astype(np.float16).astype(np.float32)


def piece_of(key: str) -> tuple[str, str]:
    """Name of the weight that a tensor in a saved folder belongs to, and which piece of it the tensor is.

    What is not a companion of a quantised weight is the piece `weight` of itself.
    """
    found = _PIECE.match(key)
    return (f"{found[1]}.weight", found[2]) if found else (key, "weight")


def from_bitsandbytes(pieces: dict[str, np.ndarray | LazyArray], transposed: bool = False) -> Quantized:
    """A matrix as bitsandbytes saved it; its arrays are lazy.

    Args:
        pieces: By their names: `weight`, `weight.absmax`, ...; or `weight` and `SCB`.

    Raises:
        UserError: One is missing, or blocks are of another size than 64 (nested: 256).
    """
    states = [json.loads(bytes(np.asarray(piece))) for name, piece in pieces.items() if name.startswith(_STATE)]
    wanted = {"weight"} if "SCB" in pieces else {"weight", "weight.absmax"}
    nested = bool(states) and "nested_offset" in states[0]
    missing = sorted((wanted | ({"weight.nested_absmax"} if nested else set())) - set(pieces))
    if missing or not states and "SCB" not in pieces:
        raise UserError(f"A quantised weight is saved without {', '.join(missing) or _STATE + '...'}: the model folder "
                        "is incomplete. Fetch or save it again.")
    pieces = {name: lazy_array.of(piece) for name, piece in pieces.items()}
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
    steps = (pieces["weight.nested_absmax"], lazy_array.of(np.asarray(state["nested_offset"], np.float32))
             ) if nested else None
    packed = pieces["weight"]
    if packed.dtype != np.uint8:  # bytes in a wider type
        packed = lazy_array.of(np.asarray(packed).view(np.uint8))
    return FourBit(_in_lines(packed, (lines, absmax.size * BLOCK // 2 // lines)),
                   _in_lines(absmax, (lines, absmax.size // lines)), steps, state["quant_type"], matrix, transposed)


def _in_lines(flat: LazyArray, shape: tuple[int, int]) -> LazyArray:
    """What a file has one after the other, [n] or [n, 1], in lines; zeros behind the end."""
    def read(part: Part) -> np.ndarray:
        lines, columns = part
        if shape[0] == 1:
            found = flat.over_first(columns).reshape(-1)
            return np.pad(found, (0, columns.stop - columns.start - found.size))[None]
        found = flat.over_first(slice(lines.start * shape[1], lines.stop * shape[1]))
        return found.reshape(-1, shape[1])[:, columns]

    return LazyArray(shape, flat.dtype, read)


def _blocks_of(flat: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values in blocks, float32 [N, 64] with zeros behind the end; the largest of each, and what divides them."""
    rest = flat.size % BLOCK
    blocks = np.pad(flat.astype(np.float32), (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    largest = np.abs(blocks).max(axis=1)
    divisor = np.maximum(largest, np.float32(1e-38))
    if rest:
        largest[-1] = divisor[-1]
    return blocks, largest, divisor


def _four_bit_codes(flat: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes, one a byte and padded to whole blocks, and the absmax of each block."""
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
    """Scales as 8-bit codes around their mean (double quantisation), found on a grid as in bitsandbytes on CPUs."""
    mean = absmax.mean(dtype=np.float64).astype(np.float32)
    blocks = np.pad(absmax - mean, (0, -absmax.size % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    steps = np.abs(blocks).max(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(steps[:, None] > 0, blocks / steps[:, None], 0)
    scaled = np.rint((scaled + 1) * np.float32(_GRID / 2)) / np.float32(_GRID) * 2 - 1
    codes = np.searchsorted((DYNAMIC[:-1] + DYNAMIC[1:]) / 2, scaled).astype(np.uint8)
    return codes.reshape(-1)[:absmax.size], (steps, np.asarray(mean))
