"""PiSSA adapters: both engines compared with PEFT and with each other."""

import copy
import csv
import json
import math
import operator
from functools import partial

import jax
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from jax_engine.distributed.tree import flatten
from jax_engine.models import hub, loading
from jax_engine.models import lora as adapters
from jax_engine.models.quant import Quantized
from lmmods.cli import main
from lmmods.commands.exported_model import exported_fields
from lmmods.core.errors import UserError
from lmmods.core.hf_config import load_config
from lmmods.core.settings import LoRA
from lmmods.recipe.tasks.base import TaskFields
from lmmods.recipe.tasks.grpo import GRPOFields
from lmmods.recipe.tasks.preference import PreferenceFields
from lmmods.runs.folder import RunFolder
from lmmods.torch_engine.nn.export import save
from lmmods.torch_engine.nn.loading import load_pretrained
from lmmods.torch_engine.nn.lora import add_lora
from lmmods.torch_engine.nn.principal import PrincipalParts
from tests.closeness import assert_as_close, in_both

PISSA = LoRA(rank=4, alpha=6, init="pissa")


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("gpt2")
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64, bos_token_id=1,
                               eos_token_id=2, initializer_range=0.2)).save_pretrained(folder)
    return folder


@pytest.fixture(params=["llama", "gpt2"])
def folder(request, gpt2_folder, llama_folder):
    return llama_folder if request.param == "llama" else gpt2_folder


def make_ids() -> torch.Tensor:
    return torch.randint(3, 60, (2, 16), generator=torch.Generator().manual_seed(0))


def load_on_torch(folder, lora=PISSA, quantize=None, **options):
    parts = PrincipalParts(lora) if lora.is_principal else None
    base = load_pretrained(AutoModelForCausalLM, str(folder), quantize=quantize, frozen=True,
                           before_quantising=parts and parts.residual, **options)
    return add_lora(base, lora, [], torch.float32, "CAUSAL_LM", principal=parts).eval()


def compute_logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(make_ids()).logits


