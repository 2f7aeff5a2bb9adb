"""Training on images on JAX: logits, losses, gradients and generation against transformers, and runs against torch."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hf_reference import our_loss
from peft import PeftModel, get_peft_model_state_dict
from safetensors.numpy import load_file
from test_initial_parameters import assert_same_values
from transformers import AutoModelForImageTextToText

from jax_engine.models import hub, loading, lora
from jax_engine.models.fused import Fused
from jax_engine.models.generate import generate
from jax_engine.models.images import attend_in_windows, attend_to_images
from jax_engine.tasks.sft import SFT
from lmmods.cli import main
from lmmods.core.adapters import saved_name
from lmmods.core.hf_config import load_config
from lmmods.core.settings import Generation
from lmmods.runs.folder import RunFolder
from lmmods.torch_engine.nn.initialization import from_config
from lmmods.torch_engine.nn.summary import training_flops
from tests.closeness import assert_as_close, gradients, in_both
from tests.data.test_images import write_rows
from tests.forks import together
from tests.torch_engine.test_images import (  # noqa: F401 - `sparse` is a fixture
    PACKED,
    ROWS,
    WHOLE,
    accepted,
    assert_same_run,
    losses,
    make_batch,
    make_packs,
    processed,
    run,
    sparse,
)
from tests.vision_models import make_arguments, save_vision_model

FAMILIES = ("idefics3", "smolvlm", "gemma3", "qwen3_vl", "qwen2_5_vl", pytest.param("qwen2_vl", marks=pytest.mark.slow))
MESH = "jax_engine.distributed.devices.MeshSharding"


@pytest.fixture
def model_folder(shared):
    return lambda family: shared(f"vision_{family}", lambda folder: save_vision_model(family, folder))


def on_jax(folder):
    network = hub.network(load_config(str(folder), all_parts=True), "causal")
    return network, loading.load(network, str(folder))


def pad_images(batch, more):
    """Return a batch with further rows of blank images."""
    padded = {}
    for name, x in batch.items():
        x = np.asarray(x)
        shape = [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)] if name.startswith("per_row/") and x.ndim > 1 else 0
        padded[name] = np.pad(x, shape) if shape else x
    return padded


def in_torch(folder, inputs, labels):
    """Return transformers' logits of real tokens, summed loss and all gradients, in float32 and in float64."""
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()

    def run_torch(model):
        given = {name: value.to(next(model.parameters()).dtype) if value.is_floating_point() else value
                 for name, value in inputs.items()}
        logits = model(**accepted(model, given)).logits
        targets = torch.tensor(labels[:, 1:logits.shape[1]])
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
        grads = gradients(model, loss)
        return logits[inputs["attention_mask"] > 0], loss, {
            name: grads.get(name, torch.zeros(param.shape)) for name, param in model.named_parameters()}

    expected, exact = in_both(run_torch, model)
    assert list(exact[2]) == [name for name, _ in model.named_parameters()]
    return expected, exact


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_all_gradients_are_those_of_transformers(family, model_folder, tmp_path):
    """Of every parameter, also with blank images that only pad the batch."""
    folder = model_folder(family)
    data, batch = make_batch(folder, tmp_path)
    labels = batch["labels"].numpy()
    inputs = processed(family, tmp_path, ROWS[:6])
    if "pixel_attention_mask" in inputs:  # padding, as around images of other shapes
        for mask in (inputs["pixel_attention_mask"], batch["per_row/pixel_attention_mask"]):
            mask[1, 0, 12:] = mask[1, 0, :, 8:] = mask[0, 0, 4:] = 0
    expected, exact = in_torch(folder, inputs, labels)
    real = inputs["attention_mask"].numpy() > 0
    network, params = on_jax(folder)
    for more in (0, 2):
        padded = pad_images(batch, more)
        (loss, logits), grads = jax.jit(jax.value_and_grad(
            lambda params, batch=padded: our_loss(network, params, batch, labels), has_aux=True))(params)
        named = network.to_torch(grads)
        assert list(named) == list(exact[2])
        actual = (np.asarray(logits)[:, :real.shape[1]][real], loss, named)
        for compared in zip(actual, expected, exact, strict=True):
            assert_as_close(*compared, terms=1024)
    assert all(grad.any() for name, grad in exact[2].items() if "vision" in name and "k_proj.bias" not in name)


