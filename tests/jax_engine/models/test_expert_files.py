"""Folders of mixtures of experts: separate experts, stacked experts, MXFP4."""

import json

import bitsandbytes.functional as F
import jax
import numpy as np
import pytest
import torch
import transformers
from hf_reference import FAMILIES
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jax_engine.distributed.tree import flatten
from jax_engine.models import hub, loading, mxfp4
from lmmods.commands.exported_model import copy_dequantized
from lmmods.core import lazy_array
from lmmods.core.errors import UserError
from lmmods.core.hf_config import load_config
from lmmods.torch_engine.nn import export
from lmmods.torch_engine.nn.loading import load_pretrained


def load_with(ref, folder, change):
    folder.mkdir(exist_ok=True)
    tensors = change(load_file(ref.folder / "model.safetensors"))
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    return loading.load(ref.net, str(folder))


def test_stacked_files_and_renamed_modules_load_the_same_bits(make_ref, tmp_path):
    ref = make_ref("mixtral")
    assert any(".block_sparse_moe.experts.4.w2.weight" in key for key in load_file(ref.folder / "model.safetensors"))
    ref.torch.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in load_file(
        tmp_path / "stacked" / "model.safetensors"))
    stacked = loading.load(ref.net, str(tmp_path / "stacked"))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(stacked), jax.tree.leaves(ref.params), strict=True))


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: {k: v for k, v in t.items() if "0.mlp.experts.3.up_proj" not in k}, "layers.0.mlp.experts.gate_up_proj"),
    (lambda t: t | {"model.layers.0.mlp.experts.4.up_proj.weight": torch.ones(12, 16)}, "4.up_proj.weight .*4 experts"),
    (lambda t: t | {"model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(11, 16)}, r"\(11, 16\).*\(12, 16\)"),
    (lambda t: t | {"layers.0.mlp.experts.0.up_proj.weight": torch.ones(12, 16)}, "duplicate"),
    (lambda t: t | {"model.layers.0.mlp.experts.0.w1.weight": torch.ones(12, 16)}, "experts.0.w1.weight"),
])
def test_experts_that_do_not_fit_are_rejected_by_name(make_ref, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        load_with(make_ref("qwen3_moe"), tmp_path, change)


def test_mxfp4_values_equal_transformers():
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (3, 10, 2, 16), dtype=np.uint8)
    scales = random.integers(100, 140, (3, 10, 2), dtype=np.uint8)
    actual = mxfp4.values(lazy_array.lazy(blocks), lazy_array.lazy(scales), np.float32)
    expected = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32).numpy()
    assert np.array_equal(actual, expected)
    assert np.array_equal(actual[1:, 5:40, 2:3], expected[1:, 5:40, 2:3])


@pytest.fixture(scope="module")
def in_mxfp4(tmp_path_factory):
    """Return a gpt-oss folder with experts in MXFP4, and the values of their codes by transformers."""
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("mxfp4")
    config = transformers.GptOssConfig(**FAMILIES["gpt_oss"] | {"hidden_size": 32, "intermediate_size": 64})
    model = transformers.GptOssForCausalLM(config)
    model.save_pretrained(folder)
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name, sizes in (("gate_up_proj", (4, 128, 1, 16)), ("down_proj", (4, 32, 2, 16))):
        for layer in range(2):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            blocks, scales = random.integers(0, 256, sizes, np.uint8), random.integers(118, 124, sizes[:3], np.uint8)
            tensors |= {f"{key}_blocks": torch.tensor(blocks), f"{key}_scales": torch.tensor(scales)}
            values[key] = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
            del tensors[key]
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder, values


def test_both_engines_load_an_mxfp4_folder_as_plain_weights(in_mxfp4, tmp_path):
    folder, values = in_mxfp4
    net = hub.network(load_config(str(folder)), "causal")
    params = loading.load(net, str(folder))
    model = load_pretrained(transformers.AutoModelForCausalLM, str(folder))
    actual, expected = net.to_torch(params), dict(model.named_parameters())
    assert list(actual) == list(expected) and all(torch.equal(expected[key], value) for key, value in values.items())
    assert all(np.array_equal(actual[key], value.detach().numpy()) for key, value in expected.items())
    hub.save(net, params, tmp_path / "jax")
    export.save(model, tmp_path / "torch", False, None, True)
    for engine in ("jax", "torch"):
        assert "quantization_config" not in json.loads((tmp_path / engine / "config.json").read_text())
        reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / engine)
        assert all(torch.equal(value, expected[key]) for key, value in reloaded.named_parameters())


def test_mxfp4_experts_are_requantised_if_the_recipe_says_so(in_mxfp4):
    folder, values = in_mxfp4
    net = hub.network(load_config(str(folder)), "causal")
    actual = flatten(loading.load(net, str(folder), quantize="nf4"))
    model = load_pretrained(transformers.AutoModelForCausalLM, str(folder), quantize="nf4", frozen=True)
    plain = load_pretrained(transformers.AutoModelForCausalLM, str(folder), frozen=True)
    for name in ("gate_up_proj", "down_proj"):
        matrices = np.asarray(actual["layers", "moe", "experts", name].astype(np.float32))
        for layer in range(2):
            key = f"model.layers.{layer}.mlp.experts"
            expected = F.dequantize_4bit(*F.quantize_4bit(values[f"{key}.{name}"], quant_type="nf4",
                                                          compress_statistics=True))
            assert torch.equal(getattr(model.get_submodule(key), name), expected)
            assert np.allclose(matrices[layer], expected, rtol=1e-5, atol=1e-6)
    copy_dequantized(model, plain)
    ids = torch.tensor([[3, 9, 4, 7]])
    assert torch.allclose(plain(ids).logits, model(ids).logits, atol=1e-4)


def test_missing_mxfp4_scales_are_an_error(in_mxfp4, tmp_path):
    folder, _ = in_mxfp4
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    net = hub.network(load_config(str(folder)), "causal")
    with pytest.raises(UserError, match="Missing: model.layers.1.mlp.experts.down_proj"):
        loading.load(net, str(tmp_path))
