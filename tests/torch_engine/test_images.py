"""Training on images on torch: losses, gradients and generation against transformers' own models, and whole runs."""

import csv
import inspect
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText, GenerationConfig, pipeline

from lmmods.cli import main
from lmmods.commands.plan import planner_of
from lmmods.commands.registry import options_of
from lmmods.core.hardware import target_named
from lmmods.core.image_models import find_image_family, image_token, is_of_language_model
from lmmods.core.labels import IGNORED
from lmmods.core.settings import LoRA
from lmmods.data.sft import SFTData
from lmmods.recipe.reader import parse
from lmmods.runs.folder import RunFolder
from lmmods.torch_engine.nn.attention import VARLEN, prefer_varlen
from lmmods.torch_engine.nn.building import build_network
from lmmods.torch_engine.nn.decoding import Record, generate
from lmmods.torch_engine.nn.images import ImageInputs
from lmmods.torch_engine.nn.lm_head import LMHead, causal_loss
from lmmods.torch_engine.nn.micro_batches import split_rows
from lmmods.torch_engine.nn.summary import training_flops
from lmmods.torch_engine.planning import full_batch, stand_in, take_step
from lmmods.torch_engine.tasks.sft import SFT
from tests.closeness import Float64, gradients, in_float64
from tests.data.test_images import part, text, turns, with_paths, write_rows
from tests.forks import together
from tests.torch_engine.test_packed_attention import attend_by_document, calls
from tests.vision_models import FAMILY_PARAMS, make_arguments, make_processor, picture, save_vision_model

ROWS = [turns([text(f"question {index % 3} "), *images], f"answer {index % 4}") for index, images in enumerate(
    [[part(0)], [part(1), text("and"), part(2)], [], [part(2)], [part(0), part(1), part(2)], [part(1)]] * 2)]


@pytest.fixture
def model_folder(shared):
    return lambda family: shared(f"vision_{family}", lambda folder: save_vision_model(family, folder))


