"""Corrections of bitsandbytes' inexact products with quantised weights, by private names, as of 0.50.2.

Each use is tested by tests/compat/test_bitsandbytes.py.
"""

import copy
import warnings
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula


def patch_cpu_kernels(model: nn.Module) -> None:
    """Make 4-bit layers of `model` exact on CPUs.

    - A forward pass in eval mode repacks the weight, which makes gradients of later training steps wrong (issue 2078 of
      bitsandbytes-foundation/bitsandbytes is related): Linear4bit's `support_avx512bf16_for_cpu` disables repacking.
    - A matrix [out, in] where `in` is a multiple of 16 but not of 64 is dequantised wrongly from its second row on, as
      its blocks are not aligned with its rows. It is passed to the kernel as rows of one block each.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            dequantize_by_blocks()


@cache
def dequantize_by_blocks() -> torch.library.Library:
    """Wrap bitsandbytes' CPU kernel of the operator `bitsandbytes::dequantize_4bit`."""
    import bitsandbytes  # noqa: F401  registers the kernel

    kernel = torch.library.get_kernel("bitsandbytes::dequantize_4bit", "CPU")

    def dequantize(keys: torch.DispatchKeySet, packed: Tensor, absmax: Tensor, blocksize: int, quant_type: str,
                   shape: list[int], dtype: torch.dtype) -> Tensor:
        # As [blocks, blocksize] every row is one block, which the kernel handles. The last block is padded.
        packed, num_blocks = packed.view(torch.uint8).reshape(-1), absmax.numel()
        if packed.numel() < num_blocks * blocksize // 2:
            packed = nn.functional.pad(packed, (0, num_blocks * blocksize // 2 - packed.numel()))
        values = kernel.call_boxed(keys, packed, absmax, blocksize, quant_type, [num_blocks, blocksize], dtype)
        return values.reshape(-1)[:prod(shape)].reshape(shape)  # without the padding

    library = torch.library.Library("bitsandbytes", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # of overriding a kernel
        library.impl("dequantize_4bit", dequantize, "CPU", with_keyset=True, allow_override=True)
    return library  # the implementation is removed with its library, so the cache keeps it


def multiply_by_matrices(model: nn.Module) -> None:
    """Make the 8-bit layers of `model` multiply by their dequantised matrix, in every mode and on every device.

    bitsandbytes does so only in training on CPUs. In eval mode, and always on GPUs, it also rounds each row of features
    to 8 bits, except columns in which any row of the batch exceeds a threshold (LLM.int8): a row's result would depend
    on the mode (by 1 % of the largest) and on the batch's other rows.
    """
    for layer in model.modules():
        if is_8bit(layer):
            # accelerate, used for spread models, has wrapped a layer's forward and calls `_old_forward`
            setattr(layer, "_old_forward" if hasattr(layer, "_hf_hook") else "forward", partial(_multiply, layer))


def is_8bit(layer: nn.Module) -> bool:
    """True if a layer is bitsandbytes' Linear8bitLt; by name, so that the library is not imported needlessly."""
    return type(layer).__name__ == "Linear8bitLt" and type(layer).__module__.startswith("bitsandbytes.")


def _multiply(layer: nn.Module, x: Tensor) -> Tensor:
    """Map features [..., in] to [..., out] in the compute dtype."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    bias = None if layer.bias is None else layer.bias.to(dtype)
    return _EightBitProduct.apply(x.to(dtype), layer.weight.data, _row_absmax(layer), bias)


class _EightBitProduct(torch.autograd.Function):
    """x W^T + b in the dtype of x; dequantises again in the backward pass, so that no matrix is saved."""

    @staticmethod
    def forward(ctx, x: Tensor, codes: Tensor, row_absmax: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, row_absmax)
        return F.linear(x, _eight_bit_matrix(codes, row_absmax, x.dtype), bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        # x is not needed, as the matrix does not train.
        grad_x = grad @ _eight_bit_matrix(*ctx.saved_tensors, grad.dtype) if ctx.needs_input_grad[0] else None
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        return grad_x, None, None, grad_bias


def _eight_bit_matrix(codes: Tensor, row_absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise int8 codes [out, in] by the absmax of rows, float32 [out]."""
    return codes.to(dtype).mul_((row_absmax * (1 / 127)).unsqueeze(1))


def _row_absmax(layer: nn.Module) -> Tensor:
    """Return the row absmax [out] of a Linear8bitLt: `SCB` of its weight, or of its state once its own forward ran."""
    scales = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB
    return scales.to(layer.weight.device)


def matrix_of(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return the dequantised weight [out, in] of a quantised layer.

    For a Linear4bit the layer's `quant_state` is used if the weight has none, as under FSDP.
    """
    from bitsandbytes.functional import dequantize_4bit

    if is_8bit(layer):
        return _eight_bit_matrix(layer.weight.data, _row_absmax(layer), dtype)
    state = getattr(layer.weight, "quant_state", None) or layer.quant_state
    return dequantize_4bit(layer.weight.data.view(-1, 1), state).to(dtype)


def packed_outline(layer: nn.Module, weight: Tensor, quantization: Any) -> nn.Module:
    """Return a Linear4bit for a linear layer whose weight [out, in] has no values.

    Args:
        quantization: transformers' BitsAndBytesConfig.
    """
    packed = copy.deepcopy(outline_template())
    packed.compute_dtype, packed.compute_type_is_set = quantization.bnb_4bit_compute_dtype, True
    packed.out_features, packed.in_features = weight.shape
    packed.weight, packed.quant_state = packed_weight(weight, quantization)
    packed.bias = layer.bias
    packed.support_avx512bf16_for_cpu = False  # as in patch_cpu_kernels: no repacking on the planned device
    return packed


@cache
def outline_template() -> nn.Module:
    """Return a Linear4bit without weight, for `packed_outline`; the first call must precede `without_values`.

    `Params4bit`, which its constructor makes, needs values, and so does the table of scales that bitsandbytes caches at
    its first use (`name2qmap`). Also registers the FLOPs of the 4-bit product that is used without gradient, in torch's
    table.
    """
    import bitsandbytes as bnb

    @register_flop_formula(torch.ops.bitsandbytes.gemm_4bit)
    def product(x: torch.Size, _codes: torch.Size, shape: list[int], *_: Any, **__: Any) -> int:
        return 2 * prod(x) * shape[0]

    bnb.functional.quantize_blockwise(torch.zeros(256))  # fills the cache of scales
    template = bnb.nn.Linear4bit(1, 1, bias=False)
    del template.weight
    return template


def packed_weight(weight: Tensor, quantization: Any) -> tuple[nn.Parameter, Any]:
    """Return the codes of a weight without values, and their state.

    `Params4bit` does not support such tensors, so a plain parameter gets its attributes. `outline_template` must have
    been called.
    """
    import bitsandbytes as bnb

    codes, state = bnb.functional.quantize_4bit(
        weight.detach(), compress_statistics=quantization.bnb_4bit_use_double_quant,
        quant_type=quantization.bnb_4bit_quant_type, quant_storage=quantization.bnb_4bit_quant_storage)
    packed = nn.Parameter(codes, requires_grad=False)
    packed.quant_state, packed.quant_type = state, state.quant_type
    packed.compress_statistics, packed.bnb_quantized = state.nested, True
    return packed, state
