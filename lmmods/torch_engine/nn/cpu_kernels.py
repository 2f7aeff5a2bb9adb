"""What CPUs need: two silent faults of bitsandbytes' 4-bit kernels (0.50.2) worked around, faster kernels preferred."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import prod

import torch
from torch import Tensor, nn


def work_around_cpu_kernels(model: nn.Module) -> None:
    """Make 4-bit layers of `model` exact on CPUs.

    - After one forward pass in eval mode a weight is repacked, and gives wrong gradients to later training steps
      (issue 2078 of bitsandbytes-foundation/bitsandbytes is of the same family): repacking is switched off.
    - A matrix [out, in] where `in` is a multiple of 16 but not of 64 is dequantised wrongly from its second row on:
      its blocks do not begin with its rows. It is handed to the kernel as rows of one block each.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            _dequantize_by_blocks()


def bound_onednn_cache() -> None:
    """Let oneDNN keep 128 compiled products instead of 1,024, unless the environment says how many.

    Each takes megabytes, and batches of unequal length make new ones in every step: 1.2 GiB within 70 bfloat16 steps
    of a model of 27 million parameters. It reads the variable when it makes its first product.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")


@contextmanager
def onednn_products() -> Iterator[None]:
    """Let oneDNN make the float32 matrix products inside, if it makes them in float32.

    On AVX-512 it is 10 to 20 % faster than MKL. torch hands products to it under the precision `medium`, which also
    permits bfloat16 inside; whether that is used depends on the processor, so it is checked. Not for whole networks:
    torch's attention kernel is up to four times slower under `medium` (2.13).
    """
    before = torch.get_float32_matmul_precision()
    if before != "highest" or not stays_float32():
        yield
        return
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@cache
def stays_float32() -> bool:
    """Whether products under the precision `medium` are float32 on this processor."""
    random = torch.Generator().manual_seed(0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    worst = 0.0
    for rows, inner, columns in ((256, 256, 1024), (1024, 512, 64), (64, 2048, 256)):
        a, b = torch.randn(rows, inner, generator=random), torch.randn(inner, columns, generator=random)
        exact = a.double() @ b.double()
        worst = max(worst, ((a @ b - exact).abs().max() / exact.abs().max()).item())
    torch.set_float32_matmul_precision(before)
    return worst < 1e-5  # bfloat16 would be off by 1e-3


@cache
def _dequantize_by_blocks() -> torch.library.Library:
    import bitsandbytes  # noqa: F401  registers the kernel

    kernel = torch.library.get_kernel("bitsandbytes::dequantize_4bit", "CPU")

    def dequantize(keys: torch.DispatchKeySet, packed: Tensor, absmax: Tensor, blocksize: int, quant_type: str,
                   shape: list[int], dtype: torch.dtype) -> Tensor:
        packed, num_blocks = packed.view(torch.uint8).reshape(-1), absmax.numel()
        if packed.numel() < num_blocks * blocksize // 2:
            packed = nn.functional.pad(packed, (0, num_blocks * blocksize // 2 - packed.numel()))
        values = kernel.call_boxed(keys, packed, absmax, blocksize, quant_type, [num_blocks, blocksize], dtype)
        return values.reshape(-1)[:prod(shape)].reshape(shape)

    library = torch.library.Library("bitsandbytes", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # that another kernel was there before
        library.impl("dequantize_4bit", dequantize, "CPU", with_keyset=True, allow_override=True)
    return library  # an implementation lives as long as its library
