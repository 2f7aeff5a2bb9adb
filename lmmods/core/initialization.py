"""Initial values of parameters that are not in any file: the same on both engines.

Each parameter has its own Philox generator (Salmon et al. 2011), whose key is derived from the run's seed and the
parameter's name in the Hugging Face folder (for an adapter: in PEFT's folder). Its values are generated in row-major
order, in blocks with separate counters. They do not depend on the engine, the device, the number of threads or
processes, or the order in which parameters are created.
"""

import hashlib
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

BLOCK = 1 << 16  # values per counter; changing it changes the values
PART = 1 << 22  # values generated at once if a process keeps only some columns of a parameter


@dataclass(frozen=True)
class Normal:
    """A normal distribution, float32.

    Args:
        cut: Values further from the mean than this many standard deviations are sampled again.
    """

    std: float
    mean: float = 0.0
    cut: float | None = None

    def fill(self, generator: np.random.Generator, out: np.ndarray) -> None:
        values = standard_normal(generator, out.size)
        # Sampling again continues the block's own generator, so other blocks are not affected.
        while self.cut is not None and (outside := np.flatnonzero(np.abs(values) > np.float32(self.cut))).size:
            values[outside] = standard_normal(generator, outside.size)
        np.multiply(values, np.float32(self.std), out=out)
        if self.mean:
            out += np.float32(self.mean)


@dataclass(frozen=True)
class Uniform:
    """A uniform distribution from `low` to `high`, float32."""

    low: float
    high: float

    def fill(self, generator: np.random.Generator, out: np.ndarray) -> None:
        generator.random(dtype=np.float32, out=out)
        out *= np.float32(self.high - self.low)
        out += np.float32(self.low)


@dataclass(frozen=True)
class LogUniform:
    """Logarithm of a uniform distribution from `low` to `high`, float32."""

    low: float
    high: float

    def fill(self, generator: np.random.Generator, out: np.ndarray) -> None:
        Uniform(self.low, self.high).fill(generator, out)
        # In float64, as libraries round float32 logarithms differently.
        out[...] = np.log(out.astype(np.float64))


Distribution = Normal | Uniform | LogUniform


def stream_key(seed: int, name: str) -> int:
    """Return the key of a parameter's generator, 128 bits."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest())


def lora_a(num_inputs: int) -> Uniform:
    """Return the distribution of PEFT's initial A: `torch.nn.init.kaiming_uniform_` with a = sqrt(5), as in torch."""
    # Equals 1 / sqrt(num_inputs), but in torch's order of operations, so that it rounds the same.
    gain = math.sqrt(2 / (1 + math.sqrt(5) ** 2))
    bound = math.sqrt(3) * (gain / math.sqrt(num_inputs))
    return Uniform(-bound, bound)


def draw(seed: int, name: str, distribution: Distribution, shape: tuple[int, ...]) -> np.ndarray:
    """Return the initial values of a parameter, float32 of this shape."""
    values = np.empty(shape, np.float32)
    fill(seed, name, distribution, values)
    return values


def fill(seed: int, name: str, distribution: Distribution, out: np.ndarray) -> None:
    """Like `draw`, but write to an existing array, float32 and contiguous."""
    if not out.flags.c_contiguous:
        raise ValueError(f"the array for {name} is not contiguous")
    _fill_blocks(seed, name, distribution, 0, out.reshape(-1))


