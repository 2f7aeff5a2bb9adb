"""Packed rows by document: a loop over documents in the place of torch's CUDA kernel, against sdpa with its mask."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from lmmods.torch_engine.nn import attention
from lmmods.torch_engine.nn.attention import VARLEN, prefer_varlen
from lmmods.torch_engine.nn.lm_head import LMHead, causal_loss, keeps_packed_apart

SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
calls: list[torch.Tensor] = []


def loop(q, k, v, starts_q, starts_k, longest_q, longest_k, *, scale, window_size, enable_gqa=False):
    """What torch.nn.attention.varlen.varlen_attn computes."""
    assert q.dtype == k.dtype == v.dtype and starts_q.dtype == torch.int32
    assert starts_q is starts_k and window_size == (-1, 0) and longest_q == starts_q.diff().max() == longest_k
    calls.append(starts_q)
    parts = []
    for start, end in zip(starts_q[:-1], starts_q[1:], strict=True):
        document = [x[start:end].transpose(0, 1) for x in (q, k, v)]
        parts.append(F.scaled_dot_product_attention(*document, is_causal=True, scale=scale, enable_gqa=enable_gqa))
    return torch.cat(parts, 1).transpose(0, 1)


def make(kind: str = "llama", **changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SMALL | changes), dtype=torch.bfloat16)
    calls.clear()
    return model.train()


def packed() -> dict[str, torch.Tensor]:
    """Two rows: three documents with padding behind them, and one document alone."""
    positions = torch.stack([torch.tensor([*range(5), *range(2), *range(3), 0, 0]), torch.arange(12)])
    ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = torch.where(positions > 0, ids, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_loss_and_gradients_are_those_of_sdpa(kind, adapted, capsys, monkeypatch):
    model = make(kind).float()
    monkeypatch.setattr(attention, "_unsupported_reason", lambda model: None)  # which asks for half precision
    if adapted:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False, r=4))

    def run():
        model.zero_grad()
        causal_loss(model, LMHead.from_model(model), packed()).total.backward()
        return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}

    expected = run()
    prefer_varlen(model, loop)
    assert "which agrees with sdpa" in capsys.readouterr().out and model.config._attn_implementation == VARLEN
    calls.clear()
    found = run()
    assert [call.tolist() for call in calls[-2:]] == [[0, 5, 7, 10, 11, 12, 24]] * 2 and calls[-1] is calls[-2]
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_documents_do_not_see_each_other():
    model, batch = make(), packed()
    prefer_varlen(model, loop)
    other = batch["input_ids"].clone()
    other[0, :5] = other[0, :5].flip(0)
    rows = [model(input_ids=ids, position_ids=batch["position_ids"], use_cache=False).logits
            for ids in (batch["input_ids"], other)]
    assert torch.equal(rows[0][0, 5:], rows[1][0, 5:]) and not torch.equal(rows[0][0, :5], rows[1][0, :5])
    assert keeps_packed_apart(model)


def test_padded_rows_and_generation_are_those_of_sdpa():
    plain, model = make(), make()
    prefer_varlen(model, loop)
    ids = packed()["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    calls.clear()
    padded = [each(input_ids=ids, attention_mask=mask).logits for each in (model, plain)]
    assert torch.equal(*padded) and not calls
    for given in ({"attention_mask": mask}, {}):
        texts = [each.eval().generate(input_ids=ids, max_new_tokens=6, do_sample=False, **given)
                 for each in (model, plain)]
        assert torch.equal(*texts)


def test_under_autocast_the_kernel_computes_in_half():
    model, batch, types = make().float(), packed(), []

    def watched(*args, enable_gqa=False, **options):
        types.append({x.dtype for x in args[:3]})
        return loop(*args, enable_gqa=enable_gqa, **options)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        prefer_varlen(model, watched)
        causal_loss(model, LMHead.from_model(model), batch).total.backward()
    assert model.config._attn_implementation == VARLEN and all(each == {torch.bfloat16} for each in types)


def test_a_kernel_that_leaks_or_fails_is_not_taken(capsys):
    def joined(q, k, v, starts, *_, scale, enable_gqa=False, **__):
        return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=scale,
                                              enable_gqa=enable_gqa).transpose(0, 1)

    def wrong(*args, enable_gqa=False, **options):
        return -loop(*args, enable_gqa=enable_gqa, **options)

    def failing(*args, **options):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    for kernel, why in ((joined, "differ by"), (wrong, "differ by"), (failing, "only supports Ampere")):
        model = make()
        prefer_varlen(model, kernel)
        assert model.config._attn_implementation == "sdpa" and why in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "changes", "why"), [
    ("mistral", {"sliding_window": 4}, "sliding window"),
    ("llama", {"attention_dropout": 0.1}, "attention dropout"),
])
def test_models_that_it_does_not_fit_stay_with_sdpa(kind, changes, why, capsys):
    model = make(kind, **changes)
    prefer_varlen(model, loop)
    assert model.config._attn_implementation == "sdpa" and why in capsys.readouterr().out


def test_float32_the_cpu_and_other_choices_stay_as_they_are(capsys):
    model = make().float()
    prefer_varlen(model, loop)
    assert "not in torch.float32" in capsys.readouterr().out
    prefer_varlen(make())
    eager = make()
    eager.set_attn_implementation("eager")
    prefer_varlen(eager, loop)
    assert eager.config._attn_implementation == "eager" and capsys.readouterr().out == ""
