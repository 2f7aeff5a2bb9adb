"""Dropout on torch: the bits of the reference, independent of the other rows of a batch, in many architectures."""

import copy

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForQuestionAnswering
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lmmods.core import dropout as reference
from lmmods.torch_engine.nn.building import compile_layers, enable_checkpointing
from lmmods.torch_engine.nn.dropout import Dropped, TokenDropout, attention_mask, feature_mask
from lmmods.torch_engine.nn.lora import fuse_adapters
from lmmods.torch_engine.tasks.mlm import MLMHead
from tests.closeness import assert_as_close, in_both

SITE = reference.site_seed("here")
SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64, "initializer_range": 0.3}
GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
LLAMA = {**SMALL, "num_key_value_heads": 2, "attention_dropout": 0.2}
MODELS = {
    "gpt2": (AutoModelForCausalLM, "gpt2", GPT2),
    "llama": (AutoModelForCausalLM, "llama", LLAMA),
    "opt": (AutoModelForCausalLM, "opt", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "attention_dropout": 0.2}),
    "gpt_neo": (AutoModelForCausalLM, "gpt_neo", {**SMALL, "num_layers": 2, "num_heads": 4, "attention_dropout": 0.2,
                                                  "attention_types": [[["global"], 2]], "embed_dropout": 0.1,
                                                  "resid_dropout": 0.1}),
    "bert": (AutoModelForMaskedLM, "bert", SMALL),
    "albert": (AutoModelForMaskedLM, "albert", {**SMALL, "embedding_size": 16, "hidden_dropout_prob": 0.1,
                                                "attention_probs_dropout_prob": 0.1}),
    "deberta-v2": (AutoModelForMaskedLM, "deberta-v2", {**SMALL, "relative_attention": True, "share_att_key": True,
                                                        "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}),
    "distilbert": (AutoModelForQuestionAnswering, "distilbert", {"vocab_size": 50, "dim": 32, "hidden_dim": 48,
                                                                 "n_layers": 2, "n_heads": 4}),
}
every_model = pytest.mark.parametrize("name", MODELS)


def make_model(name: str, attention: str | None = None, **changes) -> torch.nn.Module:
    auto, model_type, fields = MODELS[name]
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = CONFIG_MAPPING[model_type](**{**special, **fields, **changes})
    return auto.from_config(config, attn_implementation=attention).train()


def make_batch(lengths: tuple[int, ...], side: str = "right", length: int | None = None) -> dict[str, torch.Tensor]:
    """Return rows with their own tokens; row n has index n."""
    length = length or max(lengths)
    columns = {name: np.zeros((len(lengths), length), np.int64) for name in ("input_ids", "attention_mask",
                                                                              "token_seeds")}
    for row, size in enumerate(lengths):
        positions = slice(size) if side == "right" else slice(length - size, None)
        columns["input_ids"][row, positions] = np.random.default_rng(row).integers(3, 50, size)
        columns["attention_mask"][row, positions] = 1
        columns["token_seeds"][row, positions] = reference.token_seeds(5, 0, row, np.arange(size))
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def compute_outputs(model: torch.nn.Module, batch: dict[str, torch.Tensor], **inputs) -> torch.Tensor:
    """Return the head's output [B, T, ...] for each token."""
    TokenDropout.from_model(model).begin(batch)
    result = model(input_ids=batch["input_ids"], **(inputs or {"attention_mask": batch["attention_mask"]}))
    return torch.stack([result.start_logits, result.end_logits], -1) if "start_logits" in result else result.logits


def test_masks_have_the_bits_of_the_reference(monkeypatch):
    """Also with several chunks per row or several rows per chunk."""
    seeds = reference.token_seeds(42, 3, np.arange(3)[:, None], np.arange(13))
    tokens = torch.from_numpy(seeds)
    for chunk in (2**15, 400, 30):
        monkeypatch.setattr("lmmods.torch_engine.nn.dropout.CHUNK", chunk)
        for rate in (0.1, 0.5):
            for num in (1, 6, 9):
                np.testing.assert_array_equal(feature_mask(tokens.flatten(), SITE, num, rate).view(3, 13, num),
                                              reference.feature_mask(seeds, SITE, num, rate))
                np.testing.assert_array_equal(attention_mask(tokens, SITE, num, rate),
                                              reference.attention_mask(seeds, SITE, num, rate))


def test_kept_features_and_their_gradients_are_scaled():
    x = torch.ones(4, 6, requires_grad=True)
    kept = torch.rand(4, 6) > 0.3
    dropped = Dropped.apply(x, kept, 0.3)
    torch.testing.assert_close(dropped, kept * reference.keep_scale(0.3))
    (3 * dropped).sum().backward()
    torch.testing.assert_close(x.grad, 3 * kept * reference.keep_scale(0.3))


@every_model
def test_a_rows_dropout_is_the_same_alone_and_with_padding(name):
    model = make_model(name)
    TokenDropout(model)
    together, alone = make_batch((9, 5, 7)), {name: column[1:2, :5] for name, column in make_batch((9, 5)).items()}
    expected, exact = in_both(lambda model: compute_outputs(model, alone), model)
    for batch in (together, make_batch((3, 5), length=16)):
        assert_as_close(compute_outputs(model, batch)[1:2, :5], expected, exact)
    other = {**alone, "token_seeds": alone["token_seeds"] + 1}
    assert not torch.allclose(compute_outputs(model, other), expected, atol=1e-2)
    assert not torch.allclose(compute_outputs(model.eval(), alone), expected, atol=1e-2)


@every_model
def test_a_copy_of_a_network_computes_with_its_own_parameters(name):
    model = make_model(name)
    TokenDropout(model)
    copied = copy.deepcopy(model)
    compute_outputs(copied, make_batch((5, 3))).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    assert any(param.grad is not None for param in copied.parameters())


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_padding_on_the_left_does_not_change_dropout(name):
    model = make_model(name)
    TokenDropout(model)
    on_right, on_left = make_batch((9, 5)), make_batch((9, 5), "left")
    positions = (on_left["attention_mask"].cumsum(1) - 1).clamp(min=0)
    inputs = {"attention_mask": on_left["attention_mask"]} | ({} if name == "opt" else {"position_ids": positions})
    expected, exact = in_both(lambda model: compute_outputs(model, on_right)[1, :5], model)
    assert_as_close(compute_outputs(model, on_left, **inputs)[1, 4:], expected, exact)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_packed_documents_have_the_same_dropout_as_separate_ones(name):
    model = make_model(name)
    TokenDropout(model)
    apart = make_batch((9, 5))
    real = apart["attention_mask"].bool()
    packed = {column: values[real].unsqueeze(0) for column, values in apart.items()}
    positions = torch.cat([torch.arange(9), torch.arange(5)]).unsqueeze(0)
    outputs = compute_outputs(model, packed, position_ids=positions, use_cache=False)[0]
    assert_as_close(outputs, *in_both(lambda model: compute_outputs(model, apart)[real], model))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "opt", "albert"])