def init_part(seed: int, name: str, distribution: Distribution, shape: tuple[int, ...],
              part: tuple[slice, ...]) -> np.ndarray:
    """Return `draw(...)[part]`, but generate only the blocks that contain the part's rows.

    Args:
        part: A slice for each dimension, without steps.
    """
    ranges = [range(length)[bounds] for bounds, length in zip(part, shape, strict=True)]
    values = np.empty([len(span) for span in ranges], np.float32)
    if not values.size:
        return values
    # Values of a row are consecutive, values of a column are not: generate whole rows, a bounded number at a time, and
    # slice them.
    rows, row_size = ranges[0], math.prod(shape[1:])
    rows_at_once = max(1, PART // row_size)
    for first in range(rows.start, rows.stop, rows_at_once):
        last = min(first + rows_at_once, rows.stop)
        chunk = init_range(seed, name, distribution, math.prod(shape), first * row_size, last * row_size)
        values[first - rows.start:last - rows.start] = chunk.reshape(last - first, *shape[1:])[:, *part[1:]]
    return values


def init_range(seed: int, name: str, distribution: Distribution, size: int, start: int, stop: int) -> np.ndarray:
    """Return values `start` to `stop` of a parameter of `size` values, in row-major order: float32 [stop - start]."""
    # Extend to whole blocks: a block can only be generated from its start.
    first = start // BLOCK * BLOCK
    last = min(math.ceil(stop / BLOCK) * BLOCK, size)  # the values of a block depend on its length
    values = np.empty(last - first, np.float32)
    _fill_blocks(seed, name, distribution, first, values)
    return values[start - first:stop - first]


def _fill_blocks(seed: int, name: str, distribution: Distribution, first: int, flat: np.ndarray) -> None:
    """Fill `flat` with the values from index `first` on, which must be the start of a block."""
    key = stream_key(seed, name)

    def fill_block(start: int) -> None:
        # The block index is in the upper bits of the 256-bit counter, so each block has 2^64 steps before the next.
        generator = np.random.Generator(np.random.Philox(key=key, counter=(first + start) // BLOCK << 64))
        distribution.fill(generator, flat[start:start + BLOCK])

    starts = range(0, flat.size, BLOCK)
    if len(starts) == 1:
        fill_block(0)
    else:
        with ThreadPoolExecutor(os.cpu_count()) as threads:  # numpy's generators release the GIL
            list(threads.map(fill_block, starts))


def mean_row(table: np.ndarray) -> np.ndarray:
    """Return the initial row [1, ...] of tokens new to a model, float32: the mean of the table's rows."""
    # float64, as a sum over a whole vocabulary loses digits in float32.
    return table.mean(0, keepdims=True, dtype=np.float64).astype(np.float32)


def row_norms(matrix: np.ndarray, conv1d: bool) -> np.ndarray:
    """Return the Euclidean norm of each output's weights, float32 [out]: the initial magnitude of DoRA.

    Args:
        matrix: [out, in]; with `conv1d`, [in, out].
    """
    return np.sqrt(np.einsum("io,io->o" if conv1d else "oi,oi->o", matrix, matrix, dtype=np.float64)).astype(np.float32)


# ---------------------------------------------------------------------------------------------------------------------
# Standard normal numbers in float32 by the ziggurat method (Marsaglia and Tsang 2000), vectorised.
#
# Almost twice as fast as numpy's own, which generates one number after the other. All but one in seventy need a single
# comparison.

TAIL, AREA = 3.6541528853610088, 0.00492867323399  # start of the tail, and area of each of 256 layers
BITS = 23  # bits of the position within a layer; eight more select the layer, one is the sign


def _compute_edges() -> np.ndarray:
    """Return the right edges of the layers, the widest first, then 0: [257]."""
    edges = [AREA / math.exp(-TAIL**2 / 2), TAIL]  # the first: a box as large as the base layer with its tail
    while len(edges) < 256:
        # A layer is a box from 0 to its right edge; its area and the height of its bottom give the height of its top.
        height = AREA / edges[-1] + math.exp(-edges[-1]**2 / 2)
        edges.append(math.sqrt(-2 * math.log(height)))
    return np.array([*edges, 0.0])


EDGES = _compute_edges()
HEIGHTS = np.exp(-EDGES**2 / 2)  # of the unnormalised density at each edge: [257]
STEP = (EDGES[:-1] / 2**BITS).astype(np.float32)  # distance of two positions in each layer: [256]
INSIDE = (EDGES[1:] / EDGES[:-1] * 2**BITS).astype(np.int32)  # positions under the next layer, hence under the curve


def standard_normal(generator: np.random.Generator, size: int) -> np.ndarray:
    """Return independent numbers, float32 [size]."""
    # 32 bits per number: 0 to 7 select the layer, 8 is the sign, 9 to 31 the position.
    bits = generator.bit_generator.random_raw((size + 1) // 2).view(np.uint32)[:size]
    layers = (bits & np.uint32(255)).astype(np.intp)
    positions = (bits >> np.uint32(9)).view(np.int32)
    values = positions.astype(np.float32)
    values *= np.take(STEP, layers, mode="clip")
    # Rare: a position that is not under the next layer must be compared with the curve itself.
    outside = np.flatnonzero(positions >= np.take(INSIDE, layers, mode="clip"))
    if outside.size:
        values[outside] = _resample_outside(generator, layers[outside], values[outside])
    # Values are not negative so far: set the sign bit of each float in place, bit 8 -> bit 31.
    sign = values.view(np.uint32)
    sign |= (bits & np.uint32(256)) << np.uint32(23)
    return values


def _resample_outside(generator: np.random.Generator, layers: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the absolute values [N] for positions that may be above the curve."""
    # Sample a height within the layer: at or above the curve, the point is rejected.
    low, high = HEIGHTS[layers], HEIGHTS[layers + 1]
    above = low + generator.random(len(layers)) * (high - low) >= np.exp(-values.astype(np.float64)**2 / 2)
    # The base layer has no curve to compare with: its positions beyond TAIL stand for the tail.
    above &= layers > 0
    values[above] = np.abs(generator.standard_normal(np.count_nonzero(above)))  # rejected: sampled again
    values[layers == 0] = _sample_tail(generator, int(np.count_nonzero(layers == 0)))
    return values


def _sample_tail(generator: np.random.Generator, size: int) -> np.ndarray:
    """Sample numbers beyond `TAIL` (Marsaglia 1964)."""
    accepted = np.empty(0)
    while len(accepted) < size:
        x, y = generator.standard_exponential((2, size))
        x /= TAIL
        # Sample pairs until enough are accepted; the last round may yield more than needed.
        accepted = np.concatenate([accepted, TAIL + x[2 * y > x * x]])
    return accepted[:size]
