"""Fast kernels of popular families: losses and gradients equal plain transformers."""

import pytest
import torch
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from lmmods.core.settings import LoRA
from lmmods.torch_engine.nn import lora
from lmmods.torch_engine.nn import loss as loss_module
from lmmods.torch_engine.nn.attention import say_eager
from lmmods.torch_engine.nn.lm_head import LMHead, causal_logps, causal_loss, keeps_packed_apart
from lmmods.torch_engine.nn.lora import add_lora, fuse_adapters
from tests.closeness import assert_as_close, gradients, in_both

V = 61
SMALL = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2}
ALTERNATING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama": {}, "qwen2": {}, "qwen3": {"head_dim": 6}, "mistral": {"sliding_window": 4}, "gemma": {"head_dim": 6},
    "gemma2": {**ALTERNATING, "head_dim": 6, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 1.5,
               "final_logit_softcapping": 2.5},
    "gemma3_text": {**ALTERNATING, "head_dim": 6, "query_pre_attn_scalar": 9},
    "gemma4_text": {"num_hidden_layers": 3, "sliding_window": 4, "layer_types": [
        "sliding_attention", "full_attention", "full_attention"], "head_dim": 6, "global_head_dim": 8,
        "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": V,
        "final_logit_softcapping": 2.5}, "olmo2": {}, "olmo3": ALTERNATING,
    "phi3": {"sliding_window": 4},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4,
                "attention_multiplier": 0.2},
    "smollm3": {"no_rope_layer_interval": 2}, "glm4": {"head_dim": 8}, "cohere2": {**ALTERNATING, "logit_scale": 0.5},
    "gpt_neox": {}, "starcoder2": {"sliding_window": 4},
    "qwen3_5_text": {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                     "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5},
}
HYBRID = ("qwen3_5_text",)  # the state of linear attention carries over to the next packed document
LENGTHS = (12, 9)


def make(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    fields = SMALL if name != "gpt_neox" else {key: SMALL[key] for key in SMALL if key != "num_key_value_heads"}
    config = CONFIG_MAPPING[name](**{**fields, **FAMILIES[name]}, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return AutoModelForCausalLM.from_config(config).train()


def attach_adapters(model: torch.nn.Module) -> torch.nn.Module:
    model = add_lora(model, LoRA(rank=2, targets="all-linear"), [], torch.float32, "CAUSAL_LM", 0)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.2)
    return model.train()


def documents() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return token ids and labels [1, T] of two texts; prompt tokens are not targets."""
    generator = torch.Generator().manual_seed(1)
    texts = []
    for length in LENGTHS:
        ids = torch.randint(3, V, (1, length), generator=generator)
        labels = ids.clone()
        labels[:, :4] = -100
        texts.append((ids, labels))
    return texts


def padded() -> dict[str, torch.Tensor]:
    ids, labels = (torch.cat([F.pad(part, (0, max(LENGTHS) - part.shape[1]), value=fill) for part in parts])
                   for parts, fill in zip(zip(*documents(), strict=True), (0, -100), strict=True))
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return {"input_ids": ids, "labels": labels, "attention_mask": mask.long()}


def packed() -> dict[str, torch.Tensor]:
    ids, labels = (torch.cat(parts, 1) for parts in zip(*documents(), strict=True))
    return {"input_ids": ids, "labels": labels,
            "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None]}


def compute_logps(model: torch.nn.Module) -> torch.Tensor:
    """Return the summed log-probability of each text [2], computed by the plain network on single texts."""
    logps = []
    for ids, labels in documents():
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        logps.append(-F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="sum"))
    return torch.stack(logps)


def preference_loss(logps: torch.Tensor) -> torch.Tensor:
    """Return a loss that is not linear in the log-probabilities of rows."""
    return F.softplus(0.3 * (logps[1] - logps[0]))


def compute_by_transformers(model: torch.nn.Module) -> tuple[torch.Tensor, dict, dict]:
    """Return the log-probabilities of both texts, and the gradients of their sum and of a preference loss."""
    logps = compute_logps(model)
    return logps.detach(), gradients(model, -logps.sum()), gradients(model, preference_loss(compute_logps(model)))


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_fast_kernels_equal_transformers(name, adapted, monkeypatch, capsys):
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", V * 4 * 3)  # three positions per chunk
    monkeypatch.setattr(loss_module, "MIN_CHUNK", 1)
    model = attach_adapters(make(name)) if adapted else make(name)
    ((logps, expected, expected_preference),
     (exact_logps, exact, exact_preference)) = in_both(compute_by_transformers, model)
    num_adapted, fused_calls = sum("lora_B" in key for key in expected), []
    apply = lora._AdaptedProduct.apply
    monkeypatch.setattr(lora._AdaptedProduct, "apply", lambda *args: fused_calls.append(True) or apply(*args))
    monkeypatch.setattr(loss_module, "_AnyHead", None)
    fuse_adapters(model)
    head = LMHead.from_model(model)
    assert keeps_packed_apart(model) is (name not in HYBRID)
    for batch in (padded(), packed())[:1 + (name not in HYBRID)]:
        fused_calls.clear()
        sums = causal_loss(model, head, batch)
        assert len(fused_calls) == num_adapted and (num_adapted >= 8) is adapted
        assert_as_close(sums.total, -logps.sum(), -exact_logps.sum())
        assert sums.weight == sum(LENGTHS) - 8
        assert_as_close(gradients(model, sums.total), expected, exact)
    fast_logps, counts = causal_logps(model, head, padded())
    assert_as_close(fast_logps, logps, exact_logps)
    assert counts.tolist() == [length - 4 for length in LENGTHS]
    assert_as_close(gradients(model, preference_loss(fast_logps)), expected_preference, exact_preference)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_without_a_fast_kernel_is_reported(name, capsys):
    say_eager(make(name))
    assert capsys.readouterr().out == (
        "" if name != "gemma2" else "Attention: gemma2 uses eager, which keeps all scores in memory: sdpa cannot cap "
        "scores at 1.5.\n")
