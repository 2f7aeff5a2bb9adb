"""Dropout on torch: the bits of the reference, and what a row loses whatever stands beside it, in architectures."""

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


def made(name: str, attention: str | None = None, **changes) -> torch.nn.Module:
    auto, kind, fields = MODELS[name]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **fields, **changes})
    return auto.from_config(config, attn_implementation=attention).train()


def batch_of(lengths: tuple[int, ...], side: str = "right", length: int | None = None) -> dict[str, torch.Tensor]:
    """Rows of their own tokens; row n has number n."""
    length = length or max(lengths)
    columns = {name: np.zeros((len(lengths), length), np.int64) for name in ("input_ids", "attention_mask",
                                                                              "token_seeds")}
    for row, size in enumerate(lengths):
        where = slice(size) if side == "right" else slice(length - size, None)
        columns["input_ids"][row, where] = np.random.default_rng(row).integers(3, 50, size)
        columns["attention_mask"][row, where] = 1
        columns["token_seeds"][row, where] = reference.token_seeds(5, 0, row, np.arange(size))
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def outputs(model: torch.nn.Module, batch: dict[str, torch.Tensor], **inputs) -> torch.Tensor:
    """[B, T, ...] what the head makes of each token."""
    TokenDropout.from_model(model).begin(batch)
    found = model(input_ids=batch["input_ids"], **(inputs or {"attention_mask": batch["attention_mask"]}))
    return torch.stack([found.start_logits, found.end_logits], -1) if "start_logits" in found else found.logits


def test_masks_are_the_references_bits(monkeypatch):
    """Also where rows are cut into chunks, and several rows share one."""
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
def test_a_row_loses_the_same_alone_and_under_padding(name):
    model = made(name)
    TokenDropout(model)
    together, alone = batch_of((9, 5, 7)), {name: column[1:2, :5] for name, column in batch_of((9, 5)).items()}
    wanted, exact = in_both(lambda model: outputs(model, alone), model)
    for batch in (together, batch_of((3, 5), length=16)):
        assert_as_close(outputs(model, batch)[1:2, :5], wanted, exact)
    other = {**alone, "token_seeds": alone["token_seeds"] + 1}
    assert not torch.allclose(outputs(model, other), wanted, atol=1e-2)
    assert not torch.allclose(outputs(model.eval(), alone), wanted, atol=1e-2)


@every_model
def test_a_copy_of_a_network_computes_with_its_own_parameters(name):
    model = made(name)
    TokenDropout(model)
    copied = copy.deepcopy(model)
    outputs(copied, batch_of((5, 3))).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    assert any(param.grad is not None for param in copied.parameters())


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_padding_on_the_left_moves_no_mask(name):
    model = made(name)
    TokenDropout(model)
    on_right, on_left = batch_of((9, 5)), batch_of((9, 5), "left")
    positions = (on_left["attention_mask"].cumsum(1) - 1).clamp(min=0)
    inputs = {"attention_mask": on_left["attention_mask"]} | ({} if name == "opt" else {"position_ids": positions})
    wanted, exact = in_both(lambda model: outputs(model, on_right)[1, :5], model)
    assert_as_close(outputs(model, on_left, **inputs)[1, 4:], wanted, exact)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_packed_documents_lose_what_they_lose_apart(name):
    model = made(name)
    TokenDropout(model)
    apart = batch_of((9, 5))
    real = apart["attention_mask"].bool()
    packed = {column: values[real].unsqueeze(0) for column, values in apart.items()}
    positions = torch.cat([torch.arange(9), torch.arange(5)]).unsqueeze(0)
    found = outputs(model, packed, position_ids=positions, use_cache=False)[0]
    assert_as_close(found, *in_both(lambda model: outputs(model, apart)[real], model))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "opt", "albert"])
def test_eager_attention_loses_what_sdpa_loses(name):
    batch, sdpa, eager = batch_of((9, 5)), made(name, "sdpa"), made(name, "eager")
    TokenDropout(sdpa), TokenDropout(eager)
    real = batch["attention_mask"].bool()
    assert_as_close(outputs(sdpa, batch)[real], *in_both(lambda model: outputs(model, batch)[real], eager))


@pytest.mark.parametrize("name", ["gpt2", "llama", "albert"])
def test_a_second_run_of_a_block_loses_the_same(name):
    """Under gradient checkpointing, also where layers share weights and another batch came in between."""
    gradients = []
    for checkpointed in (False, True):
        model = made(name)
        dropout = TokenDropout(model)
        if checkpointed:
            enable_checkpointing(model, dropout.contexts)
        first, second = batch_of((9, 5)), batch_of((4, 4))
        second["token_seeds"] += 1
        total = outputs(model, first).square().mean()
        (total + outputs(model, second).square().mean()).backward()
        gradients.append({key: p.grad for key, p in model.named_parameters()})
    for key, wanted in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], wanted, msg=key)


