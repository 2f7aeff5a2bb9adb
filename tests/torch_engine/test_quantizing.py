"""4-bit codes and scales equal bitsandbytes, to the bit."""

import pytest
import torch

from lmmods.torch_engine.nn import quantizing
from lmmods.torch_engine.nn.quantizing import CHUNK, quantize_4bit

bitsandbytes = pytest.importorskip("bitsandbytes")


@pytest.fixture
def reference():
    """bitsandbytes' default implementation, registered for devices without their own kernel."""
    return torch.library.get_kernel("bitsandbytes::quantize_4bit", "Undefined")


def compare_codes(reference, weight, blocksize=64, quant_type="nf4", storage=torch.uint8):
    keys = torch.DispatchKeySet(torch.DispatchKey.CPU)
    for result, expected in zip(quantize_4bit(weight, blocksize, quant_type, storage),
                                reference.call_boxed(keys, weight, blocksize, quant_type, storage), strict=True):
        assert result.dtype == expected.dtype and result.shape == expected.shape
        assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 64, 65, 96, 199, CHUNK, CHUNK + 1, CHUNK + 64, 2 * CHUNK - 1, 5 * CHUNK + 130])
def test_codes_and_scales_equal_bitsandbytes(reference, quant_type, dtype, size):
    weight = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    before = weight.clone()
    compare_codes(reference, weight, quant_type=quant_type)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_values_on_bounds_zeros_and_nan_equal_bitsandbytes(reference, quant_type):
    codebook = bitsandbytes.functional.get_4bit_type(quant_type, "cpu").sort().values
    bounds = (codebook[1:] + codebook[:-1]) / 2
    block = torch.cat([codebook, bounds, torch.nextafter(bounds, torch.ones(15)), torch.ones(18)])
    compare_codes(reference, torch.cat([block, torch.zeros(64), block * 3, torch.full((64,), 1e-39)]),
                  quant_type=quant_type)
    compare_codes(reference, torch.cat([block, torch.tensor([float("nan"), float("inf")] * 32), block]),
                  quant_type=quant_type)


@pytest.mark.parametrize("blocksize", [32, 128, 4096])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_other_block_sizes_and_storage_equal_bitsandbytes(reference, blocksize, storage):
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0))
    compare_codes(reference, weight, blocksize, storage=storage)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_the_default_dtype_does_not_change_codes(quant_type):
    """Lightning sets the default dtype while the network is built."""
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = quantize_4bit(weight, 64, quant_type, torch.uint8)
    quantizing._bounds.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        results = quantize_4bit(weight, 64, quant_type, torch.uint8)
    finally:
        torch.set_default_dtype(torch.float32)
    for result, reference in zip(results, expected, strict=True):
        assert result.dtype == reference.dtype and torch.equal(result, reference)
