"""Training on images on JAX: logits, losses, gradients and generation against transformers, and runs against torch."""

import json

import jax
import numpy as np
import pytest
import torch
from hf_reference import our_loss
from peft import PeftModel, get_peft_model_state_dict
from safetensors.numpy import load_file
from transformers import AutoModelForImageTextToText

from jax_engine.models import hub, loading, lora
from jax_engine.models.generate import generate
from jax_engine.tasks.sft import SFT
from lmmods.cli import main
from lmmods.core.adapters import saved_name
from lmmods.core.hf_config import load_config
from lmmods.core.settings import Generation
from lmmods.runs.folder import RunFolder
from lmmods.torch_engine.nn.summary import training_flops
from tests.closeness import assert_as_close, gradients, in_both
from tests.data.test_images import write_rows
from tests.torch_engine.test_images import ROWS, accepted, losses, make_batch, processed, run
from tests.vision_models import make_arguments, save_vision_model

FAMILIES = ("idefics3", "smolvlm", "gemma3")


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


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_all_gradients_are_those_of_transformers(family, model_folder, tmp_path):
    """Of every parameter, also with blank images that only pad the batch."""
    folder = model_folder(family)
    data, batch = make_batch(folder, tmp_path)
    labels = batch["labels"].numpy()
    inputs = processed(family, tmp_path, ROWS[:6])
    length = inputs["input_ids"].shape[1]
    if family != "gemma3":  # padding around images, as around those of other shapes
        for mask in (inputs["pixel_attention_mask"], batch["per_row/pixel_attention_mask"]):
            mask[1, 0, 12:] = mask[1, 0, :, 8:] = mask[0, 0, 4:] = 0
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    real = inputs["attention_mask"] > 0

    def run_torch(model):
        given = {name: value.to(next(model.parameters()).dtype) if value.is_floating_point() else value
                 for name, value in inputs.items()}
        logits = model(**accepted(model, given)).logits
        targets = torch.tensor(labels[:, 1:length])
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
        grads = gradients(model, loss)
        return logits[real], loss, {name: grads.get(name, torch.zeros(param.shape))
                                    for name, param in model.named_parameters()}

    expected, exact = in_both(run_torch, model)
    assert list(exact[2]) == [name for name, _ in model.named_parameters()]
    network, params = on_jax(folder)
    for more in (0, 2):
        padded = pad_images(batch, more)
        (loss, logits), grads = jax.jit(jax.value_and_grad(
            lambda params, batch=padded: our_loss(network, params, batch, labels), has_aux=True))(params)
        named = network.to_torch(grads)
        assert list(named) == list(exact[2])
        actual = (np.asarray(logits)[:, :length][real.numpy()], loss, named)
        for compared in zip(actual, expected, exact, strict=True):
            assert_as_close(*compared, terms=1024)
    assert all(grad.any() for name, grad in exact[2].items() if "vision" in name and "k_proj.bias" not in name)


@pytest.mark.parametrize(("family", "options"), [
    ("idefics3", {}), ("gemma3", {}), ("idefics3", {"use_cache": False}), ("gemma3", {"use_cache": False}),
    ("idefics3", {"num_beams": 2})], ids=str)
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


@pytest.mark.parametrize(("family", "changes"), [
    ("idefics3", {}), ("gemma3", {"model.trainable_parameters": [""]}),
    ("idefics3", {"model.lora": {"rank": 4, "dropout": 0.1}, "model.quantize": "nf4"})], ids=["full", "all", "qlora"])
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


@pytest.mark.parametrize("family", ["idefics3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_any_split_and_several_devices_give_the_same_steps(arguments, family, tmp_path):
    """With the whole model in training, rows of zero to three images, and chunks of some of them."""
    whole = {"model.trainable_parameters": [""]}
    splits = {"whole": {"data.batch_size": 8}, "split": {"data.batch_size": 4, "trainer.accumulate_grad_batches": 2},
              "devices": {"data.batch_size": 4, "trainer.devices": 2},
              "chunks": {"data.batch_size": 8, "model.piece_tokens": 100}}
    results = {}
    for name, split in splits.items():
        run("fit", *arguments(tmp_path / name, family, **whole, **split))
        results[name] = losses(tmp_path / name), exported(tmp_path / name)
    expected_losses, expected = results.pop("whole")
    for name, (split_losses, weights) in results.items():
        assert split_losses == pytest.approx(expected_losses, rel=1e-5), name
        for key, weight in weights.items():
            np.testing.assert_allclose(weight, expected[key], rtol=1e-3, atol=1e-4, err_msg=f"{name} {key}")


def test_a_run_that_starts_on_torch_resumes_on_jax_with_the_same_answers(arguments, tmp_path):
    changes = {"model.optimizer.name": "adamw", "model.optimizer.lr": 0.01, "checkpoint.every_n_steps": 2,
               "data.predict_source": str(tmp_path / "rows" / "rows.jsonl")}
    for engine in ("torch", "jax"):
        root = tmp_path / engine
        run("fit", *arguments(root, engine="torch", **changes, **{"trainer.max_steps": 2}))
        for command in ("fit", "predict"):
            run(command, *arguments(root, engine=engine, **changes, **{"trainer.max_steps": 4}), "--ckpt_path", "last")
    assert losses(tmp_path / "jax") == pytest.approx(losses(tmp_path / "torch"), rel=1e-4)
    ours, expected = (RunFolder(tmp_path / engine).predictions.read_text() for engine in ("jax", "torch"))
    assert ours == expected


def test_what_is_not_supported_is_an_error(arguments, model_folder, tmp_path, capsys):
    for changes, message in (({"trainer.strategy": "fsdp", "trainer.devices": 2}, "trainer.strategy: a mesh, fsdp"),
                             ({"model.pretrained": str(model_folder("qwen3_vl"))}, "gemma3, idefics3, smolvlm")):
        assert main(["fit", *arguments(tmp_path / "run", **changes)]) != 0
        assert message in " ".join(capsys.readouterr().err.split())


def test_the_engines_agree_on_a_recipe(arguments, tmp_path, capsys):
    run("inspect", *arguments(tmp_path / "run", "gemma3", **{"model.lora": {"rank": 4}}), "--parity", "true")
    assert "Parity: pass" in capsys.readouterr().out
