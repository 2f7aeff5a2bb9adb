"""The masks of `core.dropout` in torch, and tensors under them.

torch's own draws are serial on CPUs. Here a few passes of 32-bit products, shifts and exclusive-ors, in pieces that
stay in the cache, decide about two features at a time: a sixth of the time on one core. int32 products wrap as
uint32's do; a shift to the right is made a logical one.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lmmods.core.dropout import FINAL_1, FINAL_2, feature_seeds, keep_scale, least_kept
from lmmods.torch_engine.compat.torch import has_values

# Words at a time on CPUs: with their temporaries they fit a core's cache, and torch gives them to one thread. Threads
# that meet after each of so many short passes cost more than they gain, all the more where others use the machine.
CHUNK = 2**15


def feature_mask(seeds: Tensor, site: int, num: int, rate: float) -> Tensor:
    """`core.dropout.feature_mask`: [N, num] of the seeds [N] of tokens."""
    if not has_values(seeds):  # in a plan, where each piece would take as long as a large one
        return torch.empty(len(seeds), num, dtype=torch.bool, device=seeds.device)
    words, half = _folded(finalise(seeds ^ _signed(site))), -(-num // 2)
    kept = torch.empty(len(seeds), 2, half, dtype=torch.bool, device=seeds.device)
    _decide(words.view(1, -1, 1), _features(half, seeds.device).view(1, 1, -1), kept[None, :, 0], kept[None, :, 1],
            least_kept(rate))
    return kept.view(len(seeds), 2 * half)[:, :num]


def attention_mask(seeds: Tensor, site: int, num_heads: int, rate: float) -> Tensor:
    """`core.dropout.attention_mask`: [B, num_heads, T, T] of the seeds [B, T] of tokens."""
    (batch, length), half = seeds.shape, -(-num_heads // 2)
    if not has_values(seeds):
        return torch.empty(batch, num_heads, length, length, dtype=torch.bool, device=seeds.device)
    queries = _folded(finalise(seeds ^ _signed(site)))
    pairs = torch.from_numpy(feature_seeds(half).view(np.int32)).to(seeds.device)
    kept = torch.empty(batch, 2 * half, length, length, dtype=torch.bool, device=seeds.device)
    for pair in range(half):
        keys = _folded(finalise(seeds ^ pairs[pair]))
        _decide(queries[:, :, None], keys[:, None], kept[:, pair], kept[:, half + pair], least_kept(rate))
    return kept[:, :num_heads]


def finalise(h: Tensor) -> Tensor:
    """MurmurHash3's finaliser of int32."""
    h = _folded(h) * _signed(FINAL_1)
    h = (h ^ ((h >> 13) & 0x7FFFF)) * _signed(FINAL_2)
    return _folded(h)


def _folded(h: Tensor) -> Tensor:
    """The finaliser's first step, and its last. Of an exclusive-or it is that of its sides."""
    return h ^ ((h >> 16) & 0xFFFF)


def _signed(number: int) -> int:
    return number - 2**32 if number >= 2**31 else number


@lru_cache(16)
def _features(num: int, device: torch.device) -> Tensor:
    return _folded(torch.from_numpy(feature_seeds(num).view(np.int32))).to(device)


def _decide(queries: Tensor, keys: Tensor, upper: Tensor, lower: Tensor, least: int) -> None:
    """Finalise the exclusive-or of folded words, and compare the upper halves of the result, and the lower ones.

    Args:
        queries: [B, T, 1].
        keys: [B or 1, 1, S].
        upper: [B, T, S] bool, written to; `lower` the same.
    """
    batch, length, width = upper.shape
    rows = min(max(CHUNK // width, 1), length) if queries.device.type == "cpu" else length
    together = max(CHUNK // (length * width), 1) if queries.device.type == "cpu" else batch
    bits = torch.empty(min(together, batch), rows, width, dtype=torch.int32, device=queries.device)
    other = torch.empty_like(bits)
    for first in range(0, batch, together):
        some = slice(first, first + together)
        of_keys = keys if len(keys) == 1 else keys[some]
        for start in range(0, length, rows):
            part = queries[some, start : start + rows]
            x, y = bits[: part.shape[0], : part.shape[1]], other[: part.shape[0], : part.shape[1]]
            torch.bitwise_xor(part, of_keys, out=x)
            x.mul_(_signed(FINAL_1))
            torch.bitwise_right_shift(x, 13, out=y)
            x.bitwise_xor_(y.bitwise_and_(0x7FFFF)).mul_(_signed(FINAL_2))
            torch.bitwise_left_shift(x, 16, out=y)  # of x folded: the last step changes lower halves alone
            y.bitwise_xor_(x)
            torch.ge(x, least, out=upper[some, start : start + rows])
            torch.ge(y, least, out=lower[some, start : start + rows])


class Dropped(torch.autograd.Function):
    """x where it is kept, times the scale, else 0. The backward pass needs the mask alone."""

    @staticmethod
    def forward(ctx, x: Tensor, kept: Tensor, rate: float) -> Tensor:  # noqa: D102
        ctx.save_for_backward(kept)
        ctx.scale = keep_scale(rate)
        return (x * ctx.scale).mul_(kept)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: D102
        return (gradient * ctx.scale).mul_(*ctx.saved_tensors), None, None
