"""What the torch engine needs of transformers beyond its documentation."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.activations import NewGELUActivation
from transformers.modeling_layers import GradientCheckpointingLayer

from lmmods.torch_engine.compat import transformers as compat
from lmmods.torch_engine.nn.building import compile_layers, fuse_activations
from tests.compat.contract import mend


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                        num_attention_heads=2)).eval()


def test_the_attention_in_use(llama):
    llama.set_attn_implementation("sdpa")
    assert compat.attention_of(llama) == "sdpa", mend("transformers", compat.attention_of)
    llama.set_attn_implementation("eager")
    assert compat.attention_of(llama) == "eager", mend("transformers", compat.attention_of)
    assert compat.can_change_attention(llama) is True, mend("transformers", compat.can_change_attention)


def test_arguments_of_the_next_step(llama):
    ids = torch.tensor([[1, 2, 3]])
    outputs = llama(ids, use_cache=True)
    found = compat.after_step(llama, outputs, {"attention_mask": torch.ones_like(ids), "use_cache": True})
    assert found["attention_mask"].tolist() == [[1, 1, 1, 1]] and found["use_cache"] is True and (
        found["past_key_values"] is outputs.past_key_values), mend("transformers", compat.after_step)


def test_gelu_of_gpt2_is_that_of_torch():
    x = torch.linspace(-4, 4, 99)
    assert torch.allclose(NewGELUActivation()(x), nn.GELU(approximate="tanh")(x), atol=1e-6), mend(
        "transformers", fuse_activations)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2))
    assert any(type(part) is NewGELUActivation for part in model.modules()), mend("transformers", fuse_activations)


def test_layers_are_of_one_class(llama):
    assert sum(isinstance(part, GradientCheckpointingLayer) for part in llama.modules()) == 1, mend(
        "transformers", compile_layers)
