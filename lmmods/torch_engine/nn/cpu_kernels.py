"""CPU settings for speed and memory: float32 products by oneDNN, and a smaller cache of compiled products."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


def bound_onednn_cache() -> None:
    """Limit oneDNN's cache to 64 compiled products instead of 1,024, unless the environment sets the limit.

    Each takes megabytes, and batches of unequal length add new ones in every step: 1.2 GiB within 70 bfloat16 steps of
    a model of 27 million parameters. oneDNN reads the variable at its first product, so this must come before it.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Compute float32 matrix products on a CPU by oneDNN, provided that it does so in float32.

    With AVX-512 it takes 10 to 20 % less time than MKL on Intel processors, and half of it on AMD's, for which MKL has
    no AVX-512 kernels. torch uses it under the precision `medium`, which also permits bfloat16 internally; whether that
    happens depends on the processor, so it is checked. A precision that is already set stays.
    """
    before = torch.get_float32_matmul_precision()
    if device.type != "cpu" or before != "highest" or not stays_float32():
        yield
        return
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def thin_products() -> Iterator[None]:
    """Compute float32 products by MKL, also inside `fast_products`.

    It is several times as fast where rows attend from a single token each, as in generation. There the number of keys
    grows with every token, and oneDNN compiles a product of its own for each.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def uses_onednn() -> bool:
    """True inside `fast_products`."""
    return torch.get_float32_matmul_precision() == "medium"


@cache
def stays_float32() -> bool:
    """True if products under the precision `medium` are computed in float32 on this processor."""
    random = torch.Generator().manual_seed(0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    worst = 0.0
    # Several shapes, as the kernel is chosen by shape.
    for rows, inner, columns in ((256, 256, 1024), (1024, 512, 64), (64, 2048, 256)):
        a, b = torch.randn(rows, inner, generator=random), torch.randn(inner, columns, generator=random)
        exact = a.double() @ b.double()
        worst = max(worst, ((a @ b - exact).abs().max() / exact.abs().max()).item())
    torch.set_float32_matmul_precision(before)
    return worst < 1e-5  # bfloat16 would be off by 1e-3
