"""With the same recipe and seed, both engines start with the same parameters, distributed as in transformers."""

import copy
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hf_reference import AUTO, fields_of
from safetensors.torch import load_file
from test_lora import TASKS

from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.tree import flatten
from jax_engine.models import hub, linear, loading
from jax_engine.models import lora as adapters
from lmmods.core.hf_config import load_config
from lmmods.core.initialization import draw, lora_a
from lmmods.core.settings import LoRA
from lmmods.torch_engine.nn.initialization import from_config
from lmmods.torch_engine.nn.loading import load_pretrained
from lmmods.torch_engine.nn.lora import add_lora

SIZES = {"vocab_size": 300, "initializer_range": 0.05}


def make_config(name: str, head: str = "causal", **changes):
    per_layer = {"vocab_size_per_layer_input": 300} if name == "gemma4_text" else {}
    return transformers.CONFIG_MAPPING[name](**fields_of(name, head) | SIZES | per_layer | changes)


def build_model(name: str, head: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes):
    """Return a model of the torch engine with random weights."""
    auto, config = getattr(transformers, AUTO[head]), make_config(name, head, **changes)
    return from_config(lambda: auto.from_config(config, dtype=dtype), seed)


def assert_same_values(values: dict[str, np.ndarray], model: torch.nn.Module) -> None:
    params = {key: p for key, p in model.named_parameters() if key in values}
    assert list(params) == list(values)
    for key, value in values.items():
        assert str(value.dtype) == str(params[key].dtype).removeprefix("torch."), key
        assert np.array_equal(value.astype(np.float32), params[key].detach().float().numpy()), key


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_process_initialises_only_its_devices_shards(dtype, monkeypatch):
    net, shapes = hub.network(make_config("llama"), "causal"), []
    mesh = ShardedMesh(fsdp=2, tensor=2, devices=jax.devices()[:4])

    def init_and_record(seed, name, distribution, shape, part):
        shapes.append([len(range(length)[dimension]) for length, dimension in zip(shape, part, strict=True)])
        return draw(seed, name, distribution, shape)[part]

    monkeypatch.setattr(linear, "init_part", init_and_record)
    placed = flatten(mesh.put_state(net.initial_values(3, dtype)))
    monkeypatch.undo()
    whole = flatten(net.init(3, dtype))
    assert all(np.array_equal(placed[path], value) and placed[path].dtype == dtype for path, value in whole.items())
    for path, leaf in flatten(net.initial_values(3, dtype)).items():
        assert (leaf.shape, leaf.size, leaf.nbytes) == (whole[path].shape, whole[path].size, whole[path].nbytes)
    matrices = sum(value.size for value in whole.values() if value.std())
    assert sum(math.prod(part) for part in shapes) == matrices  # each value once, on one of four devices


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_initial_parameters_equal_torchs_in_bfloat16_and_untied(name):
    head, untied = ("causal", {"tie_word_embeddings": False}) if name == "llama" else ("masked", {})
    net = hub.network(make_config(name, **untied), head)
    assert_same_values(net.to_torch(net.init(1, "bfloat16")), build_model(name, head, 1, torch.bfloat16, **untied))


def test_position_tables_are_sinusoidal_if_the_configuration_asks_for_it():
    net = hub.network(make_config("distilbert", sinusoidal_pos_embds=True), "masked")
    assert_same_values(net.to_torch(net.init(0)), build_model("distilbert", "masked", sinusoidal_pos_embds=True))


@pytest.mark.parametrize(("base", "name", "head"), [
    ("BertModel", "bert", "qa"), ("BertModel", "bert", "masked"), ("AlbertForMaskedLM", "albert", "qa"),
    ("MistralForCausalLM", "mistral", "qa"), ("GPT2LMHeadModel", "gpt2", "qa"),
    ("ElectraForPreTraining", "electra", "qa"), ("ElectraForPreTraining", "electra", "masked"),
    ("ModernBertModel", "modernbert", "masked"), ("ModernBertModel", "modernbert", "qa"),
    ("BertForMaskedLM", "bert", "sequence"), ("BertForMaskedLM", "bert", "token"), ("AlbertForMaskedLM", "albert",
    "choice"), ("ElectraForPreTraining", "electra", "choice"), ("ModernBertModel", "modernbert", "sequence"),
    ("MistralForCausalLM", "mistral", "sequence"), ("MistralForCausalLM", "mistral", "token")])
