"""Embeddings of new tokens that train in addition to an adapter, as in PEFT and in the torch engine."""

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from test_lora import TASKS, logits_of
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from jax_engine.distributed.tree import flatten, merge
from jax_engine.models import hub
from jax_engine.models import lora as adapters
from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.core.settings import LoRA
from lmmods.runs.checkpoint import read_checkpoint
from lmmods.runs.folder import RunFolder
from lmmods.torch_engine.nn.loading import resize_embeddings
from lmmods.torch_engine.nn.lora import add_lora, continue_adapter
from tests.finished_runs import TIMED, assert_same_run, rows

TOKENS = [36, 5, 30]  # unordered, and in the batch


def add_adapters(ref, lora: LoRA):
    """Return the torch engine's model, the JAX network and its parameters: the same base with new adapters."""
    net = hub.network(ref.net.config, ref.head, lora=lora, rows=adapters.trainable_rows(ref.net, lora, TOKENS))
    return (add_lora(copy.deepcopy(ref.torch), lora, TOKENS, torch.float32, TASKS[ref.head]).eval(), net,
            adapters.add_adapter(net, ref.params, 0))


ENDS = {"llama": ("model.embed_tokens", "lm_head"), "gpt2": ("transformer.wte", "lm_head"),
        "bert": ("bert.embeddings.word_embeddings", None)}
CASES = [
    ("llama", "causal", LoRA(rank=4, alpha=8, targets=["q_proj"]), dict.fromkeys(ENDS["llama"], TOKENS)),
    ("gpt2", "causal", LoRA(rank=4, alpha=8, targets=["c_attn"], dora=True), TOKENS),
    ("bert", "qa", LoRA(rank=4, alpha=8, targets=["query"]), TOKENS),
    ("llama", "causal", LoRA(rank=4, alpha=8, targets=["q_proj"], modules_to_save=["lm_head"]), TOKENS),
    ("gpt2", "causal", LoRA(rank=4, alpha=8, targets=["c_attn"], modules_to_save=["wte"]), {"lm_head": TOKENS}),
    ("gpt2", "causal", LoRA(rank=4, alpha=8, targets=["c_attn"], modules_to_save=["wte", "lm_head"]), None),
]


@pytest.mark.parametrize(("name", "head", "lora", "indices"), CASES,
                         ids=["untied", "tied", "qa", "full-head", "full-embedding", "full-both"])