def perturb(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("rslora", [False, True])
def test_the_split_equals_that_of_peft(folder, rslora):
    lora = LoRA(rank=4, alpha=6, rslora=rslora, init="pissa")
    model = load_on_torch(folder, lora)
    config = LoraConfig(r=4, lora_alpha=6, use_rslora=rslora, target_modules="all-linear", init_lora_weights="pissa",
                        fan_in_fan_out="gpt2" in str(folder))
    peft_model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    stored = AutoModelForCausalLM.from_pretrained(folder)
    truth = split_by_numpy(stored, lora)
    actual, expected = (split_model(each_model, lora.scaling) for each_model in (model, peft_model))
    assert len(truth) == 2 * (7 if "llama" in str(folder) else 4)
    assert_as_close(actual, expected, truth)
    assert_as_close(compute_logits(model), *in_both(compute_logits, stored))


def split_model(model, scaling) -> dict:
    """Return the residual in the base and the adapter's update for each adapted matrix."""
    params = dict(model.named_parameters())
    residuals = {name: params[name] for name in params if name.endswith("base_layer.weight")}
    updates = {name: scaling * params[name.replace("base_layer", "lora_B.default")]
               @ params[name.replace("base_layer", "lora_A.default")] for name in residuals}
    return {f"{name} {key}": value.detach().numpy() for key, part in (("residual", residuals), ("update", updates))
            for name, value in part.items()}


def split_by_numpy(model, lora) -> dict:
    """Compute residuals and updates from a model without an adapter, in float64."""
    parts = {}
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and name != "lm_head":
            matrix = module.weight.detach().double().numpy()
            left, values, right = np.linalg.svd(matrix, full_matrices=False)
            update = (left[:, :lora.rank] * values[:lora.rank]) @ right[:lora.rank]
            name = f"base_model.model.{name}.base_layer.weight"
            parts |= {f"{name} residual": matrix - update,
                      f"{name} update": update.T if isinstance(module, Conv1D) else update}
    return parts


@pytest.mark.parametrize("double", [False, True])
def test_the_residual_is_quantised_not_the_base(llama_folder, double):
    truth = compute_logits(AutoModelForCausalLM.from_pretrained(llama_folder))
    split, plain = (compute_logits(load_on_torch(llama_folder, lora, "nf4", double_quant=double))
                    for lora in (LoRA(rank=16, init="pissa"), LoRA(rank=16)))
    assert (split - truth).norm() < 0.8 * (plain - truth).norm()
    # The float residual, quantised by bitsandbytes itself.
    from bitsandbytes.functional import quantize_4bit

    residual, quantised = load_on_torch(llama_folder), load_on_torch(llama_folder, PISSA, "nf4", double_quant=double)
    for name, layer in residual.named_modules():
        if name.endswith("base_layer"):
            codes, state = quantize_4bit(layer.weight.data, quant_type="nf4", compress_statistics=double)
            assert torch.equal(quantised.get_submodule(name).weight.data, codes)
            assert torch.equal(quantised.get_submodule(name).weight.quant_state.absmax, state.absmax)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_engines_split_to_the_same_bits(folder, quantize, dtype):
    model = load_on_torch(folder, quantize=quantize, precision="32-true" if dtype == "float32" else "bf16-mixed")
    network = hub.network(load_config(str(folder)), "causal", lora=PISSA)
    params = flatten(loading.load(network, str(folder), dtype=dtype, quantize=quantize))
    state, checked = dict(model.named_parameters()), 0
    for name, path, layer in network.names():
        leaf = params[path] if layer is None else jax.tree.map(operator.itemgetter(layer), params[path])
        parameter = state[name] if name in state else state[name.replace(".weight", ".base_layer.weight")]
        if isinstance(leaf, Quantized):
            assert np.array_equal(leaf.packed.reshape(-1)[:parameter.numel()], parameter.detach().numpy().reshape(-1))
        else:
            assert np.array_equal(np.asarray(leaf, np.float32), parameter.detach().float().numpy()), name
        checked += 1
    assert checked > 15


@pytest.mark.parametrize("rslora", [False, True])
def test_an_export_is_an_adapter_of_the_original_base(folder, rslora, tmp_path):
    model = perturb(load_on_torch(folder, LoRA(rank=4, alpha=6, rslora=rslora, init="pissa")))
    expected, before = compute_logits(model), copy.deepcopy(dict(model.named_parameters()))
    save(model, tmp_path, adapter_only=True, dtype=None, writes=True)
    assert all(torch.equal(before[name], param) for name, param in model.named_parameters())
    assert model.peft_config["default"].r == 4  # training can continue
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["r"] == 8 and settings["init_lora_weights"] is True
    assert settings["lora_alpha"] == pytest.approx(6 * (math.sqrt(2) if rslora else 2))
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path).eval()
    _, truth = in_both(compute_logits, model)
    assert_as_close(compute_logits(again), expected, truth)


def test_engines_export_alike(folder, tmp_path):
    model = perturb(load_on_torch(folder))
    save(model, tmp_path / "torch", adapter_only=True, dtype=torch.bfloat16, writes=True)
    network = hub.network(load_config(str(folder)), "causal", lora=PISSA)
    trained = {name: param.detach().numpy() for name, param in model.named_parameters() if param.requires_grad}
    network.first_factors = flatten(network.from_torch(
        {name: value.numpy() for name, value in model.first_factors.items()}))
    adapters.save_adapter(network, network.from_torch(trained), tmp_path / "jax", str(folder), "bfloat16")
    weights, expected = (load_file(tmp_path / engine / "adapter_model.safetensors") for engine in ("jax", "torch"))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    settings, torch_settings = (json.loads((tmp_path / engine / "adapter_config.json").read_text())
                                for engine in ("jax", "torch"))
    for key in ("r", "lora_alpha", "use_rslora", "init_lora_weights", "fan_in_fan_out"):
        assert settings[key] == torch_settings[key], key


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_a_rank_above_the_number_of_singular_values_is_rejected(llama_folder, quantize):
    lora, message = LoRA(rank=33, init="pissa"), r"lora.rank is 33, but .*[kv]_proj.* has only 32 singular values"
    with pytest.raises(UserError, match=message):
        load_on_torch(llama_folder, lora, quantize)
    with pytest.raises(UserError, match=message):
        loading.load(hub.network(load_config(str(llama_folder)), "causal", lora=lora), str(llama_folder),
                     quantize=quantize)


def test_a_base_saved_quantised_is_rejected(llama_folder, tmp_path):
    load_pretrained(AutoModelForCausalLM, str(llama_folder), quantize="nf4", frozen=True).save_pretrained(tmp_path)
    message = "lora.init is pissa, which splits matrices before they are quantised, but .* is saved quantised"
    with pytest.raises(UserError, match=message):
        load_on_torch(tmp_path)
    with pytest.raises(UserError, match=message):
        loading.load(hub.network(load_config(str(tmp_path)), "causal", lora=PISSA), str(tmp_path))


