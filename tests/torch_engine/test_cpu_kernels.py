"""Products with quantised weights are those of the matrix that their codes stand for, in every pass."""

import copy

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from torch import nn

from lmmods.torch_engine.compat.bitsandbytes import matrix_of, mend_cpu_kernels, multiply_by_matrices


def by_hand(packed: torch.Tensor, state: F.QuantState) -> torch.Tensor:
    """Each code's value times the scale of its block of 64."""
    packed, size = packed.view(torch.uint8).reshape(-1).int(), state.shape[0] * state.shape[1]
    codes = torch.stack([packed >> 4, packed & 15], dim=1).reshape(-1)[:size]
    return (state.code[codes] * state.absmax.repeat_interleave(64)[:size]).reshape(state.shape)


# 96 and 48: rows that begin inside a block, which the kernel of bitsandbytes 0.50.2 gets wrong with AVX-512.
@pytest.mark.parametrize("shape", [(8, 128), (8, 96), (24, 48), (33, 20), (7, 13)])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_dequantised_weights(shape, kind):
    layer = bnb.nn.Linear4bit(shape[1], shape[0], quant_type=kind)
    mend_cpu_kernels(nn.ModuleList([layer]))
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for storage in (torch.uint8, torch.bfloat16) if shape != (7, 13) else (torch.uint8,):  # 46 bytes, 2 or 1 each
        packed, state = F.quantize_4bit(weight, quant_type=kind, quant_storage=storage)
        assert torch.equal(F.dequantize_4bit(packed, state), by_hand(packed, state))
    x = torch.randn(5, shape[1], requires_grad=True)
    packed, state = F.quantize_4bit(weight, quant_type=kind)
    y = bnb.matmul_4bit(x, packed, state)
    y.sum().backward()
    expected = by_hand(packed, state)
    assert torch.allclose(y, x @ expected.T, atol=1e-5)
    assert torch.allclose(x.grad, expected.sum(0).expand_as(x), atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(bnb.matmul_4bit(x, packed, state), x @ expected.T, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_8bit_product_knows_nothing_but_its_row(dtype):
    """Neither the pass nor the rows beside it, of which two have features that bitsandbytes would treat as outliers."""
    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(96, 40, has_fp16_weights=False, threshold=6.0).to("cpu")
    multiply_by_matrices(layer)
    x = torch.randn(6, 5, 96)
    x[1, 2, 3], x[4, 0, 70] = 9.0, -7.5
    x, weight, bias = x.to(dtype), layer.weight.data * layer.weight.SCB[:, None] / 127, layer.bias.detach()
    wanted = (x.double() @ weight.to(dtype).double().t() + bias.to(dtype).double())

    def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
        assert found.dtype == dtype
        roundings = 96**0.5 if dtype == torch.float32 else 2  # of a sum of 96 terms; 16 bits round the result alone
        torch.testing.assert_close(found.double(), wanted, rtol=0,
                                   atol=torch.finfo(dtype).eps * roundings * float(wanted.abs().max()))

    for module in (layer.train(), copy.deepcopy(layer).eval()):
        given = x.clone().requires_grad_()
        y = module(given)
        y.sum().backward()
        near(y.detach(), wanted)
        near(given.grad, weight.to(dtype).double().sum(0).expand(x.shape))
        with torch.no_grad():
            assert torch.equal(module(x), y)
            for size in (1, 2, 3):
                near(torch.cat([module(rows) for rows in x.split(size)]), wanted)
            near(module(x[0, 0]), wanted[0, 0])
    assert layer.bias.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert torch.equal(matrix_of(layer, torch.float32), layer.weight.data * (layer.weight.SCB * (1 / 127))[:, None])