def test_a_missing_head_is_initialised_alike_on_both_engines_and_as_from_scratch(base, name, head, tmp_path):
    getattr(transformers, base)(make_config(name, head)).save_pretrained(tmp_path)
    model = load_pretrained(getattr(transformers, AUTO[head]), str(tmp_path), seed=5)
    net = hub.network(load_config(str(tmp_path)), head)
    loaded = net.to_torch(loading.load(net, str(tmp_path), seed=5))
    assert_same_values(loaded, model)
    first, heads = net.to_torch(net.init(5)), [key for key, path, _ in net.names() if path[0] == "head"]
    assert heads and all(np.array_equal(loaded[key], first[key]) for key in heads)
    assert not any(np.array_equal(loaded[key], first[key]) for key in first if key not in heads and first[key].std())


@pytest.mark.parametrize(("base", "name", "head", "loaded_name", "saved_name"), [
    ("ModernBertForMaskedLM", "modernbert", "qa", "head.dense.weight", "head.dense.weight"),
    ("ModernBertForMaskedLM", "modernbert", "sequence", "head.norm.weight", "head.norm.weight"),
    ("BertModel", "bert", "sequence", "bert.pooler.dense.weight", "pooler.dense.weight"),
    ("BertModel", "bert", "choice", "bert.pooler.dense.bias", "pooler.dense.bias"),
    ("AlbertModel", "albert", "sequence", "albert.pooler.weight", "pooler.weight")])
def test_a_new_head_keeps_the_layers_that_another_head_shares(base, name, head, loaded_name, saved_name, tmp_path):
    """Poolers and the layers of ModernBERT's heads are loaded; only the output layers are new."""
    getattr(transformers, base)(make_config(name, head)).save_pretrained(tmp_path)
    model = load_pretrained(getattr(transformers, AUTO[head]), str(tmp_path), seed=5)
    net = hub.network(load_config(str(tmp_path)), head)
    loaded = net.to_torch(loading.load(net, str(tmp_path), seed=5))
    assert_same_values(loaded, model)
    assert np.array_equal(loaded[loaded_name], load_file(tmp_path / "model.safetensors")[saved_name])


@pytest.mark.parametrize(("base", "name", "output"), [
    ("MistralForCausalLM", "mistral", "qa_outputs"), ("ModernBertForMaskedLM", "modernbert", "classifier")])
def test_a_new_head_on_a_quantised_base_is_the_same_on_both_engines(tmp_path, base, name, output):
    config = make_config(name, hidden_size=64, num_attention_heads=4)
    getattr(transformers, base)(config).save_pretrained(tmp_path)
    model = load_pretrained(transformers.AutoModelForQuestionAnswering, str(tmp_path), seed=5, quantize="nf4",
                            frozen=True)
    net = hub.network(load_config(str(tmp_path)), "qa")
    head = flatten(loading.load(net, str(tmp_path), seed=5, quantize="nf4"))["head", "weight"]
    assert np.array_equal(head, model.get_submodule(output).weight.detach().numpy()) and head.std() > 0.04


ADAPTERS = [
    ("llama", "causal", {}, torch.float32), ("llama", "causal", {"rslora": True}, torch.bfloat16),
    ("gpt2", "causal", {"dora": True}, torch.float32), ("llama", "causal", {"dora": True}, torch.float32),
    ("bert", "qa", {}, torch.float32), ("modernbert", "qa", {}, torch.float32), ("albert", "masked", {}, torch.float32),
    ("llama", "causal", {"modules_to_save": ["lm_head"]}, torch.float32),
]


@pytest.mark.parametrize(("name", "head", "settings", "dtype"), ADAPTERS, ids=[
    "lora", "on-bfloat16", "dora-conv1d", "dora", "qa", "qa-of-layers", "shared-layers", "full-head"])
def test_a_new_adapter_is_the_same_on_both_engines(make_ref, name, head, settings, dtype, tmp_path):
    ref, lora = make_ref(name, head), LoRA(rank=4, alpha=8, **settings)
    tokens = [] if head == "masked" else [36, 5]
    model = add_lora(copy.deepcopy(ref.torch).to(dtype), lora, tokens, torch.float32, TASKS[head], seed=5)
    net = hub.network(ref.net.config, head, lora=lora, rows=adapters.trainable_rows(ref.net, lora, tokens))
    base = jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(str(dtype).removeprefix("torch."))), ref.params)
    params = flatten(adapters.add_adapter(net, base, 5))
    trained = {key: (params[path] if layer is None else params[path][layer]).astype(np.float32)
               for key, path, layer in net.names() if net.trains(path)}
    assert_same_values(trained, model)
    assert len(trained) == sum(p.requires_grad for p in model.parameters())
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    for key, value in load_file(tmp_path / "adapter_model.safetensors").items():
        if "lora_A" in key:
            expected = draw(5, key, lora_a(value.shape[1]), tuple(value.shape))  # named as in PEFT's folder
            assert np.array_equal(value.numpy(), expected), key
        assert "lora_B" not in key or not value.any()