@pytest.mark.parametrize("fields_class", [PreferenceFields, partial(GRPOFields, rewards=[{"name": "exact_match"}])])
def test_the_base_alone_is_rejected_as_reference(fields_class):
    with pytest.raises(UserError, match=r"model.reference is base, but must be copy .* with lora.init: pissa"):
        fields_class(pretrained="model", lora=PISSA, beta=0.1, reference="base")
    assert fields_class(pretrained="model", lora=PISSA, beta=0.1).reference_kind == "copy"


def test_int8_is_rejected():
    with pytest.raises(UserError, match="model.quantize is int8, but must be nf4, fp4 or null with lora.init: pissa"):
        TaskFields(pretrained="model", lora=PISSA, quantize="int8")


RUN = {"model__init_args__lora": {"rank": 4, "dropout": 0.1, "init": "pissa"},
       "trainer__max_steps": 4, "trainer__val_check_interval": 4, "checkpoint": {"every_n_steps": 1, "keep_last": 9}}


def read_train_losses(run: RunFolder) -> list[float]:
    with open(run.metrics_csv, newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row.get("train/loss")]


@pytest.mark.slow
def test_a_run_resumes_with_the_same_bits_and_merges_into_the_original_base(recipe, llama_folder, tmp_path):
    """Each start quantises the residual again."""
    losses = {}
    for engine in ("torch", "jax"):
        run = RunFolder(tmp_path / engine)
        arguments = recipe(**RUN, trainer__default_root_dir=str(run.root), engine=engine)
        assert main(["fit", *arguments]) == 0
        losses[engine] = read_train_losses(run)
        files = run.resolve("last") / "model.safetensors", run.model / "adapter_model.safetensors"
        before = [load_file(file) for file in files]
        assert main(["fit", *arguments, "--ckpt_path", "2", "--overwrite", "true"]) == 0
        assert read_train_losses(run) == losses[engine]
        for tensors, resumed in zip(before, map(load_file, files)):
            assert tensors.keys() == resumed.keys()
            assert all(torch.equal(resumed[name], value) for name, value in tensors.items())
    assert len(losses["torch"]) == 4 and losses["torch"] == pytest.approx(losses["jax"], rel=1e-4)
    # Merged into the original base, not into the quantised residual.
    assert main(["merge", "--run", str(run.root), "--out", str(tmp_path / "merged"), "--threshold", "1e-4"]) == 0
    base, merged = (AutoModelForCausalLM.from_pretrained(path) for path in (llama_folder, tmp_path / "merged"))
    expected = PeftModel.from_pretrained(base, run.model).merge_and_unload().state_dict()
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value, expected[name][:len(value)], rtol=0, atol=1e-5)
    assert exported_fields(run, TaskFields(pretrained=str(llama_folder), lora=PISSA, quantize="nf4")).quantize is None


@pytest.mark.slow
def test_runs_switch_engines_and_their_export_has_the_final_loss(recipe, tmp_path):
    changes, losses = {**RUN, "model__init_args__quantize": None}, {}
    for engine, other in (("torch", "jax"), ("jax", "torch")):
        run, again = RunFolder(tmp_path / engine), RunFolder(tmp_path / f"{engine}-again")
        arguments = {**changes, "trainer__default_root_dir": str(run.root)}
        assert main(["fit", *recipe(**arguments, engine=engine)]) == 0
        losses[engine] = read_train_losses(run)
        # On the original base, the export has the run's final loss.
        loss = json.loads(run.metrics_json.read_text())["val/loss"]
        assert main(["validate", *recipe(**{
            **arguments, "model__init_args__lora": None, "model__init_args__adapter": str(run.model),
            "trainer__default_root_dir": str(again.root)}, engine=other)]) == 0
        assert json.loads(again.metrics_json.read_text())["val/loss"] == pytest.approx(loss, rel=1e-4)
        assert main(["fit", *recipe(**arguments, engine=other), "--ckpt_path", "2", "--overwrite", "true"]) == 0
        assert read_train_losses(run) == pytest.approx(losses[engine], rel=1e-4)
    assert losses["torch"] == pytest.approx(losses["jax"], rel=1e-4)
