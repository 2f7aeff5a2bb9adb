"""Private API of PEFT that lmmods/torch_engine/compat/peft.py and nn/lora.py use."""

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
from tests.compat.contract import fix


def make_adapted(layer=None, **options):
    base = nn.Sequential(layer or nn.Linear(4, 4))
    return get_peft_model(base, LoraConfig(r=2, lora_alpha=6, target_modules=["0"], **options)).base_model.model[0]


def test_lora_of_linear_is_recognised_by_class():
    assert compat.is_lora_of_linear(make_adapted()), fix("peft", compat.is_lora_of_linear)
    assert not compat.is_lora_of_linear(make_adapted(nn.Embedding(4, 4)))
    assert not compat.is_lora_of_linear(nn.Linear(4, 4))


def test_lora_of_4bit_linear_is_recognised_by_class():
    bnb = pytest.importorskip("bitsandbytes")
    assert compat.is_lora_of_linear(make_adapted(bnb.nn.Linear4bit(64, 64))), fix("peft", compat.is_lora_of_linear)


def test_adapted_layers_are_found_by_name():
    model = get_peft_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), LoraConfig(r=2, target_modules=["1"]))
    [(name, layer)] = compat.lora_layers(model)
    assert name == "base_model.model.1" and layer.base_layer.out_features == 2, fix("peft", compat.lora_layers)


def test_adapters_on_parameters_are_recognised():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrices = nn.Parameter(torch.zeros(2, 4, 4))

    config = LoraConfig(r=2, target_modules=[], target_parameters=["0.matrices"])
    model = get_peft_model(nn.Sequential(Stack()), config)
    assert compat.adapts_parameters(model), fix("peft", compat.adapts_parameters)
    layer = model.base_model.model[0]
    assert compat.adapted_parameter(layer) == "matrices", fix("peft", compat.adapted_parameter)
    assert compat.has_one_adapter(layer), fix("peft", compat.has_one_adapter)
    layer.merge()
    with pytest.raises(RuntimeError, match="cannot be merged or combined"):
        compat.has_one_adapter(layer)
    assert not compat.adapts_parameters(make_adapted())
    with pytest.raises(UserError, match="model.compile: .*lora.target_parameters"):
        compile_layers(model)


def test_lora_variants_are_recognised():
    assert compat.has_variant(make_adapted(use_dora=True)), fix("peft", compat.has_variant)
    assert not compat.has_variant(make_adapted()), fix("peft", compat.has_variant)


def test_a_lora_layer_has_these_parts():
    layer = make_adapted()
    assert (layer.active_adapters, layer.disable_adapters, layer.merged, layer.scaling["default"]) == (
        ["default"], False, False, 3.0), fix("peft", fuse_adapters)
    assert type(layer.base_layer) is nn.Linear and isinstance(layer.lora_dropout["default"], nn.Identity)
    shapes = [tuple(part["default"].weight.shape) for part in (layer.lora_A, layer.lora_B)]
    assert shapes == [(2, 4), (4, 2)] and layer.lora_B["default"].bias is None, fix("peft", fuse_adapters)


def test_trained_token_rows_are_found():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.body, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)

    rows = {"table": [5], "head": [4, 1]}
    model = get_peft_model(Network(), LoraConfig(r=2, target_modules=["body"], trainable_token_indices=rows))
    head = model.base_model.model.head
    layer, tokens, trained = compat.trained_rows(head)
    assert isinstance(layer, nn.Linear) and tokens == [4, 1] and trained.shape == (2, 4), fix(
        "peft", compat.trained_rows)
    with torch.no_grad():
        trained.fill_(2.0)
    assert torch.equal(head.weight[[1, 4]], torch.full((2, 4), 2.0)), fix("peft", compat.trained_rows)
    assert compat.trained_rows(layer) is None


@pytest.mark.parametrize(("layer", "is_conv1d"), [(nn.Linear(4, 6), False), (Conv1D(6, 4), True)])
def test_an_adapter_can_be_initialised_again(layer, is_conv1d):
    lora = make_adapted(layer, use_dora=True)
    with torch.no_grad():
        lora.lora_A["default"].weight.zero_()
        lora.lora_B["default"].weight.fill_(1.0)
    compat.reset_adapter(lora)
    assert lora.lora_A["default"].weight.std() > 0.1 and not lora.lora_B["default"].weight.any(), fix(
        "peft", compat.reset_adapter)
    (magnitude, weight, is_transposed), = compat.magnitudes(lora)
    assert weight is layer.weight and is_transposed == is_conv1d, fix("peft", compat.magnitudes)
    torch.testing.assert_close(magnitude, weight.norm(dim=0 if is_conv1d else 1))
    assert list(compat.magnitudes(make_adapted())) == []


def test_disabled_adapters_stay_trainable():
    model = get_peft_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), LoraConfig(
        r=2, target_modules=["0"], modules_to_save=["1"], init_lora_weights=False))
    base, x = model.base_model.model, torch.ones(1, 4)
    with torch.no_grad():
        base[1].modules_to_save["default"].weight += 1
    expected = base[1].original_module(base[0].base_layer(x))
    adapted_output = model(x)
    with compat.disable_adapters(model):
        torch.testing.assert_close(model(x), expected, msg=fix("peft", compat.disable_adapters))
        assert base[0].lora_A["default"].weight.requires_grad
    torch.testing.assert_close(model(x), adapted_output)
    assert not torch.allclose(adapted_output, expected)


def test_a_fully_trained_tied_layer_gives_one_message_of_ours(tmp_path, capsys, recwarn):
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, tie_word_embeddings=True)
    lora = LoRA(rank=2, modules_to_save=["lm_head"])
    add_lora(LlamaForCausalLM(config), lora, [], torch.float32).save_pretrained(tmp_path)
    assert capsys.readouterr().out.startswith("lora.modules_to_save: lm_head: the base ties its embedding")
    load_adapter(LlamaForCausalLM(config), tmp_path)
    assert not capsys.readouterr().out
    messages = [str(warning.message) for warning in recwarn]
    assert not [text for text in messages if "tied layer" in text], fix("peft", compat.ignore_tying_warning)