@pytest.mark.parametrize("family", FAMILIES)
def test_packs_have_the_loss_and_all_gradients_of_their_rows(family, model_folder, tmp_path):
    folder = model_folder(family)
    _, batch = make_batch(folder, tmp_path)
    expected, exact = in_torch(folder, processed(family, tmp_path, ROWS[:6]), batch["labels"].numpy())
    network, params = on_jax(folder)
    packs = [{name: x.numpy() for name, x in pack.items()} for pack in make_packs(folder, tmp_path)]
    loss, grads = jax.jit(jax.value_and_grad(
        lambda params: sum(our_loss(network, params, pack, pack["labels"])[0] for pack in packs)))(params)
    assert_as_close((loss, network.to_torch(grads)), expected[1:], exact[1:], terms=1024)


@pytest.mark.parametrize(("family", "options"), [
    ("idefics3", {}), ("gemma3", {}), ("qwen3_vl", {}), ("idefics3", {"use_cache": False}),
    ("gemma3", {"use_cache": False}), ("idefics3", {"num_beams": 2}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("qwen2_5_vl", {}), ("qwen3_vl", {"use_cache": False}), ("qwen3_vl", {"num_beams": 2})))], ids=str)
def test_answers_are_those_of_transformers(family, options, model_folder, tmp_path):
    folder = model_folder(family)
    data, _ = make_batch(folder, tmp_path, eval_batch_size=6)
    data.sets["predict"] = data.sets["train"]
    batch = {name: x.numpy() for name, x in next(iter(data.predict_dataloader())).items()}
    inputs = processed(family, tmp_path, [ROWS[index][:1] for index in batch["index"]], "left",
                       add_generation_prompt=True)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        tokens = model.generate(**accepted(model, inputs), max_new_tokens=8, do_sample=False,
                                pad_token_id=data.tokenizer.pad_token_id, eos_token_id=data.codec.stop_token_ids,
                                num_beams=options.get("num_beams", 1))
    expected = [next((row[:index] for index, token in enumerate(row) if token in data.codec.stop_token_ids), row)
                for row in tokens[:, inputs["input_ids"].shape[1]:].tolist()]
    network, params = on_jax(folder)
    prompts = [ids[mask > 0].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    images = {name: x for name, x in pad_images(batch, 1).items() if name.startswith("per_row/")}
    arguments = (Generation(max_new_tokens=8, **options), data.codec.stop_token_ids, data.tokenizer.pad_token_id)
    assert generate(network, params, prompts, *arguments, inputs=images) == expected
    blank = {name: x * 0 for name, x in images.items()}
    assert generate(network, params, prompts, *arguments, inputs=blank) != expected
    if not options:  # several answers, and prompts of equal tokens with other images
        images = {name: np.concatenate([x, x[::-1]]) for name, x in images.items()}
        assert generate(network, params, prompts + prompts[::-1], *arguments, inputs=images, num_answers=2) == [
            answer for answer in expected + expected[::-1] for _ in range(2)]


KERNEL = Fused(num_heads=2, num_kv_heads=2, head_dim=8, dtype="float32", causal=False, scale=0.3, implementation="xla")


@pytest.mark.parametrize(("attend_to", "sizes"), [
    pytest.param(lambda ids, *qkv: attend_to_images(ids, 0.3, *qkv), [[300, 5, 280], [0, 600]], id="chunks"),
    pytest.param(lambda ids, *qkv: attend_in_windows(ids, 0.3, 16, *qkv), [[16, 3, 16, 16, 9], [1, 1, 12, 16]],
                 id="windows"),
    pytest.param(lambda ids, *qkv: KERNEL.for_batch({"input_ids": ids, "segment_ids": ids})(*qkv), [[3, 9], [16]],
                 id="kernel")])
def test_attention_of_patches_is_torchs_attention_of_each_image(attend_to, sizes):
    length = -(-max(map(sum, sizes)) // 16) * 16
    ids = np.stack([np.pad(np.repeat(1 + np.arange(len(row)), row), (0, length - sum(row))) for row in sizes])
    q, k, v, weights = np.random.default_rng(0).normal(size=(4, 2, length, 2, 8)).astype(np.float32)
    weights *= (ids > 0)[..., None, None]

    def run_torch(dtype):
        tensors = [torch.tensor(x, dtype=dtype, requires_grad=True) for x in (q, k, v)]
        mixed = torch.zeros(q.shape, dtype=dtype)
        for row in range(2):
            for image in range(1, len(sizes[row]) + 1):
                at = torch.tensor(ids[row] == image)
                parts = (x[row, at].transpose(0, 1) for x in tensors)  # heads first
                mixed[row, at] = torch.nn.functional.scaled_dot_product_attention(*parts, scale=0.3).transpose(0, 1)
        return mixed, torch.autograd.grad((mixed * torch.tensor(weights)).sum(), tensors)

    def loss(q, k, v):
        mixed = attend_to(jnp.asarray(ids), q, k, v).reshape(q.shape) * (ids > 0)[..., None, None]
        return (mixed * weights).sum(), mixed

    (_, mixed), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    assert_as_close((mixed, grads), run_torch(torch.float32), run_torch(torch.float64))


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl", "qwen2_5_vl"])
def test_random_weights_are_torchs(family, model_folder):
    config = load_config(str(model_folder(family)), all_parts=True)
    network = hub.network(config, "causal")
    assert_same_values(network.to_torch(network.init(3)),
                       from_config(lambda: AutoModelForImageTextToText.from_config(config), 3))


@pytest.mark.parametrize("family", ["idefics3", "gemma3"])
def test_operations_of_a_token_are_those_of_torch(family, model_folder):
    """Both without what sees images."""
    task = SFT(pretrained=str(model_folder(family)), images=True)
    task.network, params = on_jax(model_folder(family))
    assert task.flops_per_token(params, {}) == training_flops(
        AutoModelForImageTextToText.from_pretrained(model_folder(family)))


# ---- whole runs ----

@pytest.fixture
def arguments(model_folder, tmp_path):
    """Return a function that returns the arguments of a run on images; keys replace those of the recipe."""
    source = write_rows(tmp_path / "rows", [{"messages": messages} for messages in ROWS])

    def make(root, family="idefics3", engine="jax", **changes) -> list[str]:
        return make_arguments("SFT", model_folder(family), source, root, engine=engine, **changes)

    return make


def exported(root) -> dict[str, np.ndarray]:
    [file] = [file for file in (RunFolder(root).model / name for name in (
        "model.safetensors", "adapter_model.safetensors")) if file.is_file()]
    return load_file(file)


QLORA = {"model.lora": {"rank": 4, "dropout": 0.1}, "model.quantize": "nf4"}


@pytest.mark.parametrize(("family", "changes"), [
    pytest.param("idefics3", {}, id="full"), pytest.param("gemma3", WHOLE, id="all"),
    pytest.param("idefics3", QLORA | {"data.packing": True}, id="qlora"),
    pytest.param("qwen3_vl", WHOLE, id="qwen3_vl"),
    pytest.param("qwen3_vl", QLORA, id="qwen3_vl-qlora", marks=pytest.mark.slow),
    *(pytest.param(family, WHOLE, id=family, marks=pytest.mark.slow) for family in ("qwen2_5_vl", "qwen2_vl"))])
def test_both_engines_train_and_save_the_same(arguments, family, changes, model_folder, tmp_path):
    for engine in ("torch", "jax"):
        run("fit", *arguments(tmp_path / engine, family, engine, **changes))
    np.testing.assert_allclose(losses(tmp_path / "jax"), losses(tmp_path / "torch"), rtol=1e-4)
    ours, expected = exported(tmp_path / "jax"), exported(tmp_path / "torch")
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-2, atol=2e-3, err_msg=name)
    folders = [RunFolder(tmp_path / engine).model for engine in ("jax", "torch")]
    names = [{file.name for file in folder.iterdir()} for folder in folders]
    assert names[0] == names[1]
    if "model.lora" not in changes:
        for file in ("config.json", "processor_config.json", "preprocessor_config.json"):
            contents = [json.loads((folder / file).read_text()) for folder in folders]
            assert contents[0] == contents[1], file
        return
    # PEFT loads ours, and we load torch's.
    base = AutoModelForImageTextToText.from_pretrained(model_folder(family))
    loaded = get_peft_model_state_dict(PeftModel.from_pretrained(base, folders[0]))
    assert loaded.keys() == ours.keys() and all(np.array_equal(loaded[name], ours[name]) for name in ours)
    network = on_jax(model_folder(family))[0]
    settings = lora.adapter_settings(folders[1], network)
    lora.adapt(network, settings, {})
    tree = lora.load_adapter(network, folders[1])
    assert {saved_name(name) for name in network.to_torch(tree)} == expected.keys()


@pytest.mark.parametrize(("family", "changes", "names"), [
    ("idefics3", {}, ["split", "devices"]),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("gemma3", {}, ["split", "mesh"]), ("gemma3", PACKED, ["split"]), ("qwen2_5_vl", {}, ["split"]),
        ("qwen3_vl", {}, ["split", "mesh"]), ("qwen3_vl", PACKED, ["split"])))])
