"""Preference optimisation with images on torch: losses, gradients and references against transformers, whole runs."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from lmmods.core.hf_config import load_config
from lmmods.data.preference import PreferenceData
from lmmods.runs.folder import RunFolder
from lmmods.torch_engine.nn.building import build_network
from lmmods.torch_engine.nn.dropout import TokenDropout
from lmmods.torch_engine.nn.images import ImageInputs
from lmmods.torch_engine.nn.lm_head import LMHead
from lmmods.torch_engine.nn.micro_batches import split_rows
from lmmods.torch_engine.nn.reference import Reference
from lmmods.torch_engine.tasks.preference import Preference
from tests.closeness import assert_as_close, gradients, in_both
from tests.data.test_images import part, text, turns, with_paths, write_rows
from tests.torch_engine.test_images import accepted, losses, run, saved
from tests.torch_engine.test_preference import ALONE, compute_gradients
from tests.vision_models import FAMILY_PARAMS, make_arguments, make_processor, save_vision_model

PROMPTS = [turns([text(f"question {index} "), *images]) for index, images in enumerate(
    [[part(0)], [part(1), text("and"), part(2)], [], [part(2)], [part(0), part(1), part(2)], [part(1)]] * 2)]
ROWS = [{"prompt": prompt, "chosen": [{"role": "assistant", "content": f"good answer {index % 4}"}],
         "rejected": [{"role": "assistant", "content": "bad" * (index % 3 + 1)}]}
        for index, prompt in enumerate(PROMPTS)]
LABELLED = [{"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
            for row in ROWS[:6] for name in ("chosen", "rejected")]


@pytest.fixture
def model_folder(shared):
    return lambda family: shared(f"vision_{family}", lambda folder: save_vision_model(family, folder))


def load(folder, source, tmp_path, task, **fields):
    data = PreferenceData(source=source, **{"max_length": 256, "cache_dir": str(tmp_path / "cache"), "shuffle": False,
                                            "batch_size": 6, **fields})
    task.check_data(data)
    data.connect(seed=7, **task.data_facts("fit", None))
    data.prepare_data()
    data.setup("fit")
    return data


def make_task(folder, tmp_path, rows=ROWS, **fields):
    """Return a task without a trainer, whose weights differ from its reference, and its first batch."""
    task = Preference(pretrained=str(folder), images=True, **fields)
    data = load(folder, write_rows(tmp_path / "rows", rows), tmp_path, task)
    task.model = build_network(task, task.auto_class, task.task_type, data, precision="32-true",
                               device=torch.device("cpu"), seed=7)
    task.model.further_inputs, task.head = ImageInputs(task.model), LMHead.from_model(task.model)
    task._dropout, task._trainer = TokenDropout.from_model(task.model), ALONE
    if task.reference_kind is not None:
        task._reference = Reference(task.model, task.reference_kind, task.trainable())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in task.trainable().values():
            param += 0.02 * torch.randn(param.shape, generator=generator)
    return task, next(iter(data.train_batches()))


def processed(family, folder, batch, side, rows):
    """Return the inputs of transformers' own processor for one answer of each row, and where it has targets."""
    processor, name = make_processor(family), ("chosen", "rejected")[side]
    conversations = [with_paths([*row["prompt"], *({**turn, "content": [text(turn["content"])]} for turn in row[name])],
                                folder) for row in rows]
    inputs = processor.apply_chat_template(conversations, tokenize=True, return_dict=True, return_tensors="pt",
                                           processor_kwargs={"padding": True, "padding_side": "right"})
    prompts = processor.apply_chat_template([messages[:-1] for messages in conversations], tokenize=True,
                                            return_dict=True, add_generation_prompt=True)
    length, (ids, mask) = inputs["input_ids"].shape[1], (batch[name][:, side] for name in (
        "input_ids", "attention_mask"))
    assert torch.equal((ids * mask)[:, :length], inputs["input_ids"] * inputs["attention_mask"])
    is_target = batch["labels"][:, side] >= 0
    assert is_target.int().argmax(1).tolist() == [sum(mask) for mask in prompts["attention_mask"]]
    return inputs, is_target[:, :length]


