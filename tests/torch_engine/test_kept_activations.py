"""The estimate of a block's activation memory equals what autograd saves."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from lmmods.core.memory import Step, widths_of
from lmmods.torch_engine.nn.building import fuse_activations
from lmmods.torch_engine.nn.dropout import TokenDropout
from lmmods.torch_engine.nn.lora import fuse_adapters
from lmmods.torch_engine.nn.summary import planned_shape

LENGTH = 128
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 4,
         "max_position_embeddings": LENGTH, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_inner": 172, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def measure_saved_bytes(config: dict, num_layers: int, precision: str, dropout: float | None) -> float:
    """Return the bytes that a forward pass saves per token, without parameters."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, num_hidden_layers=num_layers))
    if precision == "bf16-true":
        model.to(torch.bfloat16)
    fuse_activations(model)
    if dropout is not None:
        model = get_peft_model(model, LoraConfig(r=2, lora_dropout=dropout, target_modules="all-linear"),
                               autocast_adapter_dtype=False)
        fuse_adapters(model)
    ids, tensors = torch.arange(LENGTH)[None] % 64, {}
    TokenDropout(model).begin({"token_seeds": ids})
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}

    def save(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            tensors[x.untyped_storage().data_ptr()] = x  # a reference, so that its storage is not reused
        return x

    mixed = torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else nullcontext()
    with mixed, torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        model(input_ids=ids, use_cache=False)
    copies = sum(param.numel() for param in model.parameters() if param.requires_grad and param.ndim > 1)
    size = sum(x.untyped_storage().nbytes() for x in tensors.values())
    return (size - (2 * copies if precision == "bf16-mixed" else 0)) / LENGTH  # casts of parameters, cached by autocast


@pytest.mark.parametrize(("family", "precision", "dropout"), [
    ({"model_type": "llama"}, "bf16-true", 0.0), ({"model_type": "llama", "num_key_value_heads": 1}, "32-true", None),
    ({"model_type": "llama", "num_key_value_heads": 1}, "bf16-true", 0.1),
    ({"model_type": "llama"}, "bf16-mixed", None), ({"model_type": "llama"}, "bf16-mixed", 0.1),
    ({"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 32}, "bf16-true", None),
    ({"model_type": "gpt2", **GPT2}, "bf16-true", None)], ids=str)
def test_the_estimate_of_block_activations_equals_what_autograd_saves(family, precision, dropout):
    """Except one value per head or normalised row, and the inner features of adapters."""
    config = SIZES | family
    measured = measure_saved_bytes(config, 2, precision, dropout) - measure_saved_bytes(config, 1, precision, dropout)
    shape = planned_shape(AutoConfig.for_model(**config, num_hidden_layers=1), "AutoModelForCausalLM")
    assert shape.widths == widths_of(AutoConfig.for_model(**config, num_hidden_layers=1),
                                     family["model_type"] == "qwen3")
    step = Step(1, "adamw", False, 4 if precision == "32-true" else 2, 2 if precision == "bf16-true" else 4,
                in_full=dropout is None, has_dropout=bool(dropout))
    assert 0 <= measured - step.kept_in_block(shape.widths) <= 0.035 * measured