def test_logits_gradients_names_and_folders_equal_pefts(make_ref, name, head, lora, indices, tmp_path):
    ref = make_ref(name, head)
    model, net, fresh = add_adapters(ref, lora)
    batch = ref.batch()
    batch["input_ids"][0, :6] = TOKENS * 2
    real = batch["attention_mask"] > 0
    assert model.peft_config["default"].trainable_token_indices == indices
    names = {key: p for key, p in model.named_parameters() if p.requires_grad}
    trained, frozen = net.split(fresh)
    initial = net.to_torch(trained)
    assert list(initial) == list(names)  # in the order of checkpoints
    assert all(np.array_equal(initial[key], p.detach().numpy()) for key, p in names.items() if "qa_outputs" not in key)
    torch.manual_seed(3)
    with torch.no_grad():
        for p in names.values():
            p.copy_(torch.randn_like(p) * 0.2)
    trained = net.from_torch({key: p.detach().numpy() for key, p in names.items()})

    def loss(trained):
        params = merge(trained, frozen)
        logits = net.logits(params, net.hidden(params, batch))
        return jnp.where(real[..., None], jnp.tanh(logits), 0).sum(), logits

    (_, actual_logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(trained)
    expected_logits = logits_of(model, batch)
    expected_logits[torch.tensor(real)].tanh().sum().backward()
    expected_logits = expected_logits.detach().numpy()
    assert np.abs(np.asarray(actual_logits) - expected_logits)[real].max() <= 1e-4 * np.abs(expected_logits).max()
    largest = max(p.grad.abs().max().item() for p in names.values())
    for key, gradient in net.to_torch(grads).items():
        expected = names[key].grad.numpy()
        assert np.abs(gradient - expected).max() <= 1e-4 * max(np.abs(expected).max(), 1e-3 * largest), key
    assert {key for key in dict(model.named_parameters()) if "token_adapter.base_layer" in key} <= set(
        net.to_torch(frozen)) | {"base_model.model.transformer.wte.weight"}

    adapters.save_adapter(net, merge(trained, frozen), tmp_path / "jax", base=str(ref.folder))
    model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    by_jax, by_peft = (load_file(tmp_path / writer / "adapter_model.safetensors") for writer in ("jax", "peft"))
    assert by_jax.keys() == by_peft.keys() and all(torch.equal(by_jax[key], by_peft[key]) for key in by_jax)
    settings = [json.loads((tmp_path / writer / "adapter_config.json").read_text()) for writer in ("jax", "peft")]
    assert settings[0]["trainable_token_indices"] == settings[1]["trainable_token_indices"] == indices
    in_peft = PeftModel.from_pretrained(copy.deepcopy(ref.torch), tmp_path / "jax").eval()
    assert torch.equal(logits_of(in_peft, batch), logits_of(model, batch))
    read_lora = adapters.adapter_settings(tmp_path / "peft", ref.net)
    read_rows = adapters.adapter_rows(ref.net, read_lora, tmp_path / "peft")
    reloaded = hub.network(ref.net.config, head, lora=read_lora, rows=read_rows)
    loaded = flatten(adapters.load_adapter(reloaded, tmp_path / "peft"))
    assert loaded.keys() == flatten(trained).keys()
    assert all(np.array_equal(leaf, flatten(trained)[path]) for path, leaf in loaded.items())


def test_both_engines_reject_new_tokens_that_peft_cannot_train(make_ref):
    for ref, lora, message in (
        (make_ref("bert", "masked"), LoRA(rank=2, targets=["query"]), "the output layer cls.predictions.* has a bias"),
        (make_ref("gpt2", "causal"), LoRA(rank=2, targets=["c_attn"], modules_to_save=["lm_head"]),
         "lm_head trains fully, but of transformer.wte.*Add transformer.wte too, or remove lm_head"),
    ):
        with pytest.raises(UserError, match=message):
            adapters.trainable_rows(ref.net, lora, TOKENS)
        with pytest.raises(UserError, match=message):
            add_lora(copy.deepcopy(ref.torch), lora, TOKENS, torch.float32)
        assert adapters.trainable_rows(ref.net, lora, []) == {}


@pytest.mark.parametrize(("indices", "message"), [
    ([5, 37], "an embedding for token 37, but the model has 37 tokens. Set data.tokenizer"),
    ({"embed_tokens": [5], "lm_head": [40, 6]}, "an embedding for token 40"),
    ({"embed_tokens": [5], "q_proj": [6]}, "has trainable_token_indices: .*, which the JAX engine does not support"),
])
def test_an_adapter_with_unsupported_token_indices_is_rejected(make_ref, indices, message, tmp_path):
    ref, lora = make_ref("llama", "causal"), LoRA(rank=2, targets=["q_proj"])
    net = hub.network(ref.net.config, "causal", lora=lora)
    adapters.save_adapter(net, adapters.add_adapter(net, ref.params, 0), tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "trainable_token_indices": indices}))
    with pytest.raises(UserError, match=message):
        adapters.adapter_rows(ref.net, lora, tmp_path)
    if "JAX" not in message:
        with pytest.raises(UserError, match=message):
            continue_adapter(copy.deepcopy(ref.torch), str(tmp_path), torch.float32)


def test_token_indices_are_read_as_in_peft(make_ref, tmp_path):
    """Tables are named by their suffix, two tied ones count as one, and a list means the embedding."""
    for name, indices, expected in (
        ("llama", {"lm_head": [7], "embed_tokens": [5, 6]}, {"lm_head": [7], "model.embed_tokens": [5, 6]}),
        ("llama", [5], {"model.embed_tokens": [5]}),
        ("gpt2", {"wte": [5], "lm_head": [5]}, {"transformer.wte": [5]}),
        ("gpt2", None, {}),
    ):
        lora = LoRA(rank=2, targets=["q_proj" if name == "llama" else "c_attn"])
        settings = {"peft_type": "LORA", "trainable_token_indices": indices}
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        assert adapters.adapter_rows(make_ref(name, "causal").net, lora, tmp_path) == expected


CHAT = {"data__init_args__template": "chatml", "data__init_args__pad_token": "<pad>",
        "data__init_args__add_tokens": ["<|im_start|>", "<|im_end|>"],
        "data__init_args__pad_to_multiple_of": 128, "data__init_args__batch_size": 2,
        "trainer__accumulate_grad_batches": 2, "trainer__gradient_clip_val": 0.5, "trainer__max_steps": 10,
        "trainer__val_check_interval": 20, "checkpoint": {"every_n_steps": 5, "keep_last": 9},
        "model__init_args__optimizer": {"lr": 0.003, "weight_decay": 0.1, "schedule": "linear", "warmup": 2},
        "model__init_args__lora": {"rank": 4}}
NEW = [321, 322]  # 320 is the padding token, which has nothing to learn
LOGGED = TIMED | {"train/epoch"}