def summed_logps(model, inputs, is_target):
    """Return the log-probability of the targets of each row under transformers' own forward."""
    dtype = next(model.parameters()).dtype
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    logps = F.log_softmax(model(**accepted(model, inputs)).logits[:, :-1], -1)
    return (logps.gather(2, inputs["input_ids"][:, 1:, None])[..., 0] * is_target[:, 1:]).sum(1)


@pytest.mark.parametrize("family", FAMILY_PARAMS)
def test_loss_and_gradients_of_pairs_are_those_of_transformers(family, model_folder, tmp_path):
    """DPO's, with every parameter in training, and split into chunks."""
    folder = model_folder(family)
    task, batch = make_task(folder, tmp_path, trainable_parameters=[""], beta=0.3)
    policy, reference = (AutoModelForImageTextToText.from_pretrained(folder).eval() for _ in range(2))
    policy.load_state_dict(task.model.state_dict())
    sides = [processed(family, tmp_path / "rows", batch, side, ROWS[:6]) for side in range(2)]

    def whole(models):
        logps, reference_logps = (torch.stack([summed_logps(model, *side) for side in sides], 1) for model in models)
        gains = logps - reference_logps.detach()
        loss = -F.logsigmoid(0.3 * (gains[:, 0] - gains[:, 1])).mean()
        return loss, named(gradients(models[0], loss)), reference_logps

    expected, exact = in_both(whole, torch.nn.ModuleList([policy, reference]))
    for chunks in ([batch], split_rows(batch, 1)):
        assert len(chunks) in (1, 6)
        assert_as_close(compute_gradients(task, chunks), expected[:2], exact[:2])
    assert_as_close(task.complete(batch)["reference_logps"], expected[2], exact[2])
    assert any(grad.any() for name, grad in exact[1].items() if "vision" in name or "visual" in name)


def named(grads):
    """Return gradients of a network by the names of a task's parameters."""
    return {f"model.{name}": grad for name, grad in grads.items()}


def test_the_loss_of_single_answers_is_that_of_transformers(model_folder, tmp_path):
    """KTO's, whose second answers follow the row's own prompt and images."""
    folder = model_folder("idefics3")
    task, batch = make_task(folder, tmp_path, LABELLED, trainable_parameters=[""], beta=0.3, loss="kto")
    policy, reference = (AutoModelForImageTextToText.from_pretrained(folder).eval() for _ in range(2))
    policy.load_state_dict(task.model.state_dict())
    pairs = [row for row in ROWS[:3] for _ in range(2)]
    sides = []
    for side in range(2):
        pixels = processed_pixels(tmp_path / "rows", pairs)
        sides.append(({**pixels, **{name: batch[name][:, side] for name in ("input_ids", "attention_mask")}},
                      batch["labels"][:, side] >= 0))
    assert not torch.equal(batch["input_ids"][:, 0], batch["input_ids"][:, 1])

    def whole(models):
        logps, reference_logps = (torch.stack([summed_logps(model, *side) for side in sides], 1) for model in models)
        gains = logps - reference_logps.detach()
        baseline = gains[:, 1].mean().clamp(min=0).detach()
        signs = torch.tensor([1, -1] * 3)
        loss = (1 - torch.sigmoid(0.3 * signs * (gains[:, 0] - baseline))).mean()
        return loss, named(gradients(models[0], loss))

    expected, exact = in_both(whole, torch.nn.ModuleList([policy, reference]))
    for chunks in ([batch], split_rows(batch, 1)):
        assert_as_close(compute_gradients(task, chunks), expected, exact)
    assert task._baseline > 0


def processed_pixels(folder, rows):
    inputs = make_processor("idefics3").apply_chat_template(
        [with_paths(row["prompt"], folder) for row in rows], tokenize=True, return_dict=True, return_tensors="pt",
        processor_kwargs={"padding": True})
    return {name: value for name, value in inputs.items() if name.startswith("pixel")}


