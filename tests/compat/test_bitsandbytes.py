"""Private API of bitsandbytes that lmmods/torch_engine/compat/bitsandbytes.py uses. For the numbers, see
tests/torch_engine/test_cpu_kernels.py."""

from types import SimpleNamespace

import bitsandbytes as bnb
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lmmods.torch_engine.compat import bitsandbytes as compat
from lmmods.torch_engine.compat.torch import without_values
from lmmods.torch_engine.nn.summary import num_elements
from tests.compat.contract import fix


def make_4bit_layer(columns=64):
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(columns, 8, bias=False, quant_type="nf4")
    weight = layer.weight.data.clone()
    return layer.to("cpu"), weight


def make_8bit_layer(columns=64):
    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(columns, 8, bias=False, has_fp16_weights=False, threshold=6.0)
    return layer.to("cpu")


def test_repacking_can_be_switched_off():
    layer, _ = make_4bit_layer()
    assert hasattr(layer, "support_avx512bf16_for_cpu"), fix("bitsandbytes", compat.patch_cpu_kernels)
    compat.patch_cpu_kernels(layer)
    assert layer.support_avx512bf16_for_cpu is False


def test_the_dequantisation_operator_takes_these_arguments():
    schema = torch.ops.bitsandbytes.dequantize_4bit.default._schema
    names = ["A", "absmax", "blocksize", "quant_type", "shape", "dtype"]
    assert [argument.name for argument in schema.arguments] == names, fix("bitsandbytes", compat.dequantize_by_blocks)
    assert torch.library.get_kernel("bitsandbytes::dequantize_4bit", "CPU") is not None


def test_a_4bit_layer_returns_its_matrix():
    layer, weight = make_4bit_layer()
    state = layer.weight.quant_state
    assert (tuple(state.shape), state.quant_type, num_elements(layer.weight)) == ((8, 64), "nf4", 512), fix(
        "bitsandbytes", num_elements)
    assert compat.matrix_of(layer, torch.float32).shape == weight.shape, fix("bitsandbytes", compat.matrix_of)
    assert (compat.matrix_of(layer, torch.float32) - weight).abs().max() < 0.2 * weight.abs().max()
    layer.weight.quant_state = None  # as FSDP leaves it
    assert (compat.matrix_of(layer, torch.float32) - weight).abs().max() < 0.2 * weight.abs().max(), fix(
        "bitsandbytes", compat.matrix_of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_8bit_layer_returns_its_matrix(dtype):
    """Also after a forward pass, in which bitsandbytes moves the scales."""
    layer = make_8bit_layer()
    expected = bnb.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
    for _ in range(2):
        assert compat.is_8bit(layer) and compat.matrix_of(layer, dtype).dtype == dtype, fix(
            "bitsandbytes", compat.matrix_of)
        torch.testing.assert_close(compat.matrix_of(layer, dtype), expected.to(dtype), rtol=torch.finfo(dtype).eps,
                                   atol=0)
        layer(torch.randn(2, 64))
    assert layer.weight.SCB is None and not compat.is_8bit(torch.nn.Linear(1, 1))


def test_an_8bit_layer_placed_by_accelerate_keeps_its_hook():
    from accelerate.hooks import ModelHook, add_hook_to_module

    modules = []

    class Watch(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            modules.append(module)
            return args, kwargs

    layer = add_hook_to_module(make_8bit_layer(), Watch()).eval()
    compat.multiply_by_matrices(layer)
    x = torch.randn(3, 64)
    assert torch.equal(layer(x), x @ compat.matrix_of(layer, torch.float32).t()), fix(
        "accelerate", compat.multiply_by_matrices)
    assert modules == [layer]


def test_a_planned_layer_is_not_repacked_for_this_cpu():
    """Not even by a forward pass in eval mode."""
    quantization = SimpleNamespace(bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True,
                                   bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.uint8)
    compat.outline_template()
    with without_values(), torch.no_grad():
        layer = compat.packed_outline(torch.nn.Linear(64, 32, bias=False), torch.empty(32, 64), quantization).eval()
        layer(torch.empty(2, 64))
        assert layer.weight.quant_state.nested and compat.matrix_of(layer, torch.float32).shape == (32, 64)
        with FlopCounterMode(display=False) as counter:
            layer(torch.empty(5, 64))
        assert counter.get_total_flops() == 2 * 5 * 64 * 32, fix("bitsandbytes", compat.outline_template)
