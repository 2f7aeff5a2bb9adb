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
    """What `custom_generate` hands to a method here, and what a step makes of it."""
    seen = {}

    def method(model, input_ids, generation_config, **kwargs):
        inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=None, is_first_iteration=True,
                                                     **kwargs)
        outputs = model(**inputs, return_dict=True)
        before = kwargs["attention_mask"].shape[1]
        after = compat.after_step(model, outputs, kwargs)
        seen.update(grown=after["attention_mask"].shape[1] - before, cache=after["past_key_values"].get_seq_length(),
                    eos=generation_config.eos_token_id, pad=generation_config.pad_token_id)
        return input_ids

    ids = torch.tensor([[1, 2, 3]])
    llama.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, eos_token_id=[4, 5],
                   pad_token_id=0, custom_generate=lambda model, *args, **kwargs: method(
                       model, kwargs.pop("input_ids", args[0] if args else None), kwargs.pop("generation_config"),
                       **{name: value for name, value in kwargs.items()
                          if name not in ("logits_processor", "stopping_criteria")}))
    assert seen == {"grown": 1, "cache": 3, "eos": [4, 5], "pad": 0}, mend("transformers", compat.after_step)


def test_gelu_of_gpt2_is_that_of_torch():
    x = torch.linspace(-4, 4, 99)
    assert torch.allclose(NewGELUActivation()(x), nn.GELU(approximate="tanh")(x), atol=1e-6), mend(
        "transformers", fuse_activations)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2))
    assert any(type(part) is NewGELUActivation for part in model.modules()), mend("transformers", fuse_activations)


def test_layers_are_of_one_class(llama):
    assert sum(isinstance(part, GradientCheckpointingLayer) for part in llama.modules()) == 1, mend(
        "transformers", compile_layers)