def test_eager_attention_has_the_same_dropout_as_sdpa(name):
    batch, sdpa, eager = make_batch((9, 5)), make_model(name, "sdpa"), make_model(name, "eager")
    TokenDropout(sdpa), TokenDropout(eager)
    real = batch["attention_mask"].bool()
    assert_as_close(compute_outputs(sdpa, batch)[real],
                    *in_both(lambda model: compute_outputs(model, batch)[real], eager))


@pytest.mark.parametrize("name", ["gpt2", "llama", "albert"])
def test_recomputed_blocks_have_the_same_dropout(name):
    """Gradient checkpointing, also with shared weights and another batch in between."""
    gradients = []
    for checkpointed in (False, True):
        model = make_model(name)
        dropout = TokenDropout(model)
        if checkpointed:
            enable_checkpointing(model, dropout.contexts)
        first, second = make_batch((9, 5)), make_batch((4, 4))
        second["token_seeds"] += 1
        total = compute_outputs(model, first).square().mean()
        (total + compute_outputs(model, second).square().mean()).backward()
        gradients.append({key: p.grad for key, p in model.named_parameters()})
    for key, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], expected, msg=key)


@pytest.mark.parametrize("fused", [False, True])
def test_an_adapter_does_not_change_the_dropout_of_its_base(fused):
    """Layers keep their names. The adapter's own dropout depends on the layer."""
    plain = make_model("gpt2")
    adapted = get_peft_model(copy.deepcopy(plain), LoraConfig(r=4, lora_dropout=0.3, target_modules=["c_attn"],
                                                              fan_in_fan_out=True, task_type="CAUSAL_LM")).train()
    if fused:
        fuse_adapters(adapted)
    TokenDropout(plain), TokenDropout(adapted)
    batch = make_batch((9, 5))
    torch.testing.assert_close(compute_outputs(adapted, batch), compute_outputs(plain, batch))
    for key, param in adapted.named_parameters():
        if "lora_B" in key:
            param.data.normal_()
    first = compute_outputs(adapted, batch)
    torch.testing.assert_close(compute_outputs(adapted, batch), first)
    x, layer = torch.ones(2, 9, 32), adapted.base_model.model.transformer.h[1].attn.c_attn.lora_dropout["default"]
    TokenDropout.from_model(adapted).begin(batch)
    site = reference.site_seed("transformer.h.1.attn.c_attn.lora_dropout")
    mask = reference.feature_mask(batch["token_seeds"].int().numpy(), site, 32, 0.3)
    np.testing.assert_allclose(layer(x).numpy(), mask * reference.keep_scale(0.3), rtol=1e-6)


