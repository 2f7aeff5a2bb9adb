"""A base spread over GPUs, as far as this can be tested without GPUs: limits, placement, devices of layers."""

import pytest
import torch
from accelerate import infer_auto_device_map, init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.runs.folder import RunFolder
from lmmods.torch_engine.nn.loading import keep_in_place, placement


@pytest.fixture
def llama_folder(llama_of):
    """Two layers, which a test can tell apart."""
    return llama_of(2)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(("max_memory", "limits"), [
    ("80000MB", {0: "80000MB", 1: "80000MB"}), ("1.5 GiB", {0: "1.5 GiB", 1: "1.5 GiB"}),
    ({0: "10GiB", 1: "20GB"}, {0: "10GiB", 1: "20GB"}), ({1: "20GiB"}, {1: "20GiB"}),
])
def test_max_memory_is_the_limit_of_each_gpu(two_gpus, max_memory, limits):
    assert placement(max_memory) == {"device_map": "auto", "max_memory": limits}


@pytest.mark.parametrize(("max_memory", "message"), [
    ("20", "'20' is not a memory size"), ({0: "lots"}, "'lots' is not a memory size"),
    ({2: "20GiB"}, "device 2.*Use 0, 1"),
    ({"cpu": "20GiB"}, "device 'cpu'"), ({"disk": "20GiB"}, "device 'disk'"),
])
def test_invalid_limits_are_rejected_by_name(two_gpus, max_memory, message):
    with pytest.raises(UserError, match=message):
        placement(max_memory)


def test_layers_fill_one_gpu_after_another_and_a_model_too_large_is_rejected(two_gpus, llama_folder):
    """Layers take about 185 kB and the embedding 80 kB, so with 300 kB on the first GPU, a layer is on the second."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(llama_folder))

    def lay_out(first: str, second: str) -> None:
        limits = placement({0: first, 1: second})["max_memory"]
        model.hf_device_map = infer_auto_device_map(model, max_memory=limits,
                                                    no_split_module_classes=model._no_split_modules)

    lay_out("300KB", "1MB")
    assert set(model.hf_device_map.values()) == {0, 1}
    assert model.hf_device_map["model.embed_tokens"] == 0 and model.hf_device_map["lm_head"] == 1
    keep_in_place(model, "")
    moved = torch.nn.Sequential(model).to(torch.bfloat16)
    assert moved[0].model.norm.weight.dtype == torch.float32
    lay_out("300KB", "100KB")
    with pytest.raises(UserError, match="too little for the model"):
        keep_in_place(model, "")


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_a_spread_base_trains_like_one_on_a_single_device(recipe, tmp_path, quantize):
    """All on the only device, with full logits: equal up to rounding."""
    runs = [RunFolder(tmp_path / name) for name in ("whole", "spread")]
    for run, max_memory in zip(runs, (None, {"cpu": "1GiB"}), strict=True):
        assert main(["fit", *recipe(model__init_args__quantize=quantize, model__init_args__max_memory=max_memory,
                                    model__init_args__fast_kernels=False, trainer__max_steps=3,
                                    model__init_args__optimizer={"name": "sgd", "lr": 0.1},  # Adam amplifies rounding
                                    trainer__default_root_dir=str(run.root))]) == 0
    assert_close(*runs)


def assert_close(run: RunFolder, other: RunFolder) -> None:
    from safetensors.torch import load_file

    left, right = (load_file(folder.resolve("last") / "model.safetensors") for folder in (run, other))
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("changes", "message"), [
    ({"model__init_args__max_memory": "20GiB"}, "this machine has no GPU"),
    ({"model__init_args__max_memory": {0: "20GiB"}}, "names the device 0, which cannot train"),
    ({"model__init_args__max_memory": {"cpu": "100KB"}}, "too little for the model"),
    ({"model__init_args__max_memory": {"cpu": "100KB"}, "model__init_args__quantize": None},
     "too little for the model"),
    ({"model__init_args__max_memory": {"cpu": "1GiB"}, "trainer__strategy": "ddp"}, "the GPUs of one process"),
    ({"model__init_args__max_memory": {"cpu": "1GiB"}, "engine": "jax"}, "which the JAX engine does not support"),
])
def test_max_memory_is_rejected_where_it_cannot_work(recipe, tmp_path, capfd, changes, message):
    assert main(["fit", *recipe(**changes)]) == 2
    error = capfd.readouterr().err
    assert message in error and "Traceback" not in error