def test_any_split_and_several_devices_give_the_same_steps(arguments, family, changes, names, tmp_path):
    """With the whole model in training, and rows of zero to three images.

    Micro-batches are also split into chunks of rows; the mesh shards weights, rows and matrices.
    """
    splits = {"whole": {"data.batch_size": 8},
              "split": {"data.batch_size": 4, "trainer.accumulate_grad_batches": 2, "model.piece_tokens": 100},
              "devices": {"data.batch_size": 4, "trainer.devices": 2},
              "mesh": {"data.batch_size": 4, "trainer.devices": 8, "trainer.strategy": {
                  "class_path": MESH, "init_args": {"data": 1, "fsdp": 2, "sequence": 2, "tensor": 2}}}}
    results = {}
    for name in ("whole", *names):
        run("fit", *arguments(tmp_path / name, family, **WHOLE, **changes, **splits[name]))
        results[name] = losses(tmp_path / name), exported(tmp_path / name)
    expected_losses, expected = results.pop("whole")
    for name, (split_losses, weights) in results.items():
        assert split_losses == pytest.approx(expected_losses, rel=1e-5), name
        for key, weight in weights.items():
            np.testing.assert_allclose(weight, expected[key], rtol=1e-3, atol=1e-4, err_msg=f"{name} {key}")


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "changes", "command"), [
    ("ddp", WHOLE, "predict"), ("fsdp", {"model.lora": {"rank": 4}}, "fit")])
