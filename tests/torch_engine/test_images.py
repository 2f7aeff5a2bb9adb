"""Training on images on torch: losses, gradients and generation against transformers' own models, and whole runs."""

import csv
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, GenerationConfig

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.core.image_models import image_token, is_of_language_model
from lmmods.data.sft import SFTData
from lmmods.runs.folder import RunFolder
from lmmods.torch_engine.nn.building import build_network
from lmmods.torch_engine.nn.decoding import Record, generate
from lmmods.torch_engine.nn.images import ImageInputs
from lmmods.torch_engine.nn.lm_head import LMHead, causal_loss
from lmmods.torch_engine.nn.micro_batches import split_rows
from lmmods.torch_engine.tasks.sft import SFT
from tests.closeness import Float64, in_float64
from tests.data.test_images import part, text, turns, with_paths, write_rows
from tests.vision_models import FAMILIES, make_processor, save_vision_model

ROWS = [turns([text(f"question {index} "), *images], f"answer {index % 4}") for index, images in enumerate(
    [[part(0)], [part(1), text("and"), part(2)], [], [part(2)], [part(0), part(1), part(2)], [part(1)]] * 2)]


@pytest.fixture
def model_folder(shared):
    return lambda family: shared(f"vision_{family}", lambda folder: save_vision_model(family, folder))


def make_batch(folder, tmp_path, batch_size=6, **fields):
    """Return a data module and its first training batch."""
    source = write_rows(tmp_path / "rows", [{"messages": messages} for messages in ROWS])
    data = SFTData(source=source, max_length=256, batch_size=batch_size, shuffle=False,
                   cache_dir=str(tmp_path / "cache"), **fields)
    data.connect(seed=7, **SFT(pretrained=str(folder), images=True).data_facts("fit", None))
    data.prepare_data()
    data.setup("fit")
    return data, next(iter(data.train_batches()))


def build(folder, data, **fields):
    task = SFT(pretrained=str(folder), images=True, **fields)
    model = build_network(task, task.auto_class, task.task_type, data, precision="32-true", device=torch.device("cpu"),
                          seed=7)
    model.further_inputs = ImageInputs(model)
    return model


def processed(family, tmp_path, conversations, side="right", **options):
    """Return transformers' own batch of conversations."""
    processor = make_processor(family)
    processor.tokenizer.padding_side = side
    return processor.apply_chat_template([with_paths(messages, tmp_path / "rows") for messages in conversations],
                                         tokenize=True, return_dict=True, return_tensors="pt",
                                         processor_kwargs={"padding": True}, **options)


def accepted(model, inputs):
    import inspect

    return {name: value for name, value in inputs.items() if name in inspect.signature(model.forward).parameters}


# ---- one batch ----

@pytest.mark.parametrize("trained", ["language", "all"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_loss_and_gradients_are_those_of_transformers(family, trained, model_folder, tmp_path):
    """In float64; the loss over targets of our batch, also split into chunks."""
    folder = model_folder(family)
    data, batch = make_batch(folder, tmp_path)
    model = build(folder, data, **({"trainable_parameters": [""]} if trained == "all" else {}))
    assert {name for name, param in model.named_parameters() if param.requires_grad} == {
        name for name, _ in model.named_parameters() if trained == "all" or is_of_language_model(name)}
    expected_model = in_float64(AutoModelForImageTextToText.from_pretrained(folder)).train()
    inputs = processed(family, tmp_path, ROWS[:6])
    length = inputs["input_ids"].shape[1]
    assert torch.equal(batch["input_ids"][:, :length] * batch["attention_mask"][:, :length],
                       inputs["input_ids"] * inputs["attention_mask"])
    model = in_float64(model)
    model.further_inputs = ImageInputs(model)
    with Float64():
        inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        expected_model(**accepted(expected_model, inputs), labels=batch["labels"][:, :length]).loss.backward()
        expected = {name: param.grad for name, param in expected_model.named_parameters()}
        batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
        head = LMHead.from_model(model)
        for chunks in ([batch], split_rows(batch, 1)):
            assert len(chunks) in (1, 6)
            model.zero_grad()
            sums = [causal_loss(model, head, chunk) for chunk in chunks]
            weight = sum(part.weight for part in sums)
            (sum(part.total for part in sums) / weight).backward()
            for name, param in model.named_parameters():
                if param.requires_grad:
                    wanted = expected[name] if expected[name] is not None else torch.zeros_like(param)
                    grad = param.grad if param.grad is not None else torch.zeros_like(param)
                    torch.testing.assert_close(grad, wanted, rtol=1e-8, atol=1e-12)
    if trained == "all":  # every part of the model is compared with something
        assert any(grad is not None and grad.any() for name, grad in expected.items() if not is_of_language_model(name))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_answers_are_those_of_transformers(family, model_folder, tmp_path):
    folder = model_folder(family)
    data, _ = make_batch(folder, tmp_path, eval_batch_size=6)
    data.sets["predict"] = data.sets["train"]
    batch = next(iter(data.predict_dataloader()))
    model = build(folder, data).eval()
    expected_model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    prompts = [ROWS[index][:1] for index in batch["index"].tolist()]
    inputs = processed(family, tmp_path, prompts, "left", add_generation_prompt=True)
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=data.tokenizer.pad_token_id,
                                eos_token_id=data.codec.stop_token_ids)
    record, blank = Record(6, 8, torch.device("cpu")), Record(6, 8, torch.device("cpu"))
    further = model.further_inputs(batch)
    with torch.no_grad():
        expected = expected_model.generate(**accepted(expected_model, inputs), generation_config=settings,
                                           output_logits=True, return_dict_in_generate=True)
        tokens = generate(model, batch["input_ids"], batch["attention_mask"], settings, record=record, **further)
        generate(model, batch["input_ids"], batch["attention_mask"], settings, record=blank,
                 **further | {"pixel_values": further["pixel_values"] * 0.5})
    assert torch.equal(tokens[:, batch["input_ids"].shape[1]:], expected.sequences[:, inputs["input_ids"].shape[1]:])
    first = expected.logits[0].log_softmax(-1).amax(-1)
    torch.testing.assert_close(record.logps[:, 0], first, rtol=1e-4, atol=1e-4)
    has_images = torch.tensor([bool(batch["input_ids"][row].eq(image_token(model.config)).any()) for row in range(6)])
    assert torch.equal((record.logps[:, 0] - blank.logps[:, 0]).abs() > 1e-4, has_images)
