"""Quantise weights to 4 bits on CPUs, in a third of bitsandbytes' time and to the same bits."""

from functools import cache

import torch
from torch import Tensor

# Number of values per chunk: they fit the cache for all comparisons, and are enough for several threads. A multiple of
# every block size of bitsandbytes.
CHUNK = 2**18


@cache
def quantize_in_chunks() -> torch.library.Library:
    """Register `quantize_4bit` as the CPU kernel of the operator `bitsandbytes::quantize_4bit`."""
    import bitsandbytes  # noqa: F401  defines the operator

    library = torch.library.Library("bitsandbytes", "IMPL")
    library.impl("quantize_4bit", quantize_4bit, "CPU")
    return library  # the implementation is removed with its library, so the cache keeps it


def quantize_4bit(weight: Tensor, blocksize: int, quant_type: str, quant_storage: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes, two a byte [n, 1] in the dtype of storage, and the absmax of each block, float32.

    bitsandbytes searches the sorted codebook for each value. Comparing all values with each of its 15 bounds is
    faster, as comparisons are vectorised.
    """
    order, bounds = _bounds(quant_type)
    flat = weight.reshape(-1)
    codes = torch.zeros(flat.numel() + flat.numel() % 2, dtype=torch.uint8)
    absmax = torch.empty(-(-flat.numel() // blocksize), dtype=torch.float32)
    for start in range(0, len(codes), CHUNK):
        values = flat[start : start + CHUNK].float()
        num_blocks = len(values) // blocksize
        blocks, rest = values[: num_blocks * blocksize].view(-1, blocksize), values[num_blocks * blocksize :]
        largest = absmax[start // blocksize : start // blocksize + num_blocks]
        torch.amax(blocks.abs(), -1, out=largest)
        scaled = (blocks * (1 / largest.clamp(min=1e-38)).unsqueeze(1)).view(-1)
        if len(rest):  # bitsandbytes divides in the last, shorter block, and clips its scale
            absmax[-1] = rest.abs().max().clamp(min=1e-38)
            scaled = torch.cat([scaled, rest / absmax[-1]])
        if start + len(scaled) < len(codes) <= start + CHUNK:  # the second half of the last byte
            scaled = torch.nn.functional.pad(scaled, (0, 1))
        _count_above(scaled, bounds, codes[start : start + len(scaled)])
    if quant_type != "nf4":  # other codebooks are not sorted
        codes = order.to(torch.uint8)[codes.int()]
    packed = (codes[::2] << 4 | codes[1::2]).view(quant_storage)
    return packed.unsqueeze(1), absmax


@cache
def _bounds(quant_type: str) -> tuple[Tensor, list[float]]:
    """Return the codes by ascending value, and the midpoints between neighbouring values."""
    from bitsandbytes.functional import get_4bit_type

    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # the codebook is made in this dtype, but Lightning sets the network's
    try:
        codebook = get_4bit_type(quant_type, "cpu")
    finally:
        torch.set_default_dtype(default_dtype)
    order = torch.argsort(codebook)
    return order, ((codebook[order[:-1]] + codebook[order[1:]]) / 2).tolist()


def _count_above(values: Tensor, bounds: list[float], counts: Tensor) -> None:
    """Write the number of bounds below each value, exclusive; for NaN, the number of all bounds."""
    below = torch.empty(len(values), dtype=torch.bool)
    counts.fill_(len(bounds))
    for bound in bounds:
        torch.le(values, bound, out=below)
        counts -= below.view(torch.uint8)
