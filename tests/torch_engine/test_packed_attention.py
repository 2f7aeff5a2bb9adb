"""Attention by packed document, with a loop for torch's CUDA kernel, equals sdpa with a mask."""

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


def attend_by_document(q, k, v, starts_q, starts_k, longest_q, longest_k, *, scale, window_size, enable_gqa=False):
    """Compute torch.nn.attention.varlen.varlen_attn."""
    assert q.dtype == k.dtype == v.dtype and starts_q.dtype == torch.int32
    assert starts_q is starts_k and window_size == (-1, 0) and longest_q == starts_q.diff().max() == longest_k
    calls.append(starts_q)
    parts = []
    for start, end in zip(starts_q[:-1], starts_q[1:], strict=True):
        document = [x[start:end].transpose(0, 1) for x in (q, k, v)]
        parts.append(F.scaled_dot_product_attention(*document, is_causal=True, scale=scale, enable_gqa=enable_gqa))
    return torch.cat(parts, 1).transpose(0, 1)


def make(model_type: str = "llama", **changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**SMALL | changes), dtype=torch.bfloat16)
    calls.clear()
    return model.train()


def packed() -> dict[str, torch.Tensor]:
    """Return two rows: three documents followed by padding, and one document."""
    positions = torch.stack([torch.tensor([*range(5), *range(2), *range(3), 0, 0]), torch.arange(12)])
    ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = torch.where(positions > 0, ids, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_loss_and_gradients_equal_sdpa(model_type, adapted, capsys, monkeypatch):
    model = make(model_type).float()
    monkeypatch.setattr(attention, "_unsupported_reason", lambda model: None)  # which requires half precision
    if adapted:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False, r=4))

    def run():
        model.zero_grad()
        causal_loss(model, LMHead.from_model(model), packed()).total.backward()
        return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}

    expected = run()
    prefer_varlen(model, attend_by_document)
    assert "which agrees with sdpa" in capsys.readouterr().out and model.config._attn_implementation == VARLEN
    calls.clear()
    gradients = run()
    assert [call.tolist() for call in calls[-2:]] == [[0, 5, 7, 10, 11, 12, 24]] * 2 and calls[-1] is calls[-2]
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_documents_do_not_see_each_other():
    model, batch = make(), packed()
    prefer_varlen(model, attend_by_document)
    other = batch["input_ids"].clone()
    other[0, :5] = other[0, :5].flip(0)
    rows = [model(input_ids=ids, position_ids=batch["position_ids"], use_cache=False).logits
            for ids in (batch["input_ids"], other)]
    assert torch.equal(rows[0][0, 5:], rows[1][0, 5:]) and not torch.equal(rows[0][0, :5], rows[1][0, :5])
    assert keeps_packed_apart(model)


def test_padded_rows_and_generation_equal_sdpa():
    plain, model = make(), make()
    prefer_varlen(model, attend_by_document)
    ids = packed()["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    calls.clear()
    padded = [network(input_ids=ids, attention_mask=mask).logits for network in (model, plain)]
    assert torch.equal(*padded) and not calls
    for inputs in ({"attention_mask": mask}, {}):
        texts = [network.eval().generate(input_ids=ids, max_new_tokens=6, do_sample=False, **inputs)
                 for network in (model, plain)]
        assert torch.equal(*texts)


def test_under_autocast_the_kernel_gets_half_precision():
    model, batch, dtypes = make().float(), packed(), []

    def record_dtypes(*args, enable_gqa=False, **options):
        dtypes.append({x.dtype for x in args[:3]})
        return attend_by_document(*args, enable_gqa=enable_gqa, **options)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        prefer_varlen(model, record_dtypes)
        causal_loss(model, LMHead.from_model(model), batch).total.backward()
    assert model.config._attn_implementation == VARLEN and all(inputs == {torch.bfloat16} for inputs in dtypes)


def test_a_kernel_that_leaks_or_fails_is_not_used(capsys):
    def leak(q, k, v, starts, *_, scale, enable_gqa=False, **__):
        return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=scale,
                                              enable_gqa=enable_gqa).transpose(0, 1)

    def negate(*args, enable_gqa=False, **options):
        return -attend_by_document(*args, enable_gqa=enable_gqa, **options)

    def fail(*args, **options):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    for kernel, reason in ((leak, "differ by"), (negate, "differ by"), (fail, "only supports Ampere")):
        model = make()
        prefer_varlen(model, kernel)
        assert model.config._attn_implementation == "sdpa" and reason in capsys.readouterr().out


@pytest.mark.parametrize(("model_type", "changes", "reason"), [
    ("mistral", {"sliding_window": 4}, "sliding window"),
    ("llama", {"attention_dropout": 0.1}, "attention dropout"),
])
def test_unsupported_models_keep_sdpa(model_type, changes, reason, capsys):
    model = make(model_type, **changes)
    prefer_varlen(model, attend_by_document)
    assert model.config._attn_implementation == "sdpa" and reason in capsys.readouterr().out


def test_float32_cpu_and_explicit_attention_stay_unchanged(capsys):
    model = make().float()
    prefer_varlen(model, attend_by_document)
    assert "not in torch.float32" in capsys.readouterr().out
    prefer_varlen(make())
    eager = make()
    eager.set_attn_implementation("eager")
    prefer_varlen(eager, attend_by_document)
    assert eager.config._attn_implementation == "eager" and capsys.readouterr().out == ""
