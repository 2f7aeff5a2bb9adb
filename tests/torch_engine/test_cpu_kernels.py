"""Products with quantised weights equal products with the dequantised matrix, in every pass."""

import copy

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from torch import nn

from lmmods.torch_engine.compat.bitsandbytes import matrix_of, multiply_by_matrices, patch_cpu_kernels
from tests.closeness import assert_as_close


def dequantize(packed: torch.Tensor, state: F.QuantState) -> torch.Tensor:
    """Return each code's value times the scale of its block of 64."""
    packed, size = packed.view(torch.uint8).reshape(-1).int(), state.shape[0] * state.shape[1]
    codes = torch.stack([packed >> 4, packed & 15], dim=1).reshape(-1)[:size]
    return (state.code[codes] * state.absmax.repeat_interleave(64)[:size]).reshape(state.shape)


# 96 and 48: rows that start inside a block, where the kernel of bitsandbytes 0.50.2 is wrong with AVX-512.
@pytest.mark.parametrize("shape", [(8, 128), (8, 96), (24, 48), (33, 20), (7, 13)])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_4bit_products_equal_those_of_the_dequantised_matrix(shape, quant_type):
    layer = bnb.nn.Linear4bit(shape[1], shape[0], quant_type=quant_type)
    patch_cpu_kernels(nn.ModuleList([layer]))
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for storage in (torch.uint8, torch.bfloat16) if shape != (7, 13) else (torch.uint8,):  # 46 bytes, 2 or 1 each
        packed, state = F.quantize_4bit(weight, quant_type=quant_type, quant_storage=storage)
        assert torch.equal(F.dequantize_4bit(packed, state), dequantize(packed, state))
    x = torch.randn(5, shape[1], requires_grad=True)
    packed, state = F.quantize_4bit(weight, quant_type=quant_type)
    y = bnb.matmul_4bit(x, packed, state)
    y.sum().backward()
    expected = dequantize(packed, state)
    product, exact = (nn.functional.linear(a, b) for a, b in ((x, expected), (x.double(), expected.double())))
    assert_as_close(y, product, exact)
    assert_as_close(x.grad, *(matrix.sum(0).expand_as(x) for matrix in (expected, expected.double())))
    with torch.no_grad():
        assert_as_close(bnb.matmul_4bit(x, packed, state), product, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_8bit_product_depends_on_its_row_alone(dtype):
    """Neither on the pass nor on other rows, two of which have features that bitsandbytes would treat as outliers."""
    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(96, 40, has_fp16_weights=False, threshold=6.0).to("cpu")
    multiply_by_matrices(layer)
    x = torch.randn(6, 5, 96)
    x[1, 2, 3], x[4, 0, 70] = 9.0, -7.5
    weight = layer.weight.data * layer.weight.SCB[:, None] / 127
    x, weight, bias = x.to(dtype), weight.to(dtype), layer.bias.detach().to(dtype)

    def multiply(x: torch.Tensor) -> list[torch.Tensor]:
        """Return the product and the gradient of its sum."""
        return [nn.functional.linear(x, weight.to(x.dtype), bias.to(x.dtype)),
                nn.functional.linear(torch.ones(*x.shape[:-1], 40, dtype=x.dtype), weight.to(x.dtype).t())]

    (expected, gradient), (exact, exact_gradient) = multiply(x), multiply(x.double())
    for module in (layer.train(), copy.deepcopy(layer).eval()):
        inputs = x.clone().requires_grad_()
        y = module(inputs)
        y.sum().backward()
        assert y.dtype == inputs.grad.dtype == dtype
        assert_as_close(y, expected, exact)
        assert_as_close(inputs.grad, gradient, exact_gradient)
        with torch.no_grad():
            assert torch.equal(module(x), y)
            for size in (1, 2, 3):
                assert_as_close(torch.cat([module(rows) for rows in x.split(size)]), expected, exact)
            assert_as_close(module(x[0, 0]), expected[0, 0], exact[0, 0])
    assert layer.bias.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert torch.equal(matrix_of(layer, torch.float32), layer.weight.data * (layer.weight.SCB * (1 / 127))[:, None])
