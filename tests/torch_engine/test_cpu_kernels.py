"""4-bit weights on a CPU are the values that their codes stand for."""

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from torch import nn

from lmmods.torch_engine.compat.bitsandbytes import mend_cpu_kernels


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
