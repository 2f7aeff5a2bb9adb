"""bitsandbytes' 4-bit kernels on CPUs: what is wrong with them, and the private names to mend it by. Read in 0.50.2.

Each use is held by tests/compat/test_bitsandbytes.py.
"""

import warnings
from functools import cache
from math import prod

import torch
from torch import Tensor, nn


def mend_cpu_kernels(model: nn.Module) -> None:
    """Make 4-bit layers of `model` exact on CPUs.

    - After one forward pass in eval mode a weight is repacked, and gives wrong gradients to later training steps
      (issue 2078 of bitsandbytes-foundation/bitsandbytes is of the same family): repacking is switched off by
      Linear4bit's `support_avx512bf16_for_cpu`.
    - A matrix [out, in] where `in` is a multiple of 16 but not of 64 is dequantised wrongly from its second row on:
      its blocks do not begin with its rows. It is handed to the kernel as rows of one block each.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            dequantize_by_blocks()


@cache
def dequantize_by_blocks() -> torch.library.Library:
    """Put a kernel around bitsandbytes' own: the operator `bitsandbytes::dequantize_4bit` on CPUs."""
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


def matrix_of(layer: nn.Module) -> Tensor:
    """The weights [out, in] of a Linear4bit: its `weight.quant_state`, which a layer that FSDP has sharded finds again
    by `fix_4bit_weight_quant_state_from_module`, as its own forward does."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn.modules import fix_4bit_weight_quant_state_from_module

    fix_4bit_weight_quant_state_from_module(layer)
    return dequantize_4bit(layer.weight.data.view(-1, 1), layer.weight.quant_state)
