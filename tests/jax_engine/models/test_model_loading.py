"""Weights from folders: old spellings, shards, mixed dtypes, pickles, missing heads, and every error."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from jax_engine.distributed.tree import flatten
from jax_engine.models import hub, loading
from lmmods.core.errors import UserError
from lmmods.core.hf_config import load_config
from tests.image_models import save_image_model


def load_with(ref, folder, change):
    """Load a copy of the reference's folder with tensors that a function has changed."""
    shutil.copy(ref.folder / "config.json", folder)
    tensors = change(load_file(ref.folder / "model.safetensors"))
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    return loading.load(ref.net, str(folder))


def is_same(first, second):
    return jax.tree.structure(first) == jax.tree.structure(second) and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second)))


def rename(*pairs):
    def change(tensors):
        for old, new in pairs:
            tensors = {key.replace(old, new): value for key, value in tensors.items()}
        return tensors
    return change


@pytest.mark.parametrize(("name", "head", "change"), [
    ("bert", "masked", rename(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))),
    ("bert", "qa", rename(("bert.", ""))),
    ("gpt2", "causal", rename(("transformer.", ""))),
    ("llama", "causal", rename(("model.", ""))),
    ("llama", "qa", rename(("transformer.", "model."))),
    ("gpt2", "causal", lambda t: t | {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4),
                                      "h.1.attn.masked_bias": torch.ones(1)}),
    ("gpt2", "causal", lambda t: t | {"lm_head.weight": t["transformer.wte.weight"].clone()}),
    ("gpt2", "causal", lambda t: {k: v for k, v in t.items() if k != "transformer.wte.weight"}
     | {"lm_head.weight": t["transformer.wte.weight"]}),
    ("bert", "masked", lambda t: t | {"bert.embeddings.position_ids": torch.arange(32)[None],
                                      "cls.seq_relationship.weight": torch.ones(2, 24),
                                      "bert.pooler.dense.weight": torch.ones(24, 24),
                                      "cls.predictions.decoder.bias": t["cls.predictions.bias"].clone()}),
    ("llama", "causal", lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}),
    ("gpt_neox", "causal", rename(("embed_out.", "lm_head."))),
    ("electra", "qa", lambda t: t | {"electra.embeddings.position_ids": torch.arange(32)[None],
                                     "discriminator_predictions.dense.weight": torch.ones(24, 24)}),
    ("deberta-v2", "qa", lambda t: t | {"lm_predictions.lm_head.bias": torch.ones(37),
                                        "mask_predictions.classifier.weight": torch.ones(1, 24)}),
    ("modernbert", "qa", lambda t: t | {"decoder.bias": torch.ones(37)}),
    ("modernbert", "masked", rename(("model.", ""))),
    ("gpt_neox", "qa", lambda t: t | {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 4, 4),
                                      "gpt_neox.layers.0.attention.masked_bias": torch.ones(1)}),
])
def test_other_parameter_names_load_the_same_bits(make_ref, tmp_path, name, head, change):
    ref = make_ref(name, head)
    assert is_same(load_with(ref, tmp_path, change), ref.params)


def test_shards_mixed_dtypes_and_pickles_load(make_ref, tmp_path):
    ref = make_ref("llama", "causal")
    (tmp_path / "shards").mkdir()
    hub.save(ref.net, ref.params, tmp_path / "shards")
    hub.write_shards(ref.net.to_torch(ref.params), tmp_path / "shards", limit=20_000)
    files = list((tmp_path / "shards").glob("model-*-of-*.safetensors"))
    assert len(files) > 2 and not (tmp_path / "shards" / "model.safetensors").exists()
    assert is_same(loading.load(ref.net, str(tmp_path / "shards")), ref.params)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "shards")
    assert all(torch.equal(a, b) for a, b in zip(reloaded.parameters(), ref.torch.parameters()))

    (tmp_path / "mixed").mkdir()
    mixed = load_with(ref, tmp_path / "mixed", lambda t: {
        k: v.bfloat16() if "mlp" in k else v.half() if "norm" in k else v for k, v in t.items()})
    for path, leaf in flatten(mixed).items():
        kind = {"mlp": jnp.bfloat16, "attn_norm": np.float16, "mlp_norm": np.float16, "norm": np.float16}
        kind = next((kind[part] for part in path if part in kind), np.float32)
        assert leaf.dtype == np.float32 and np.array_equal(leaf, flatten(ref.params)[path].astype(kind)), path

    (tmp_path / "bin").mkdir()
    shutil.copy(ref.folder / "config.json", tmp_path / "bin")
    torch.save({k: v.bfloat16() for k, v in ref.torch.state_dict().items()}, tmp_path / "bin" / "pytorch_model.bin")
    pickled = loading.load(ref.net, str(tmp_path / "bin"), dtype="bfloat16")
    assert is_same(pickled, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), ref.params))


@pytest.mark.parametrize(("base", "name", "head"), [
    ("BertModel", "bert", "qa"), ("BertModel", "bert", "masked"), ("AlbertForMaskedLM", "albert", "qa"),
    ("LlamaModel", "llama", "causal"), ("LlamaForCausalLM", "llama", "qa"), ("GPT2LMHeadModel", "gpt2", "qa")])