def make_batch(folder, tmp_path, batch_size=6, rows=ROWS, max_length=256, **fields):
    """Return a data module and its first training batch."""
    source = write_rows(tmp_path / "rows", [{"messages": messages} for messages in rows])
    data = SFTData(source=source, max_length=max_length, batch_size=batch_size, shuffle=False,
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
    conversations = [with_paths(messages, tmp_path / "rows") for messages in conversations]
    return make_processor(family).apply_chat_template(
        conversations, tokenize=True, return_dict=True, return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": side}, **options)


def accepted(model, inputs):
    return {name: value for name, value in inputs.items() if name in inspect.signature(model.forward).parameters}


def make_packs(folder, tmp_path):
    """Return the batches of the first six rows in packs twice as long as the longest, two packs in each batch."""
    data, batch = make_batch(folder, tmp_path)
    packed, _ = make_batch(folder, tmp_path / "packed", 2, ROWS[:6], int(2 * batch["attention_mask"].sum(1).max()),
                           packing=True)
    batches = list(packed.train_batches())
    assert len(batches[0]["segment_ids"]) == 2 and batches[0]["segment_ids"].max() > 1
    return batches


# ---- one batch ----

@pytest.mark.parametrize("trained", ["language", "all"])
@pytest.mark.parametrize("family", FAMILY_PARAMS)
def test_loss_and_gradients_are_those_of_transformers(family, trained, model_folder, tmp_path):
    """In float64; the loss over targets of our batch, also split into chunks, and of the same rows in packs."""
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
    packs = make_packs(folder, tmp_path) if find_image_family(model.config.model_type).can_pack else [batch]
    model.further_inputs = ImageInputs(model)
    with Float64():
        inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        expected_model(**accepted(expected_model, inputs), labels=batch["labels"][:, :length]).loss.backward()
        expected = {name: param.grad for name, param in expected_model.named_parameters()}
        batches = [{name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
                   for batch in (batch, *packs)]
        head = LMHead.from_model(model)
        for chunks in (batches[:1], split_rows(batches[0], 1), batches[1:]):
            model.zero_grad()
            sums = [causal_loss(model, head, chunk) for chunk in chunks]
            weight = sum(part.weight for part in sums)
            assert weight == batches[0]["labels"].ne(IGNORED).sum()
            (sum(part.total for part in sums) / weight).backward()
            for name, param in model.named_parameters():
                if param.requires_grad:
                    wanted = expected[name] if expected[name] is not None else torch.zeros_like(param)
                    grad = param.grad if param.grad is not None else torch.zeros_like(param)
                    torch.testing.assert_close(grad, wanted, rtol=1e-8, atol=1e-12)
    if trained == "all":  # every part of the model is compared with something
        assert any(grad is not None and grad.any() for name, grad in expected.items() if not is_of_language_model(name))


@pytest.mark.parametrize("family", ["qwen2_5_vl", *(pytest.param(family, marks=pytest.mark.slow) for family in (
    "idefics3", "qwen3_vl", "llava_onevision"))])
def test_packs_have_the_same_gradients_by_the_kernel_for_documents(family, model_folder, tmp_path):
    """In float64, with a loop for torch's kernel; a model in 16 bits chooses it."""
    packs = [{name: value.double() if value.is_floating_point() else value for name, value in pack.items()}
             for pack in make_packs(model_folder(family), tmp_path)]
    data, _ = make_batch(model_folder(family), tmp_path)
    model = build(model_folder(family), data, trainable_parameters=[""]).bfloat16()
    model.set_attn_implementation("sdpa")
    prefer_varlen(model, attend_by_document)
    assert model.config._attn_implementation == VARLEN
    exact, grads = in_float64(model), []
    with Float64():
        for attention in ("sdpa", VARLEN):
            exact.set_attn_implementation(attention)
            calls.clear()
            grads.append(gradients(exact, sum(causal_loss(exact, None, pack).total for pack in packs)))
    assert len(calls) == len(packs) * model.config.get_text_config().num_hidden_layers
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("family", ["idefics3", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_a_frozen_vision_tower_has_no_backward_pass(family, model_folder, tmp_path):
    data, batch = make_batch(model_folder(family), tmp_path)
    model = build(model_folder(family), data, gradient_checkpointing=True, lora=LoRA(rank=2))
    needs_grad = {}

    def note(name, output):
        needs_grad[is_of_language_model(name)] = (output[0] if isinstance(output, tuple) else output).requires_grad

    for name, module in model.named_modules():
        if name.endswith(("layers.0", "blocks.0")):
            module.register_forward_hook(lambda _, inputs, output, name=name: note(name, output))
    causal_loss(model, LMHead.from_model(model), batch)
    assert needs_grad == {False: False, True: True}


@pytest.mark.parametrize("family", FAMILY_PARAMS)
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


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_searches_see_the_images_of_their_rows(family, model_folder, tmp_path):
    """Beam search is transformers'. Contrastive search among one candidate is greedy."""
    folder = model_folder(family)
    data, _ = make_batch(folder, tmp_path, eval_batch_size=6)
    data.sets["predict"] = data.sets["train"]
    batch = next(iter(data.predict_dataloader()))
    model = build(folder, data).eval()
    ids, mask, further = batch["input_ids"], batch["attention_mask"], model.further_inputs(batch)

    def settings(**options):
        return GenerationConfig(max_new_tokens=8, pad_token_id=data.tokenizer.pad_token_id, **options)

    with torch.no_grad():
        greedy = generate(model, ids, mask, settings(do_sample=False), **further)
        assert torch.equal(generate(model, ids, mask, settings(penalty_alpha=0.5, top_k=1), **further), greedy)
        beams = generate(model, ids, mask, settings(num_beams=3), **further)
        expected = AutoModelForImageTextToText.from_pretrained(folder).eval().generate(
            input_ids=ids, attention_mask=mask, generation_config=settings(num_beams=3), **further)
    assert torch.equal(beams, expected)


# ---- whole runs ----

@pytest.fixture
def arguments(model_folder, tmp_path):
    """Return a function that returns the arguments of a run on images; keys replace those of the recipe."""
    source = write_rows(tmp_path / "rows", [{"messages": messages} for messages in ROWS])

    def make(root, family="idefics3", **changes) -> list[str]:
        return make_arguments("SFT", model_folder(family), source, root, **changes)

    return make


def run(*args) -> None:
    assert main(list(args)) == 0


def losses(root) -> list[float]:
    with open(RunFolder(root).metrics_csv, newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def saved(root) -> dict[str, torch.Tensor]:
    return load_file(RunFolder(root).resolve("last") / "model.safetensors")


PACKED = {"data.packing": True, "data.max_length": 80}


@pytest.mark.parametrize(("family", "changes"), [
    ("idefics3", {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("qwen3_vl", {}), ("qwen2_5_vl", PACKED), ("gemma3", {}), ("llava_onevision", {}), ("gemma3", PACKED),
        ("llava_onevision", PACKED)))])
def test_any_batch_split_gives_the_same_steps(arguments, family, changes, tmp_path):
    """With the whole model in training, and rows of zero to three images."""
    results = []
    for size in (8, 4, 1) if family == "idefics3" else (8, 1):
        root = tmp_path / f"split{size}"
        run("fit", *arguments(root, family, **changes, **{
            "data.batch_size": size, "trainer.accumulate_grad_batches": 8 // size, "model.trainable_parameters": [""],
            "data.num_workers": int(size == 4)}))
        results.append((losses(root), saved(root)))
    for other_losses, weights in results[1:]:
        assert other_losses == pytest.approx(results[0][0], rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, results[0][1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "changes"), [("idefics3", {}), *(
    pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("qwen3_vl", PACKED | {"model.lora": {"rank": 4, "dropout": 0.1}}),
        ("gemma3", {"data.streaming": True, "data.stream_window": 5})))])
def test_a_resumed_run_ends_with_the_same_bits(arguments, family, changes, tmp_path):
    adam = changes | {"model.optimizer.name": "adamw", "model.optimizer.lr": 0.01, "checkpoint.every_n_steps": 1,
            "checkpoint.keep_last": 9}
    run("fit", *arguments(tmp_path / "whole", family, **adam, **{"trainer.max_steps": 4}))
    second = next(path for path in (tmp_path / "whole").rglob("*step=2*") if path.is_dir())
    shutil.copytree(second, tmp_path / "step2")
    run("fit", *arguments(tmp_path / "again", family, **adam, **{"trainer.max_steps": 4}), "--ckpt_path",
        str(tmp_path / "step2"))
    assert len(losses(tmp_path / "again")) == 2
    assert all(torch.equal(value, saved(tmp_path / "whole")[name]) for name, value in saved(tmp_path / "again").items())


def test_a_trained_model_is_a_pipeline_of_transformers(arguments, model_folder, tmp_path, monkeypatch):
    """The code of its card runs, too."""
    root = tmp_path / "run"
    run("fit", *arguments(root, **{"data.image_options": {"max_image_size": {"longest_edge": 16}, "do_resize": True}}))
    model = RunFolder(root).model
    generate_text = pipeline("image-text-to-text", model=str(model), device="cpu")
    answer = generate_text(text=with_paths(ROWS[0][:1], tmp_path / "rows"), max_new_tokens=4, return_full_text=False)
    run("predict", *arguments(root, **{"data.predict_source": str(tmp_path / "rows" / "rows.jsonl")}),
        "--ckpt_path", "last")
    predictions = [json.loads(line) for line in RunFolder(root).predictions.read_text().splitlines()]
    assert predictions[0]["prediction"] == answer[0]["generated_text"].strip()
    card = (model / "README.md").read_text()
    monkeypatch.chdir(model)
    picture(0).save("picture.png")
    exec(re.search("```python\n(.*?)```", card, re.S)[1], {})
    assert "pipeline_tag: image-text-to-text" in card and "AutoProcessor.from_pretrained(name)" in card
    vision = {name: value for name, value in load_file(model / "model.safetensors").items()
              if not is_of_language_model(name)}
    base = load_file(model_folder("idefics3") / "model.safetensors")
    assert len(vision) > 10 and all(torch.equal(value, base[name]) for name, value in vision.items())


@pytest.mark.parametrize(("family", "quantize"), [
    ("idefics3", None), pytest.param("gemma3", "nf4", marks=pytest.mark.slow)])
def test_an_adapter_is_loaded_by_peft_and_merged(arguments, family, quantize, model_folder, tmp_path):
    from peft import PeftModel

    root = tmp_path / "run"
    run("fit", *arguments(root, family, **{
        "model.lora": {"rank": 4, "dropout": 0.1}, "model.quantize": quantize, "model.optimizer.lr": 0.5,
        "data.eval_batch_size": 1, "data.predict_source": str(tmp_path / "rows" / "rows.jsonl")}))
    model = RunFolder(root).model
    names = list(load_file(model / "adapter_model.safetensors"))
    assert names and all(is_of_language_model(name) for name in names)
    if quantize is None:
        base = AutoModelForImageTextToText.from_pretrained(model_folder(family))
        tuned = PeftModel.from_pretrained(base, model).eval()
        inputs = processed(family, tmp_path, [ROWS[1][:1]], "left", add_generation_prompt=True)
        with torch.no_grad():
            tokens = tuned.generate(**accepted(base, inputs), max_new_tokens=4, do_sample=False)
        run("predict", *arguments(root, family, **{
            "model.lora": {"rank": 4, "dropout": 0.1}, "data.eval_batch_size": 1,
            "data.predict_source": str(tmp_path / "rows" / "rows.jsonl")}), "--ckpt_path", "last")
        predictions = [json.loads(line) for line in RunFolder(root).predictions.read_text().splitlines()]
        answer = tokens[0, inputs["input_ids"].shape[1]:]
        tokenizer = make_processor(family).tokenizer
        assert predictions[1]["prediction"] == tokenizer.decode(answer, skip_special_tokens=True).strip()
    run("merge", "--run", str(root), "--out", str(tmp_path / "merged"))
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    assert (tmp_path / "merged" / "processor_config.json").is_file()
    assert any((param != before).any() for param, before in zip(
        merged.parameters(), AutoModelForImageTextToText.from_pretrained(model_folder(family)).parameters()))


def test_a_projector_trains_next_to_an_adapter(arguments, tmp_path):
    run("fit", *arguments(tmp_path / "run", "gemma3", **{
        "model.lora": {"rank": 4, "modules_to_save": ["multi_modal_projector"]}, "model.gradient_checkpointing": True}))
    names = load_file(RunFolder(tmp_path / "run").model / "adapter_model.safetensors")
    assert any("multi_modal_projector" in name for name in names)


def test_without_images_the_text_model_trains_and_rows_with_images_are_counted(arguments, tmp_path, capsys):
    run("fit", *arguments(tmp_path / "run", "gemma3", **{"model.images": False, "data.batch_size": 1}))
    report = json.loads(RunFolder(tmp_path / "run").data_report.read_text())
    [source] = report["sources"].values()
    assert source["dropped"] == {"a turn has an image, which only SFT and Preference read, with model.images": {
        "rows": 10, "first": [f"{tmp_path}/rows/rows.jsonl:{line}" for line in (1, 2, 4)]}}


# Two rows per step: one step has no images, and in others one row has none.
SPARSE = [turns([text(f"question {index} "), *images], f"answer {index}") for index, images in enumerate(
    [[part(0)], [], [], [], [], [part(1), part(2)], [part(2)], []])]
WHOLE = {"model.trainable_parameters": [""]}
PROJECTOR = {"model.lora": {"rank": 4, "modules_to_save": ["multi_modal_projector"]}, "model.optimizer.lr": 1.0}
QLORA = {"model.lora": {"rank": 4, "dropout": 0.1}, "model.quantize": "nf4"}
SHARDED = {"class_path": "lmmods.strategies.FSDP2", "init_args": {"sharded_checkpoints": True}}


@pytest.fixture
def sparse(arguments, tmp_path):
    """Return a function that makes the arguments of a run on SPARSE, by one process or by two."""
    source = write_rows(tmp_path / "rows", [{"messages": messages} for messages in SPARSE], "sparse.jsonl")

    def make(root, family, strategy=None, **changes):
        split = {"data.batch_size": 1, "trainer.devices": 2, "trainer.strategy": strategy} if strategy else {
            "data.batch_size": 2}
        return arguments(root, family, **{
            "data.source": source, "data.shuffle": False, "data.val_source": source, "trainer.limit_val_batches": 1.0,
            "data.predict_source": source, "data.eval_batch_size": 1, "trainer.max_steps": 4,
            "model.optimizer.weight_decay": 0.1, "checkpoint.every_n_steps": 2, "checkpoint.keep_last": 9, **split,
            **changes})

    return make


def figures(root) -> dict[str, float]:
    with open(RunFolder(root).metrics_csv, newline="") as file:
        return {f"{name} {row['step']}": float(row[name]) for row in csv.DictReader(file)
                for name in ("train/loss", "train/grad_norm", "val/loss") if row.get(name)}


def assert_same_run(root, other) -> None:
    assert figures(root) == pytest.approx(figures(other), rel=1e-5) and len(figures(root)) >= 6
    ours, expected = (load_file(next(RunFolder(root).model.glob("*model.safetensors"))) for root in (root, other))
    assert ours.keys() == expected.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "strategy", "changes"), [
    ("qwen3_vl", "ddp", {}), ("qwen3_vl", "ddp", WHOLE), ("gemma3", "ddp", PROJECTOR), ("llava_onevision", "fsdp", {}),
    ("qwen3_vl", "fsdp", WHOLE), ("idefics3", "fsdp", WHOLE), ("gemma3", "fsdp", PROJECTOR),
    ("idefics3", "fsdp", QLORA)])
def test_two_processes_take_the_steps_of_one_with_the_same_answers(sparse, family, strategy, changes, tmp_path):
    run("fit", *sparse(tmp_path / "one", family, **changes))
    together(["fit", *sparse(tmp_path / "two", family, strategy, **changes)])
    assert_same_run(tmp_path / "two", tmp_path / "one")
    run("predict", *sparse(tmp_path / "one", family, **changes), "--ckpt_path", "last")
    together(["predict", *sparse(tmp_path / "two", family, strategy, **changes), "--ckpt_path",
              str(RunFolder(tmp_path / "one").resolve("last"))])
    assert RunFolder(tmp_path / "two").predictions.read_text() == RunFolder(tmp_path / "one").predictions.read_text()


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_processes(sparse, tmp_path):
    run("fit", *sparse(tmp_path / "one", "gemma3", **WHOLE))
    together(["fit", *sparse(tmp_path / "two", "gemma3", SHARDED, **WHOLE)])
    assert len(list(RunFolder(tmp_path / "two").checkpoint("step=2").glob("model*"))) == 2
    shutil.copytree(tmp_path / "one", tmp_path / "one to two", symlinks=True)
    run("fit", *sparse(tmp_path / "two", "gemma3", **WHOLE), "--ckpt_path", "2", "--overwrite", "true")
    together(["fit", *sparse(tmp_path / "one to two", "gemma3", SHARDED, **WHOLE), "--ckpt_path", "2", "--overwrite",
              "true"])
    assert_same_run(tmp_path / "two", tmp_path / "one")
    assert_same_run(tmp_path / "one to two", tmp_path / "one")


def test_models_whose_rows_with_images_cannot_be_packed(arguments, tmp_path, capsys):
    assert main(["fit", *arguments(tmp_path / "run", "gemma4", **{"data.packing": True})]) != 0
    assert "data.packing is not supported with images for a model of type gemma4" in capsys.readouterr().err


# ---- plans ----

@pytest.mark.parametrize("family", ["idefics3", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "gemma4", "internvl", "qwen2_5_vl", "qwen3_vl"))])
def test_planned_operations_are_those_of_a_step(family, arguments, tmp_path):
    """With the vision tower in training and frozen, as torch counts the operations of a real step."""
    keys = {"model.attention": "eager", "model.fast_kernels": False, "data.shuffle": False}
    for trained in ([""], None):
        options = arguments(tmp_path / "run", family, **keys, **{"model.trainable_parameters": trained})
        setup, planner = planner_of(parse(["plan", *options, "--on", "cpu"], options_of("plan")[0]),
                                    target_named("cpu"))
        plan = planner.plan(planner.recipe())
        model, batch = setup.model, full_batch(planner.example, 4, setup.datamodule.max_length)
        assert batch["input_ids"].shape == (4, 256) and plan.memory["rows"] >= batch["per_row/pixel_values"].nbytes
        model.trainer = stand_in(setup.datamodule, planner.precision, 1, None)
        model.configure_model()
        with FlopCounterMode(display=False) as counter:
            take_step(model, None, [batch])
        assert plan.flops == counter.get_total_flops()


def test_operations_of_a_token_are_those_of_the_text_model(model_folder, tmp_path):
    data, _ = make_batch(model_folder("gemma3"), tmp_path)
    text_task = SFT(pretrained=str(model_folder("gemma3")))
    text_model = build_network(text_task, text_task.auto_class, text_task.task_type, data, precision="32-true",
                               device=torch.device("cpu"), seed=7)
    assert training_flops(build(model_folder("gemma3"), data)) == training_flops(text_model)


@pytest.mark.parametrize("abstract", [False, True], ids=["read", "outlined"])
def test_only_the_language_model_is_quantised(model_folder, abstract):
    from lmmods.torch_engine.nn.loading import load_pretrained

    for family in ("gemma3", "qwen3_vl"):
        model = load_pretrained(AutoModelForImageTextToText, str(model_folder(family)), quantize="nf4", frozen=True,
                                all_parts=True, abstract=abstract)
        quantised = {name for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"}
        assert quantised == {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
                             and is_of_language_model(name) and name != "lm_head"} and len(quantised) == 2 * 7


def test_samples_and_text_prompts_work_during_training(arguments, tmp_path):
    run("fit", *arguments(tmp_path / "run", "gemma3", **{
        "samples.prompts": ["What is this?"], "samples.every_n_steps": 3, "samples.max_new_tokens": 4}))
    assert any((tmp_path / "run").rglob("*samples*"))


@pytest.mark.parametrize("changes", [{}, PACKED])
def test_a_plan_needs_no_weights(arguments, changes, tmp_path, capsys):
    """Gemma's vision tower draws from truncated normal distributions, which weights without values must not repeat."""
    run("plan", *arguments(tmp_path / "run", "gemma3", **changes), "--on", "h100")
    assert "simulated  fits" in capsys.readouterr().out
