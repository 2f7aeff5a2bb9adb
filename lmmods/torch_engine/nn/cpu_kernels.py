"""CPU settings for speed and memory: float32 matrix products by oneDNN, and a smaller cache of compiled products."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


def bound_onednn_cache() -> None:
    """Limit oneDNN's cache to 64 compiled products instead of 1,024, unless the environment sets the limit.

    Each takes megabytes, and batches of different lengths compile new ones in every step: 1.2 GiB within 70 bfloat16
    steps of a model of 27 million parameters. oneDNN reads the variable at its first product; call this earlier.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Compute float32 matrix products on a CPU by oneDNN, provided that it does so in float32.

    With AVX-512 it takes 10 to 20 % less time than MKL on Intel processors, and half the time on AMD processors, for
    which MKL has no AVX-512 kernels. torch uses it under the precision `medium`, which also permits bfloat16. Whether
    the processor uses bfloat16 is checked. An explicitly set precision does not change.
    """
    precision = torch.get_float32_matmul_precision()
    if device.type != "cpu" or precision != "highest" or not stays_float32():
        yield
        return
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@contextmanager
def thin_products() -> Iterator[None]:
    """Compute float32 products by MKL, also inside `fast_products`.

    MKL is several times as fast if each row has a single query, as in generation. There the number of keys grows with
    every token, and oneDNN compiles a separate product for each number.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def uses_onednn() -> bool:
    """True inside `fast_products`."""
    return torch.get_float32_matmul_precision() == "medium"


@cache
def stays_float32() -> bool:
    """True if products under the precision `medium` are computed in float32 on this processor."""
    generator = torch.Generator().manual_seed(0)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    max_error = 0.0
    # Several shapes, as the shape determines the kernel.
    for rows, inner, columns in ((256, 256, 1024), (1024, 512, 64), (64, 2048, 256)):
        a, b = torch.randn(rows, inner, generator=generator), torch.randn(inner, columns, generator=generator)
        exact = a.double() @ b.double()
        max_error = max(max_error, ((a @ b - exact).abs().max() / exact.abs().max()).item())
    torch.set_float32_matmul_precision(precision)
    return max_error < 1e-5  # with bfloat16 it is about 1e-3
