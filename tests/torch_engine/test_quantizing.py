"""4-bit codes and scales are those of bitsandbytes, to the bit."""

import pytest
import torch

from lmmods.torch_engine.nn import quantizing
from lmmods.torch_engine.nn.quantizing import CHUNK, quantize_4bit

bitsandbytes = pytest.importorskip("bitsandbytes")


@pytest.fixture
def own():
    """bitsandbytes' own code, which it registers for all devices without a kernel of theirs."""
    return torch.library.get_kernel("bitsandbytes::quantize_4bit", "Undefined")


def same(own, weight, blocksize=64, quant_type="nf4", storage=torch.uint8):
    keys = torch.DispatchKeySet(torch.DispatchKey.CPU)
    for ours, theirs in zip(quantize_4bit(weight, blocksize, quant_type, storage),
                            own.call_boxed(keys, weight, blocksize, quant_type, storage), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 64, 65, 96, 199, CHUNK, CHUNK + 1, CHUNK + 64, 2 * CHUNK - 1, 5 * CHUNK + 130])
def test_codes_and_scales(own, quant_type, dtype, size):
    weight = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    before = weight.clone()
    same(own, weight, quant_type=quant_type)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_values_on_the_bounds_zeros_and_what_is_no_number(own, quant_type):
    codebook = bitsandbytes.functional.get_4bit_type(quant_type, "cpu").sort().values
    bounds = (codebook[1:] + codebook[:-1]) / 2
    block = torch.cat([codebook, bounds, torch.nextafter(bounds, torch.ones(15)), torch.ones(18)])
    same(own, torch.cat([block, torch.zeros(64), block * 3, torch.full((64,), 1e-39)]), quant_type=quant_type)
    same(own, torch.cat([block, torch.tensor([float("nan"), float("inf")] * 32), block]), quant_type=quant_type)


@pytest.mark.parametrize("blocksize", [32, 128, 4096])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_other_blocks_and_storage(own, blocksize, storage):
    same(own, torch.randn(96, 256, generator=torch.Generator().manual_seed(0)), blocksize, storage=storage)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_the_default_dtype_changes_nothing(quant_type):
    """Lightning sets that of the network while it is built."""
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = quantize_4bit(weight, 64, quant_type, torch.uint8)
    quantizing._bounds.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = quantize_4bit(weight, 64, quant_type, torch.uint8)
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