@pytest.fixture
def changes(shared, tokenizer_folder):
    """Return a function that returns changes of a recipe: `tied`, not quantised; `untied`, in nf4 and packed."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)

    def llama(tied: bool) -> str:
        def fill(folder):
            torch.manual_seed(0)
            LlamaForCausalLM(LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1,
                eos_token_id=2, initializer_range=0.2, tie_word_embeddings=tied)).save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        return str(shared(f"chat-base-{tied}", fill))

    return lambda name: CHAT | {"model__init_args__pretrained": llama(name == "tied"), **({
        "model__init_args__quantize": None} if name == "tied" else {"data__init_args__packing": True})}


@pytest.fixture(params=["tied", "untied"])
def runs(request, finished, changes):
    """Return the finished runs of a recipe on torch and on JAX."""
    return tuple(finished(engine=engine, **changes(request.param)) for engine in ("torch", "jax"))


@pytest.mark.slow
def test_both_engines_train_the_same_rows(runs):
    on_torch, on_jax = runs
    for row, expected in zip(rows(on_jax), rows(on_torch), strict=True):
        assert row["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-5)
        assert row == pytest.approx(expected, rel=1e-4)
    contents = [read_checkpoint(run.resolve("last")) for run in runs]
    assert contents[0]["param_names"] == contents[1]["param_names"]
    weights, expected = (load_file(run.model / "adapter_model.safetensors") for run in (on_jax, on_torch))
    assert weights.keys() == expected.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(weight, expected[key], rtol=1e-3, atol=2e-5)
    settings = [json.loads((run.model / "adapter_config.json").read_text())["trainable_token_indices"] for run in runs]
    tied = "base_model.model.lm_head.token_adapter.trainable_tokens_delta" not in weights
    assert settings == [NEW if tied else {"model.embed_tokens": NEW, "lm_head": NEW}] * 2


def test_peft_and_merge_read_the_adapter_that_jax_writes(runs, changes, tmp_path):
    _, run = runs
    base = json.loads((run.model / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = AutoModelForCausalLM.from_pretrained(base)
    before = model.get_input_embeddings().weight.detach().mean(0)
    resize_embeddings(model, 323)
    model = PeftModel.from_pretrained(model, run.model)
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        first, second = table.weight[NEW]
        assert all((row - before).abs().max() > 1e-3 for row in (first, second))
        assert (first - second).abs().max() > 1e-3  # they started equal
    assert main(["merge", "--run", str(run.root), "--out", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.get_input_embeddings().weight.shape[0] == 323
    assert torch.equal(merged.get_output_embeddings().weight[NEW], model.get_output_embeddings().weight[NEW])


@pytest.mark.slow
def test_each_engine_starts_from_the_others_adapter(runs, changes, recipe, tmp_path):
    """With the tokens from its folder: metrics equal those of the run that wrote it, and answers are the same."""
    answers = []
    for engine, run in zip(("jax", "torch"), runs, strict=True):
        base = json.loads((run.model / "adapter_config.json").read_text())["base_model_name_or_path"]
        fields = {"model__init_args__pretrained": base, "model__init_args__lora": None,
                  "model__init_args__adapter": str(run.model), "data__init_args__tokenizer": str(run.model),
                  "data__init_args__add_tokens": None, "data__init_args__pad_token": None}
        folder = RunFolder(tmp_path / engine)
        arguments = recipe(f"{engine}.yaml", **changes("tied" if "-True" in base else "untied") | fields, engine=engine,
                           trainer__default_root_dir=str(folder.root))
        assert main(["validate", *arguments]) == 0
        assert main(["predict", *arguments]) == 0
        actual, expected = (json.loads(run_folder.metrics_json.read_text())["val/loss"] for run_folder in (folder, run))
        assert actual == pytest.approx(expected, rel=1e-4)
        answers.append(folder.predictions.read_text())
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_run_resumes_exactly(finished, changes):
    straight, resumed = (finished(copy=copy, engine="jax", **changes("untied")) for copy in (None, "again"))
    assert main(["fit", "--config", str(resumed.config), "--ckpt_path", "5", "--overwrite", "true"]) == 0
    assert_same_run(straight, resumed)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("torch", "jax"), ("jax", "torch")])
def test_a_run_may_change_engine(finished, changes, first, then):
    straight = finished(engine=then, **changes("untied"))
    run = finished(copy="changed", engine=first, **changes("untied"))
    assert main(["fit", "--config", str(run.config), "--engine", then, "--ckpt_path", "5", "--overwrite", "true"]) == 0
    for row, expected in zip(rows(run), rows(straight), strict=True):
        assert row == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), [("tied", "ddp"), ("untied", "fsdp")])
def test_two_devices_take_the_steps_of_one(finished, changes, recipe, tmp_path, name, strategy):
    single, two = finished(engine="jax", **changes(name)), RunFolder(tmp_path / "two")
    assert main(["fit", *recipe("two.yaml", **changes(name) | {
        "engine": "jax", "trainer__devices": 2, "trainer__strategy": strategy, "trainer__accumulate_grad_batches": 1,
        "trainer__val_check_interval": 10, "trainer__default_root_dir": str(two.root)})]) == 0
    for row, expected in zip(rows(two, LOGGED), rows(single, LOGGED), strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
    actual, expected = (load_file(run.model / "adapter_model.safetensors") for run in (two, single))
    for key, weight in actual.items():
        torch.testing.assert_close(weight, expected[key], rtol=1e-3, atol=2e-5)
