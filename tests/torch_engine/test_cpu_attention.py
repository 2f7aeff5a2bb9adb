"""On CPUs, attention of short rows is computed in float32, whatever the precision of the network."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM

from lmmods.torch_engine.nn import attention
from lmmods.torch_engine.nn.attention import CPU, prefer_cpu_kernels
from lmmods.torch_engine.nn.cpu_kernels import fast_products, stays_float32, thin_products, uses_onednn
from tests.closeness import assert_as_close, in_both

SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0,
         "num_attention_heads": 4, "max_position_embeddings": 64}
PADDED = {"attention_mask": (torch.arange(12) < torch.tensor([[12], [7]])).long()}
PACKED = {"position_ids": torch.tensor([[*range(5), *range(7)]] * 2)}
CASES = {
    "llama, padded": ("llama", {"num_key_value_heads": 2}, PADDED),
    "llama, packed": ("llama", {"num_key_value_heads": 2}, PACKED),
    "mistral, sliding": ("mistral", {"num_key_value_heads": 2, "sliding_window": 4}, {}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}, {}),
    "bert, padded": ("bert", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, PADDED),
}


def make(name: str, fields: dict) -> torch.nn.Module:
    torch.manual_seed(0)
    auto = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    return auto.from_config(CONFIG_MAPPING[name](**SMALL | fields)).train()


def run_step(model: torch.nn.Module, inputs: dict, autocast: bool) -> torch.Tensor:
    """Return the loss and the gradients, concatenated."""
    model.zero_grad()
    ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=ids, **inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
    loss.backward()
    return torch.cat([loss.detach().reshape(1), *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_sdpa(case):
    name, fields, inputs = CASES[case]
    model = make(name, fields)
    exact, reference = run_step(model, inputs, False), run_step(model, inputs, True)
    prefer_cpu_kernels(model, "bf16-mixed")
    assert model.config._attn_implementation == CPU
    torch.testing.assert_close(run_step(model, inputs, False), exact, rtol=0, atol=1e-7)
    result = run_step(model, inputs, True)
    assert not torch.equal(result, reference)
    assert (result - exact).norm() < 2 * (reference - exact).norm()  # other operations round too


@pytest.mark.parametrize("case", CASES)
def test_matrix_products_equal_the_flash_kernel(case):
    name, fields, inputs = CASES[case]
    model = make(name, fields)
    flash, exact = in_both(lambda model: run_step(model, inputs, False), model)
    prefer_cpu_kernels(model, "32-true")
    with fast_products(torch.device("cpu")):
        assert uses_onednn() == stays_float32()
        assert_as_close(run_step(model, inputs, False), flash, exact)


@pytest.mark.parametrize("mask", ["causal", "none", "bool", "float", "one query"])
@pytest.mark.parametrize("groups", [1, 3])
def test_attention_by_matrix_products_equals_torch(mask, groups):
    """Output and gradients, with grouped queries and padded rows."""
    generator = torch.Generator().manual_seed(0)
    length, size = (1 if mask == "one query" else 7), {"key": 8, "value": 5}
    q = torch.randn(2, 2 * groups, length, 8, generator=generator)
    k, v = (torch.randn(2, 2, 7, size[name], generator=generator) for name in ("key", "value"))
    allowed = torch.ones(2, 1, length, 7, dtype=torch.bool)
    if mask in ("causal", "bool", "float"):
        allowed = allowed.tril()
    if mask in ("bool", "float"):
        allowed[1, ..., :2] = False  # padding on the left, which attends to nothing
    attention_mask = {"bool": allowed, "float": torch.zeros(allowed.shape).masked_fill(~allowed, -1e9)}.get(mask)
    weights = torch.randn(2, 2 * groups, length, 5, generator=generator)
    weights[1, :, :2] *= mask not in ("bool", "float")

    def run(function, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = function(*inputs)
        return [(out * weights).sum(), *torch.autograd.grad((out * weights.to(dtype)).sum(), inputs)]

    def attend_by_torch(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, allowed, scale=0.3, enable_gqa=True)

    def attend(q, k, v):
        module = torch.nn.Module()
        module.is_causal = mask == "causal"
        with fast_products(torch.device("cpu")):
            return attention._attend_on_cpu(module, q, k, v, attention_mask, scaling=0.3)[0].transpose(1, 2)

    assert_as_close(run(attend, torch.float32), run(attend_by_torch, torch.float32),
                    run(attend_by_torch, torch.float64))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_the_kernel_gets_float32_up_to_a_length(monkeypatch, stored):
    """Its output has the dtype of the computation."""
    monkeypatch.setattr(attention, "FLOAT32_LENGTH", 12)
    model = make("llama", {}).to(stored)
    prefer_cpu_kernels(model, "bf16-mixed")
    input_dtypes, kernel = [], torch.nn.functional.scaled_dot_product_attention
    last = model.model.layers[-1].self_attn.o_proj
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention",
                        lambda q, *rest, **options: input_dtypes.append(q.dtype) or kernel(q, *rest, **options))
    output_dtypes = []
    last.register_forward_pre_hook(lambda _, args: output_dtypes.append(args[0].dtype))
    for length in (12, 13):
        with torch.autocast("cpu", torch.bfloat16, enabled=stored == torch.float32):
            model(input_ids=torch.arange(length).unsqueeze(0))
    assert input_dtypes[:2] == [torch.float32] * 2 and output_dtypes == [torch.bfloat16] * 2
    assert input_dtypes[2:] == [stored] * 2  # autocast, if enabled, casts after this


def test_other_attention_implementations_stay():
    model = make("llama", {})
    model.set_attn_implementation("eager")
    prefer_cpu_kernels(model, "bf16-mixed")
    assert model.config._attn_implementation == "eager"


def test_a_single_query_uses_thin_products(monkeypatch):
    if not stays_float32():
        pytest.skip("this processor's fast products are not in float32")
    onednn_used, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *args: onednn_used.append(uses_onednn()) or bmm(*args))
    model = make("llama", {}).eval()
    prefer_cpu_kernels(model, "32-true")
    ids = torch.arange(3, 15)[None]
    with torch.no_grad(), fast_products(torch.device("cpu")):
        with thin_products():
            assert not uses_onednn()
        cache = model(ids[:, :-1]).past_key_values
        assert onednn_used and all(onednn_used)
        onednn_used.clear()
        logits = model(ids[:, -1:], past_key_values=cache).logits
        assert onednn_used and not any(onednn_used) and uses_onednn()
    with torch.no_grad():
        torch.testing.assert_close(logits[:, 0], model(ids).logits[:, -1], rtol=0, atol=1e-6)
