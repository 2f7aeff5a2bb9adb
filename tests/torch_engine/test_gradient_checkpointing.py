"""Gradient checkpointing where transformers has none: the same gradients, with dropout, in less memory."""

import csv

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    CTRLConfig,
    CTRLLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.torch_engine.nn.building import chunk_mlps, enable_checkpointing
from lmmods.torch_engine.nn.dropout import TokenDropout
from lmmods.torch_engine.tasks.sft import SFT
from tests.data.conftest import CORPUS
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture


def albert(groups: int = 1, inner: int = 1):
    return AlbertForMaskedLM(AlbertConfig(
        vocab_size=50, embedding_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=6,
        num_hidden_groups=groups, inner_group_num=inner, num_attention_heads=2, max_position_embeddings=64,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1))


MODELS = {
    "albert": albert, "albert with groups": lambda: albert(3, 2),
    "openai-gpt": lambda: OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=50, n_positions=64, n_embd=32, n_layer=6,
                                                               n_head=2)),
    "ctrl": lambda: CTRLLMHeadModel(CTRLConfig(vocab_size=50, n_positions=64, n_embd=32, dff=64, n_layer=6, n_head=2)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=64,
                                                  num_hidden_layers=6, num_attention_heads=2)),
}


def step(model) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the bytes saved for the backward pass, and the gradients."""
    ids = torch.arange(4 * 24).reshape(4, 24) % 50
    sizes: dict[int, int] = {}
    weights = {p.data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    torch.manual_seed(3)
    options = {} if isinstance(model, AlbertForMaskedLM | OpenAIGPTLMHeadModel) else {"use_cache": False}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids, **options).loss
    size = sum(sizes.values())
    model.zero_grad()
    loss.backward()
    return size, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_gradients_are_the_same_with_less_memory(make):
    torch.manual_seed(0)
    model = make().train()
    whole, expected = step(model)
    enable_checkpointing(model)
    reduced, gradients = step(model)
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], grad) for name, grad in expected.items())
    assert reduced < whole / 2
    model.eval()
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=torch.tensor([[1, 2, 3]])).logits).all()


def test_offloaded_inputs_and_mlps_in_chunks_change_no_gradient():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                                         num_attention_heads=2))
    model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear",
                                             init_lora_weights=False)).train()
    dropout = TokenDropout(model)
    seeds = torch.arange(4 * 24).reshape(4, 24) * 977

    def gradients() -> dict[str, torch.Tensor]:
        dropout.begin({"token_seeds": seeds, "attention_mask": torch.ones(4, 24)})
        return step(model)[1]

    expected = gradients()
    enable_checkpointing(model, dropout.contexts)
    chunk_mlps(model, dropout, size=7)
    for name, grad in gradients().items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-7)


def test_offloading_with_compiled_layers_is_rejected():
    with pytest.raises(UserError, match="model.compile is true, but must be false with model.gradient_checkpointing"):
        SFT(config={"model_type": "llama"}, compile=True, gradient_checkpointing="offload")


def test_a_model_without_blocks_is_rejected():
    class Bare(torch.nn.Module):
        supports_gradient_checkpointing = False

    with pytest.raises(UserError, match="Bare has no blocks"):
        enable_checkpointing(Bare())
    with pytest.raises(UserError, match="is offload, which Bare does not support. Set it to true."):
        enable_checkpointing(Bare(), offloads=True)


def test_albert_trains_the_same_with_gradient_checkpointing(recipe, bert_folder, tmp_path):  # noqa: F811
    (tmp_path / "text.txt").write_text("\n".join(CORPUS * 4))
    config = {"model_type": "albert", "embedding_size": 16, "hidden_size": 32, "intermediate_size": 64,
              "num_hidden_layers": 4, "num_attention_heads": 2, "max_position_embeddings": 64,
              "hidden_dropout_prob": 0.1}
    rows = []
    for checkpointing in (False, True):
        root = tmp_path / f"run-{checkpointing}"
        model = {"class_path": "MLM", "init_args": {"config": config, "gradient_checkpointing": checkpointing}}
        data = {"class_path": "MLMData", "init_args": {
            "source": str(tmp_path / "text.txt"), "documents": "line", "tokenizer": bert_folder, "max_length": 64,
            "batch_size": 4, "val_size": 0.2}}
        assert main(["fit", *recipe(model=model, data=data, trainer__max_steps=3, trainer__val_check_interval=3,
                                    trainer__default_root_dir=str(root))]) == 0
        with open(root / "metrics.csv", newline="") as file:
            rows.append([(row["train/loss"], row["train/grad_norm"]) for row in csv.DictReader(file)])
    assert rows[0] == rows[1] and len(rows[0]) == 3