@pytest.mark.parametrize("fused", [False, True])
def test_adapters_names_are_those_of_the_network(fused):
    """The base loses the same with an adapter that adds nothing, whose own input is dropped from by layer."""
    plain = made("gpt2")
    adapted = get_peft_model(copy.deepcopy(plain), LoraConfig(r=4, lora_dropout=0.3, target_modules=["c_attn"],
                                                              fan_in_fan_out=True, task_type="CAUSAL_LM")).train()
    if fused:
        fuse_adapters(adapted)
    TokenDropout(plain), TokenDropout(adapted)
    batch = batch_of((9, 5))
    torch.testing.assert_close(outputs(adapted, batch), outputs(plain, batch))
    for key, param in adapted.named_parameters():
        if "lora_B" in key:
            param.data.normal_()
    first = outputs(adapted, batch)
    torch.testing.assert_close(outputs(adapted, batch), first)
    x, layer = torch.ones(2, 9, 32), adapted.base_model.model.transformer.h[1].attn.c_attn.lora_dropout["default"]
    TokenDropout.from_model(adapted).begin(batch)
    site = reference.site_seed("transformer.h.1.attn.c_attn.lora_dropout")
    mask = reference.feature_mask(batch["token_seeds"].int().numpy(), site, 32, 0.3)
    np.testing.assert_allclose(layer(x).numpy(), mask * reference.keep_scale(0.3), rtol=1e-6)


def test_generation_finds_the_signature_it_reads():
    """Of prompts padded on the left transformers counts the positions if the network takes any."""
    plain, ours = made("gpt2").eval(), made("gpt2").eval()
    TokenDropout(ours)
    prompts = batch_of((9, 5), "left")
    found, wanted = (model.generate(prompts["input_ids"], attention_mask=prompts["attention_mask"], max_new_tokens=8)
                     for model in (ours, plain))
    assert torch.equal(found, wanted)


def test_what_cannot_be_told_apart_is_told(capsys):
    """A tensor without rows, batches without seeds, once each, and a kernel that draws itself."""
    model = made("gpt2")
    dropout = TokenDropout(model)
    dropout.begin(batch_of((9, 5)))
    for _ in range(2):
        assert 0.05 < (model.transformer.drop(torch.ones(7, 11, 13)) == 0).float().mean() < 0.2
    without = {name: column for name, column in batch_of((9, 5)).items() if name != "token_seeds"}
    outputs(model, without), outputs(model, without)
    printed = capsys.readouterr().out
    model.config._attn_implementation_internal = "flash_attention_2"
    TokenDropout(model)
    assert "flash_attention_2 makes its own attention masks" in capsys.readouterr().out
    assert printed.count("transformer.drop has an input of shape [7, 11, 13]") == 1 == printed.count("no token_seeds")


def test_rows_as_a_whole_and_tokens_in_one_line():
    model = made("gpt2")
    dropout = TokenDropout(model)
    dropout.begin(batch_of((9, 5)))
    flat = model.transformer.drop(torch.ones(18, 8))
    dropout.begin(batch_of((9, 5)))
    torch.testing.assert_close(model.transformer.drop(torch.ones(2, 9, 8)), flat.view(2, 9, 8))
    dropout.begin(batch_of((9, 5)))
    pooled = model.transformer.drop(torch.ones(2, 512))
    dropout.begin(batch_of((3, 5), length=20))
    torch.testing.assert_close(model.transformer.drop(torch.ones(2, 512))[1], pooled[1])
    assert (pooled[0] != pooled[1]).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_compiled_layers_lose_the_same(name):
    plain, compiled = made(name), made(name)
    TokenDropout(plain), TokenDropout(compiled, compiled=True)
    compile_layers(compiled)
    found = outputs(compiled, batch_of((9, 5)))
    assert_as_close(found, *in_both(lambda model: outputs(model, batch_of((9, 5))), plain))


def test_the_head_of_a_masked_lm_drops_nothing(capsys):
    """It sees masked positions of many rows, so their number in it is no position; an adapter's is told."""
    batch = batch_of((9, 5))
    for targets, told in (["query"], False), (["query", "transform.dense"], True):
        model = get_peft_model(made("bert"), LoraConfig(r=4, lora_dropout=0.9, target_modules=targets)).train()
        TokenDropout(model).begin(batch)
        head = MLMHead(model)
        assert ("the head runs on masked positions" in capsys.readouterr().out) is told
        for key, param in model.named_parameters():
            if "lora_B" in key:
                param.data.normal_()
        hidden = torch.randn(6, 32)
        wanted, exact = in_both(lambda model, rows=hidden[2:4]: MLMHead(model)(rows.to(model.dtype)), model)
        assert_as_close(head(hidden)[2:4], wanted, exact)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_nothing_is_dropped_while_it_is_off(name, attention):
    """In attention either, which in eager is a function's, in sdpa the kernel's own."""
    model, batch = made(name, attention), batch_of((9, 6))
    dropout = TokenDropout(model)
    dropout.begin(batch)
    dropped = outputs(model, batch)
    with dropout.off():
        found = outputs(model, batch)
    exact = outputs(model.eval(), batch)
    assert torch.equal(found, exact) and not torch.allclose(dropped, exact, atol=1e-2)


def test_blocks_that_get_another_class_are_computed_anew_as_before():
    """As FSDP2 does with each."""
    network, calls = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt2"](**GPT2)).train(), []
    TokenDropout(network)
    enable_checkpointing(network)
    for block in network.transformer.h:
        again = block._gradient_checkpointing_func
        block._gradient_checkpointing_func = lambda *args, again=again: calls.append(1) or again(*args)
        block.__class__ = type("FSDPBlock", (type(block),), {})
    network(torch.ones(1, 4, dtype=torch.long))
    assert len(calls) == len(network.transformer.h)