def test_the_text_model_has_no_dropout_either(model_folder, tmp_path):
    folder = shutil.copytree(model_folder("idefics3"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["attention_dropout"] = config["vision_config"]["attention_dropout"] = 0.1
    (folder / "config.json").write_text(json.dumps(config))
    fields = Preference(pretrained=str(folder), images=True)
    built = load_config(str(folder), fields.overrides, all_parts=True)
    assert built.text_config.attention_dropout == built.vision_config.attention_dropout == 0
    assert load_config(str(folder), all_parts=True).text_config.attention_dropout == 0.1


# ---- whole runs ----

@pytest.fixture
def arguments(model_folder, tmp_path):
    """Return a function that returns the arguments of a run on pairs with images; keys replace those of the recipe."""
    source = write_rows(tmp_path / "rows", ROWS)

    def make(root, family="idefics3", **changes) -> list[str]:
        return make_arguments("Preference", model_folder(family), source, root, **changes)

    return make


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"])
def test_any_batch_split_gives_the_same_steps(arguments, family, tmp_path):
    """With the whole model in training, and a reference that is a copy or was computed before."""
    results = []
    for size in (8, 4, 1):
        root = tmp_path / f"split{size}"
        run("fit", *arguments(root, family, **{
            "data.batch_size": size, "trainer.accumulate_grad_batches": 8 // size, "model.trainable_parameters": [""],
            "model.reference": "copy" if size == 4 else "cache", "data.num_workers": int(size == 4)}))
        results.append((losses(root), saved(root)))
    for other_losses, weights in results[1:]:
        assert other_losses == pytest.approx(results[0][0], rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, results[0][1][name], rtol=1e-4, atol=1e-5)
    assert results[0][0][0] == pytest.approx(0.6931, abs=1e-3) and len(set(results[0][0])) == 3


def test_a_resumed_run_with_an_adapter_ends_with_the_same_bits_and_answers(arguments, model_folder, tmp_path):
    """Its reference is the model without the adapter."""
    changes = {"model.lora": {"rank": 4}, "model.optimizer.name": "adamw", "model.optimizer.lr": 0.01,
               "checkpoint.every_n_steps": 1, "checkpoint.keep_last": 9, "trainer.max_steps": 4,
               "data.predict_source": str(tmp_path / "rows" / "rows.jsonl")}
    run("fit", *arguments(tmp_path / "whole", **changes))
    second = next(path for path in (tmp_path / "whole").rglob("*step=2*") if path.is_dir())
    shutil.copytree(second, tmp_path / "step2")
    run("fit", *arguments(tmp_path / "again", **changes), "--ckpt_path", str(tmp_path / "step2"))
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")[2:]
    adapters = [load_file(RunFolder(tmp_path / name).model / "adapter_model.safetensors")
                for name in ("again", "whole")]
    assert all(torch.equal(value, adapters[1][name]) for name, value in adapters[0].items())
    run("predict", *arguments(tmp_path / "whole", **changes), "--ckpt_path", "last")
    predictions = [json.loads(line) for line in RunFolder(tmp_path / "whole").predictions.read_text().splitlines()]
    assert len(predictions) == len(ROWS)
    base = AutoModelForImageTextToText.from_pretrained(model_folder("idefics3"))
    tuned = PeftModel.from_pretrained(base, RunFolder(tmp_path / "whole").model).eval()
    processor = make_processor("idefics3")
    for row, prediction in list(zip(ROWS, predictions, strict=True))[:3]:
        inputs = processor.apply_chat_template(with_paths(row["prompt"], tmp_path / "rows"), tokenize=True,
                                               return_dict=True, return_tensors="pt", add_generation_prompt=True)
        with torch.no_grad():
            tokens = tuned.generate(**accepted(base, inputs), max_new_tokens=4, do_sample=False)
        answer = processor.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)
        assert prediction["prediction"] == answer.strip()
