"""Chunked loss and gradients equal the loss over full logits, for many architectures."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from lmmods.core.settings import LoRA
from lmmods.torch_engine.nn import loss as loss_module
from lmmods.torch_engine.nn.lm_head import LMHead, causal_loss, keeps_packed_apart
from lmmods.torch_engine.nn.lora import add_lora
from tests.closeness import assert_as_close, gradients, in_both

SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
ARCHITECTURES = {
    "llama": SMALL,
    "llama_tied": {**SMALL, "tie_word_embeddings": True},
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
             "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "gemma2": {**SMALL, "head_dim": 8, "final_logit_softcapping": 3.0},
    "cohere": {**SMALL, "logit_scale": 0.3},
    "granite": {**SMALL, "logits_scaling": 4.0},
    "opt": {"vocab_size": 61, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "phi": {**SMALL, "num_key_value_heads": 4},
    "gpt_neox": {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
}


def make(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name.removesuffix("_tied")](**ARCHITECTURES[name], pad_token_id=0, bos_token_id=1,
                                                        eos_token_id=2)
    return AutoModelForCausalLM.from_config(config).train()


def batch() -> dict[str, torch.Tensor]:
    """Return two rows of different lengths, padded on the right; prompt tokens are not targets."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 61, (2, 12), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, :5] = -100
    mask[1, 9:], ids[1, 9:], labels[1, 9:] = 0, 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def full_loss(model: torch.nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=data["input_ids"], attention_mask=data["attention_mask"], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().transpose(1, 2), data["labels"][:, 1:],
                                             ignore_index=-100, reduction="sum")


def compute_full_gradients(data: dict[str, torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, dict]:
    """Return the total loss, and the gradients of a quarter of it."""
    total = full_loss(model, data)
    return total.detach(), gradients(model, total / 4)


def num_targets(data: dict[str, torch.Tensor]) -> int:
    return int((data["labels"][:, 1:] != -100).sum())


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 61 * 4 * 3)  # three positions per chunk
    monkeypatch.setattr(loss_module, "MIN_CHUNK", 1)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora_on_head"])
def test_loss_and_gradients_equal_full_logits(name, lora):
    model = make(name)
    if lora and not model.config.tie_word_embeddings:
        head = next(n for n, m in model.named_modules() if m is model.get_output_embeddings())
        model = get_peft_model(model, LoraConfig(target_modules=[head]))
        torch.nn.init.normal_(next(p for n, p in model.named_parameters() if "lora_B" in n))
    assert_equal_to_full_logits(model)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma2", "cohere"])
def test_gradients_of_new_token_rows_equal_full_logits(name):
    model = make(name)
    model = add_lora(model, LoRA(rank=2, targets=["q_proj"]), [60, 7], torch.float32)
    for key, param in model.named_parameters():
        if "trainable_tokens" in key:
            torch.nn.init.normal_(param)
    assert sum("trainable_tokens" in key for key in assert_equal_to_full_logits(model)) == 1 + (name == "llama")


def assert_equal_to_full_logits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Check the chunked loss and its gradients; return the gradients."""
    data = batch()
    (total, expected), (exact_total, exact) = in_both(partial(compute_full_gradients, data), model)
    head = LMHead.from_model(model)
    assert head is not None
    sums = causal_loss(model, head, data, count_correct=True)
    assert sums.weight.item() == num_targets(data)
    assert_as_close(sums.total, total, exact_total)
    assert_as_close(gradients(model, sums.total / 4), expected, exact)
    return expected


@pytest.mark.parametrize(("name", "message"), [
    ("llama", ""), ("gemma2", ""), ("cohere", ""),
    ("phi", "Output head: autograd differentiates phi's head, as it has a bias. This is slower.\n")])
def test_a_slower_head_is_reported(name, message, capsys):
    model = make(name)
    assert LMHead.from_model(model).linear is (None if message else model.lm_head)
    assert capsys.readouterr().out == message
    LMHead.from_model(model, plain=True)
    assert capsys.readouterr().out == ""


def test_an_unsupported_head_falls_back_to_full_logits(monkeypatch, capsys):
    model = make("llama")
    original = model.forward

    def odd(*args, **kwargs):
        output = original(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    monkeypatch.setattr(model, "forward", odd)
    assert LMHead.from_model(model) is None
    assert "Output head: llama transforms its logits in an unsupported way" in capsys.readouterr().out
    data = batch()
    sums = causal_loss(model, None, data)
    assert sums.weight.item() == num_targets(data)
    assert torch.equal(sums.total, full_loss(model, data))


def test_padding_changes_neither_loss_nor_gradient():
    model, data = make("llama"), batch()
    head = LMHead.from_model(model)
    (_, expected), (_, exact) = in_both(partial(compute_full_gradients, data), model)
    longer = {"input_ids": torch.nn.functional.pad(data["input_ids"], (0, 50)),
              "attention_mask": torch.nn.functional.pad(data["attention_mask"], (0, 50)),
              "labels": torch.nn.functional.pad(data["labels"], (0, 50), value=-100)}
    assert_as_close(gradients(model, causal_loss(model, head, longer).total / 4), expected, exact)


def test_a_batch_without_targets_has_no_loss_and_finite_gradients():
    model, data = make("llama"), batch()
    data["labels"].fill_(-100)
    sums = causal_loss(model, LMHead.from_model(model), data)
    assert sums.weight.item() == 0 and sums.total.item() == 0
    assert all(torch.isfinite(grad).all() for grad in gradients(model, sums.total).values())


def test_a_bf16_model_has_a_float32_loss():
    model, data = make("llama").to(torch.bfloat16), batch()
    with torch.no_grad():
        logits = model(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits
        expected = torch.nn.functional.cross_entropy(logits[:, :-1].float().transpose(1, 2), data["labels"][:, 1:],
                                                     ignore_index=-100, reduction="sum")
    sums = causal_loss(model, LMHead.from_model(model), data)
    assert sums.total.dtype == torch.float32
    assert abs(sums.total.item() - expected.item()) / sums.weight.item() < 2e-3


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_are_separate_or_a_leak_is_detected(name, attention):
    model = make(name)
    if (name, attention) != ("gemma2", "sdpa"):  # gemma2 soft-caps its scores, so it has no sdpa
        model.set_attn_implementation(attention)
    assert keeps_packed_apart(model) is (name != "opt")
    assert model.training
    if name == "opt":
        return
    data = batch()
    lengths = data["attention_mask"].sum(1).tolist()
    packed = {key: torch.cat([data[key][row, :length] for row, length in enumerate(lengths)]).unsqueeze(0)
              for key in ("input_ids", "labels")}
    packed["labels"][0, lengths[0]] = -100  # the first token of a document is not a target
    packed["position_ids"] = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    head = LMHead.from_model(model)
    apart, together = causal_loss(model, head, data), causal_loss(model, head, packed)
    assert apart.weight == together.weight
    assert_as_close(together.total, *in_both(lambda model: full_loss(model, data).detach(), model))
