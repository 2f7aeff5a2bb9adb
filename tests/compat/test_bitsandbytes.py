"""What lmmods/torch_engine/compat/bitsandbytes.py needs of bitsandbytes. That the numbers are right then:
tests/torch_engine/test_cpu_kernels.py."""

from types import SimpleNamespace

import bitsandbytes as bnb
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lmmods.torch_engine.compat import bitsandbytes as compat
from lmmods.torch_engine.compat.torch import without_values
from lmmods.torch_engine.nn.summary import num_elements
from tests.compat.contract import mend


def packed(columns=64):
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(columns, 8, bias=False, quant_type="nf4")
    weight = layer.weight.data.clone()
    return layer.to("cpu"), weight


def eight_bit(columns=64):
    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(columns, 8, bias=False, has_fp16_weights=False, threshold=6.0)
    return layer.to("cpu")


def test_repacking_has_a_switch():
    layer, _ = packed()
    assert hasattr(layer, "support_avx512bf16_for_cpu"), mend("bitsandbytes", compat.patch_cpu_kernels)
    compat.patch_cpu_kernels(layer)
    assert layer.support_avx512bf16_for_cpu is False


def test_the_operator_takes_these_arguments():
    found = torch.ops.bitsandbytes.dequantize_4bit.default._schema
    names = ["A", "absmax", "blocksize", "quant_type", "shape", "dtype"]
    assert [argument.name for argument in found.arguments] == names, mend("bitsandbytes", compat.dequantize_by_blocks)
    assert torch.library.get_kernel("bitsandbytes::dequantize_4bit", "CPU") is not None


def test_a_packed_layer_gives_its_matrix():
    layer, weight = packed()
    state = layer.weight.quant_state
    assert (tuple(state.shape), state.quant_type, num_elements(layer.weight)) == ((8, 64), "nf4", 512), mend(
        "bitsandbytes", num_elements)
    assert compat.matrix_of(layer, torch.float32).shape == weight.shape, mend("bitsandbytes", compat.matrix_of)
    assert (compat.matrix_of(layer, torch.float32) - weight).abs().max() < 0.2 * weight.abs().max()
    layer.weight.quant_state = None  # as FSDP leaves it
    assert (compat.matrix_of(layer, torch.float32) - weight).abs().max() < 0.2 * weight.abs().max(), mend(
        "bitsandbytes", compat.matrix_of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_8bit_layer_gives_its_matrix(dtype):
    """Also after a product of bitsandbytes' own, which moves the scales."""
    layer = eight_bit()
    wanted = bnb.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
    for _ in range(2):
        assert compat.is_8bit(layer) and compat.matrix_of(layer, dtype).dtype == dtype, mend(
            "bitsandbytes", compat.matrix_of)
        torch.testing.assert_close(compat.matrix_of(layer, dtype), wanted.to(dtype), rtol=torch.finfo(dtype).eps,
                                   atol=0)
        layer(torch.randn(2, 64))
    assert layer.weight.SCB is None and not compat.is_8bit(torch.nn.Linear(1, 1))


def test_an_8bit_layer_that_accelerate_has_placed_keeps_its_hook():
    from accelerate.hooks import ModelHook, add_hook_to_module

    seen = []

    class Watch(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(module)
            return args, kwargs

    layer = add_hook_to_module(eight_bit(), Watch()).eval()
    compat.multiply_by_matrices(layer)
    x = torch.randn(3, 64)
    assert torch.equal(layer(x), x @ compat.matrix_of(layer, torch.float32).t()), mend(
        "accelerate", compat.multiply_by_matrices)
    assert seen == [layer]


def test_a_planned_layer_is_not_repacked_for_this_processor():
    """Even by a pass in eval mode, which the baseline of single answers is."""
    quantization = SimpleNamespace(bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True,
                                   bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.uint8)
    compat.outline_template()
    with without_values(), torch.no_grad():
        layer = compat.packed_outline(torch.nn.Linear(64, 32, bias=False), torch.empty(32, 64), quantization).eval()
        layer(torch.empty(2, 64))
        assert layer.weight.quant_state.nested and compat.matrix_of(layer, torch.float32).shape == (32, 64)
        with FlopCounterMode(display=False) as counted:
            layer(torch.empty(5, 64))
        assert counted.get_total_flops() == 2 * 5 * 64 * 32, mend("bitsandbytes", compat.outline_template)