def test_two_processes_take_the_steps_of_one(sparse, strategy, changes, command, tmp_path):  # noqa: F811
    """Each process reads its own images, of other sizes and numbers than the other's. Then it predicts or resumes."""
    changes = changes | {"trainer.max_steps": 3, "data.val_source": None, "trainer.devices": 1}
    for_one = sparse(tmp_path / "one", "idefics3", **changes)
    for_two = sparse(tmp_path / "two", "idefics3", strategy, **changes)
    run("fit", *for_one)
    together(["fit", *for_two], 2)
    assert_same_run(tmp_path / "two", tmp_path / "one")
    if command == "fit":
        resume = ("--ckpt_path", "2", "--overwrite", "true")
        run("fit", *sparse(tmp_path / "two", "idefics3", **changes), *resume)
        assert_same_run(tmp_path / "two", tmp_path / "one")
        together(["fit", *for_two, *resume], 2)
        return assert_same_run(tmp_path / "two", tmp_path / "one")
    run("predict", *for_one, "--ckpt_path", "last")
    together(["predict", *for_two, "--ckpt_path", str(RunFolder(tmp_path / "one").resolve("last"))], 2)
    assert RunFolder(tmp_path / "two").predictions.read_text() == RunFolder(tmp_path / "one").predictions.read_text()


def test_both_engines_take_steps_without_images(sparse, tmp_path):  # noqa: F811
    """Weight decay changes the parts that see images in these, too."""
    for engine in ("torch", "jax"):
        run("fit", *sparse(tmp_path / engine, "idefics3", engine=engine, **WHOLE))
    ours, expected = exported(tmp_path / "jax"), exported(tmp_path / "torch")
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("family", ["idefics3", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_a_run_that_starts_on_torch_resumes_on_jax_with_the_same_answers(arguments, family, tmp_path):
    changes = {"model.optimizer.name": "adamw", "model.optimizer.lr": 0.01, "checkpoint.every_n_steps": 2,
               "data.predict_source": str(tmp_path / "rows" / "rows.jsonl")}
    for engine in ("torch", "jax"):
        root = tmp_path / engine
        run("fit", *arguments(root, family, "torch", **changes, **{"trainer.max_steps": 2}))
        for command in ("fit", "predict"):
            run(command, *arguments(root, family, engine, **changes, **{"trainer.max_steps": 4}), "--ckpt_path", "last")
    assert losses(tmp_path / "jax") == pytest.approx(losses(tmp_path / "torch"), rel=1e-4)
    ours, expected = (RunFolder(tmp_path / engine).predictions.read_text() for engine in ("jax", "torch"))
    assert ours == expected


def test_what_is_not_supported_is_an_error(arguments, model_folder, tmp_path, capsys):
    changes = {"model.pretrained": str(model_folder("llava_onevision"))}
    assert main(["fit", *arguments(tmp_path / "run", **changes)]) != 0
    assert "gemma3, idefics3, qwen2_5_vl, qwen2_vl, qwen3_vl, smolvlm" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("packing", [False, True])
def test_the_engines_agree_on_a_recipe(arguments, packing, tmp_path, capsys):
    run("inspect", *arguments(tmp_path / "run", "gemma3", **{"model.lora": {"rank": 4}, "data.packing": packing}),
        "--parity", "true")
    assert "Parity: pass" in capsys.readouterr().out
