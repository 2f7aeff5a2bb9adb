"""What lmmods/torch_engine/compat/peft.py and nn/lora.py need of PEFT."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from lmmods.core.errors import UserError
from lmmods.core.settings import LoRA
from lmmods.torch_engine.compat import peft as compat
from lmmods.torch_engine.nn.building import compile_layers
from lmmods.torch_engine.nn.lora import add_lora, fuse_adapters, load_adapter
from tests.compat.contract import mend


def adapted(layer=None, **options):
    base = nn.Sequential(layer or nn.Linear(4, 4))
    return get_peft_model(base, LoraConfig(r=2, lora_alpha=6, target_modules=["0"], **options)).base_model.model[0]


def test_layers_are_known_by_their_class():
    assert compat.is_lora_of_linear(adapted()), mend("peft", compat.is_lora_of_linear)
    assert not compat.is_lora_of_linear(adapted(nn.Embedding(4, 4)))
    assert not compat.is_lora_of_linear(nn.Linear(4, 4))


def test_four_bit_layers_are_known_by_their_class():
    bnb = pytest.importorskip("bitsandbytes")
    assert compat.is_lora_of_linear(adapted(bnb.nn.Linear4bit(64, 64))), mend("peft", compat.is_lora_of_linear)


def test_adapted_layers_are_found_by_name():
    model = get_peft_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), LoraConfig(r=2, target_modules=["1"]))
    [(name, layer)] = compat.lora_layers(model)
    assert name == "base_model.model.1" and layer.base_layer.out_features == 2, mend("peft", compat.lora_layers)


def test_adapters_on_parameters_are_known():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrices = nn.Parameter(torch.zeros(2, 4, 4))

    config = LoraConfig(r=2, target_modules=[], target_parameters=["0.matrices"])
    model = get_peft_model(nn.Sequential(Stack()), config)
    assert compat.adapts_parameters(model), mend("peft", compat.adapts_parameters)
    layer = model.base_model.model[0]
    assert compat.adapted_parameter(layer) == "matrices", mend("peft", compat.adapted_parameter)
    assert compat.has_one_adapter(layer), mend("peft", compat.has_one_adapter)
    layer.merge()
    with pytest.raises(RuntimeError, match="neither merged"):
        compat.has_one_adapter(layer)
    assert not compat.adapts_parameters(adapted())
    with pytest.raises(UserError, match="model.compile: .*lora.target_parameters"):
        compile_layers(model)


def test_variants_are_known():
    assert compat.has_variant(adapted(use_dora=True)), mend("peft", compat.has_variant)
    assert not compat.has_variant(adapted()), mend("peft", compat.has_variant)


def test_parts_of_a_layer():
    layer = adapted()
    assert (layer.active_adapters, layer.disable_adapters, layer.merged, layer.scaling["default"]) == (
        ["default"], False, False, 3.0), mend("peft", fuse_adapters)
    assert type(layer.base_layer) is nn.Linear and isinstance(layer.lora_dropout["default"], nn.Identity)
    shapes = [tuple(part["default"].weight.shape) for part in (layer.lora_A, layer.lora_B)]
    assert shapes == [(2, 4), (4, 2)] and layer.lora_B["default"].bias is None, mend("peft", fuse_adapters)


def test_rows_of_tokens_that_train():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.body, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)

    rows = {"table": [5], "head": [4, 1]}
    model = get_peft_model(Network(), LoraConfig(r=2, target_modules=["body"], trainable_token_indices=rows))
    head = model.base_model.model.head
    layer, tokens, trained = compat.trained_rows(head)
    assert isinstance(layer, nn.Linear) and tokens == [4, 1] and trained.shape == (2, 4), mend(
        "peft", compat.trained_rows)
    with torch.no_grad():
        trained.fill_(2.0)
    assert torch.equal(head.weight[[1, 4]], torch.full((2, 4), 2.0)), mend("peft", compat.trained_rows)
    assert compat.trained_rows(layer) is None


@pytest.mark.parametrize(("layer", "is_conv1d"), [(nn.Linear(4, 6), False), (Conv1D(6, 4), True)])
def test_adapters_start_again(layer, is_conv1d):
    lora = adapted(layer, use_dora=True)
    with torch.no_grad():
        lora.lora_A["default"].weight.zero_()
        lora.lora_B["default"].weight.fill_(1.0)
    compat.reset_adapter(lora)
    assert lora.lora_A["default"].weight.std() > 0.1 and not lora.lora_B["default"].weight.any(), mend(
        "peft", compat.reset_adapter)
    (magnitude, weight, found), = compat.magnitudes(lora)
    assert weight is layer.weight and found == is_conv1d, mend("peft", compat.magnitudes)
    torch.testing.assert_close(magnitude, weight.norm(dim=0 if is_conv1d else 1))
    assert list(compat.magnitudes(adapted())) == []


def test_adapters_are_switched_off_without_ending_their_training():
    model = get_peft_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), LoraConfig(
        r=2, target_modules=["0"], modules_to_save=["1"], init_lora_weights=False))
    base, x = model.base_model.model, torch.ones(1, 4)
    with torch.no_grad():
        base[1].modules_to_save["default"].weight += 1
    wanted = base[1].original_module(base[0].base_layer(x))
    adapted_output = model(x)
    with compat.disable_adapters(model):
        torch.testing.assert_close(model(x), wanted, msg=mend("peft", compat.disable_adapters))
        assert base[0].lora_A["default"].weight.requires_grad
    torch.testing.assert_close(model(x), adapted_output)
    assert not torch.allclose(adapted_output, wanted)


def test_a_tied_layer_that_trains_in_full_is_told_once_in_our_words(tmp_path, capsys, recwarn):
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, tie_word_embeddings=True)
    lora = LoRA(rank=2, modules_to_save=["lm_head"])
    add_lora(LlamaForCausalLM(config), lora, [], torch.float32).save_pretrained(tmp_path)
    assert capsys.readouterr().out.startswith("lora.modules_to_save: lm_head: the base ties its embedding")
    load_adapter(LlamaForCausalLM(config), tmp_path)
    assert not capsys.readouterr().out
    told = [str(warning.message) for warning in recwarn]
    assert not [text for text in told if "tied layer" in text], mend("peft", compat.ignore_tying_warning)