def test_a_missing_head_is_initialised_at_random_and_reported(make_ref, tmp_path, capsys, base, name, head):
    ref = make_ref(name, head)
    getattr(transformers, base)(ref.config).save_pretrained(tmp_path)
    first = loading.load(ref.net, str(tmp_path), seed=1)
    output = capsys.readouterr().out
    assert "these are initialised randomly" in output
    assert jax.tree.structure(first) == jax.tree.structure(ref.params)
    same_seed, other_seed = loading.load(ref.net, str(tmp_path), seed=1), loading.load(ref.net, str(tmp_path), seed=2)
    assert is_same(first, same_seed) and is_same(first["layers"], other_seed["layers"])
    weight = ("dense", "weight") if head == "masked" else ("weight",)
    assert not np.array_equal(flatten(first["head"])[weight], flatten(other_seed["head"])[weight])


@pytest.mark.parametrize(("name", "head"), [("bert", "sequence"), ("roberta", "sequence"), ("llama", "token")])
def test_a_head_with_other_labels_is_initialised_at_random_and_reported(make_ref, tmp_path, capsys, name, head):
    ref = make_ref(name, head)
    config = load_config(str(ref.folder), {"id2label": dict(enumerate("abc"))})
    net = hub.network(config, head)
    params = loading.load(net, str(ref.folder), seed=1)
    output = capsys.readouterr().out
    assert "Not needed" in output and "these are initialised randomly" in output
    assert is_same({**params, "head": {}}, {**ref.params, "head": {}})
    assert params["head"]["weight"].shape[0] == 3
    if "dense" in params["head"]:  # this layer does not depend on the labels
        assert is_same(params["head"]["dense"], ref.params["head"]["dense"])
    hub.save(net, params, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["id2label"] == {"0": "a", "1": "b", "2": "c"}


@pytest.mark.parametrize(("name", "change", "message"), [
    ("llama", lambda t: {k: v for k, v in t.items() if "1.mlp.up" not in k}, "model.layers.1.mlp.up_proj.weight"),
    ("llama", lambda t: t | {"model.layers.0.extra.weight": torch.ones(2)}, "model.layers.0.extra.weight"),
    ("llama", lambda t: t | {"model.layers.3.mlp.up_proj.weight": torch.ones(2)}, "layers.3.mlp.up_proj.weight"),
    ("llama", lambda t: t | {"model.norm.weight": torch.ones(5)}, r"model.norm.weight \(5,\).*\(24,\)"),
    ("llama", lambda t: t | {"norm.weight": torch.ones(24)}, "duplicate"),
    ("gpt2", lambda t: t | {"lm_head.weight": torch.ones(37, 24)}, "tie_word_embeddings"),
    ("bert", lambda t: {k: v for k, v in t.items() if k != "cls.predictions.bias"}, "cls.predictions.bias"),
])
def test_tensors_that_do_not_fit_are_rejected_by_name(make_ref, tmp_path, name, change, message):
    with pytest.raises(UserError, match=message):
        load_with(make_ref(name, "masked" if name == "bert" else "causal"), tmp_path, change)


def test_folders_without_weights_or_config_are_errors(make_ref, tmp_path):
    ref = make_ref("llama", "causal")
    with pytest.raises(UserError, match="no config.json"):
        load_config(str(tmp_path))
    with pytest.raises(UserError, match="no weights"):
        loading.load(ref.net, str(tmp_path))
    with pytest.raises(UserError, match="no folder 'nowhere/at-all'"):
        load_config("nowhere/at-all")
    with pytest.raises(UserError, match="no folder 'nowhere/at-all'"):
        loading.load(ref.net, "nowhere/at-all")
    hub.write_shards(ref.net.to_torch(ref.params), tmp_path, limit=20_000)
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(UserError, match="model-00002"):
        loading.load(ref.net, str(tmp_path))


def test_keys_and_values_of_layers_that_share_them_are_ignored(make_ref, tmp_path, capsys):
    """Gemma 4 checkpoints have them, and transformers ignores them."""
    ref = make_ref("gemma4_text", "causal")
    extra = {f"model.layers.{layer}.self_attn.{part}.weight": torch.ones(12, 16) for layer in (2, 3)
             for part in ("k_proj", "v_proj", "k_norm")}
    assert is_same(load_with(ref, tmp_path, lambda tensors: tensors | extra), ref.params)
    assert "Not needed" in capsys.readouterr().out
    with pytest.raises(UserError, match="Not expected: model.layers.1.self_attn.v_proj.weight"):
        load_with(ref, tmp_path, lambda tensors: tensors | {"model.layers.1.self_attn.v_proj.weight": torch.ones(1)})


def test_multi_token_prediction_weights_are_ignored(make_ref, tmp_path, capsys):
    """Qwen3.5 checkpoints have them, and transformers ignores them."""
    ref = make_ref("qwen3_5_text", "causal")
    params = load_with(ref, tmp_path, lambda tensors: tensors | {"mtp.fc.weight": torch.ones(16, 32)})
    assert is_same(params, ref.params)
    assert "Not needed" in capsys.readouterr().out


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4", "qwen3_5", "mistral3"])
def test_only_the_text_model_of_an_image_checkpoint_is_loaded(model_type, tmp_path, capsys):
    text = save_image_model(model_type, tmp_path).model.language_model
    network = hub.network(load_config(str(tmp_path)), "causal")
    named = network.to_torch(loading.load(network, str(tmp_path)))
    assert named.keys() == {f"model.{name}" for name, _ in text.named_parameters()}  # without constants
    assert all(np.array_equal(named[f"model.{name}"], param.detach()) for name, param in text.named_parameters())
    assert capsys.readouterr().out == ""