def test_generation_still_sees_the_forward_signature():
    """For prompts padded on the left, transformers passes positions if the forward accepts them."""
    plain, model_with_dropout = make_model("gpt2").eval(), make_model("gpt2").eval()
    TokenDropout(model_with_dropout)
    prompts = make_batch((9, 5), "left")
    result, expected = (model.generate(prompts["input_ids"], attention_mask=prompts["attention_mask"], max_new_tokens=8)
                        for model in (model_with_dropout, plain))
    assert torch.equal(result, expected)


def test_dropout_that_depends_on_the_batch_is_reported(capsys):
    """A tensor without rows and batches without seeds, once each, and a kernel that makes its own masks."""
    model = make_model("gpt2")
    dropout = TokenDropout(model)
    dropout.begin(make_batch((9, 5)))
    for _ in range(2):
        assert 0.05 < (model.transformer.drop(torch.ones(7, 11, 13)) == 0).float().mean() < 0.2
    without = {name: column for name, column in make_batch((9, 5)).items() if name != "token_seeds"}
    compute_outputs(model, without), compute_outputs(model, without)
    printed = capsys.readouterr().out
    model.config._attn_implementation_internal = "flash_attention_2"
    TokenDropout(model)
    assert "flash_attention_2 makes its own dropout masks" in capsys.readouterr().out
    assert printed.count("transformer.drop has an input of shape [7, 11, 13]") == 1 == printed.count("no token_seeds")


def test_pooled_rows_and_flattened_tokens_have_row_wise_dropout():
    model = make_model("gpt2")
    dropout = TokenDropout(model)
    dropout.begin(make_batch((9, 5)))
    flat = model.transformer.drop(torch.ones(18, 8))
    dropout.begin(make_batch((9, 5)))
    torch.testing.assert_close(model.transformer.drop(torch.ones(2, 9, 8)), flat.view(2, 9, 8))
    dropout.begin(make_batch((9, 5)))
    pooled = model.transformer.drop(torch.ones(2, 512))
    dropout.begin(make_batch((3, 5), length=20))
    torch.testing.assert_close(model.transformer.drop(torch.ones(2, 512))[1], pooled[1])
    assert (pooled[0] != pooled[1]).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_compiled_layers_have_the_same_dropout(name):
    plain, compiled = make_model(name), make_model(name)
    TokenDropout(plain), TokenDropout(compiled, compiled=True)
    compile_layers(compiled)
    outputs = compute_outputs(compiled, make_batch((9, 5)))
    assert_as_close(outputs, *in_both(lambda model: compute_outputs(model, make_batch((9, 5))), plain))


def test_the_head_of_a_masked_lm_has_no_dropout(capsys):
    """It gets masked positions of many rows, so an index in it is not a position. Adapter dropout there is reported."""
    batch = make_batch((9, 5))
    for targets, is_reported in (["query"], False), (["query", "transform.dense"], True):
        model = get_peft_model(make_model("bert"), LoraConfig(r=4, lora_dropout=0.9, target_modules=targets)).train()
        TokenDropout(model).begin(batch)
        head = MLMHead(model)
        assert ("the head runs on masked positions" in capsys.readouterr().out) is is_reported
        for key, param in model.named_parameters():
            if "lora_B" in key:
                param.data.normal_()
        hidden = torch.randn(6, 32)
        expected, exact = in_both(lambda model, rows=hidden[2:4]: MLMHead(model)(rows.to(model.dtype)), model)
        assert_as_close(head(hidden)[2:4], expected, exact)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_dropout_is_disabled_while_it_is_off(name, attention):
    """Also in attention, where eager calls a function and sdpa has its own dropout."""
    model, batch = make_model(name, attention), make_batch((9, 6))
    dropout = TokenDropout(model)
    dropout.begin(batch)
    dropped = compute_outputs(model, batch)
    with dropout.off():
        result = compute_outputs(model, batch)
    expected = compute_outputs(model.eval(), batch)
    assert torch.equal(result, expected) and not torch.allclose(dropped, expected, atol=1e-2)


def test_blocks_are_still_recomputed_after_their_class_changes():
    """FSDP2 changes the class of every block."""
    network, calls = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt2"](**GPT2)).train(), []
    TokenDropout(network)
    enable_checkpointing(network)
    for block in network.transformer.h:
        recompute = block._gradient_checkpointing_func
        block._gradient_checkpointing_func = lambda *args, recompute=recompute: calls.append(1) or recompute(*args)
        block.__class__ = type("FSDPBlock", (type(block),), {})
    network(torch.ones(1, 4, dtype=torch.long))
    assert len(calls) == len(network.transformer.h)
