"""Samples during training: the generated text, no effect on training, resume, both engines."""

import csv
import json
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.data.clm import CLMData
from lmmods.data.sft import SFTData
from lmmods.evaluation.samples import SampleWriter
from lmmods.runs.folder import RunFolder
from lmmods.torch_engine.nn import decoding
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture
from tests.data.test_qa import squad
from tests.finished_runs import assert_same_checkpoint, seconds_of_steps

ROOT = Path(__file__).parents[2]
PROMPTS = ["Add 3 and 4.", "Add 30 and 31, and be quick."]
LORA = {"model__init_args__quantize": None, "model__init_args__lora": {"rank": 4, "alpha": 16}}
FULL = {"model__init_args__quantize": None, "model__init_args__lora": None}
ENGINES = pytest.mark.parametrize("engine", ["torch", "jax"])
SLOW_ON_JAX = pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)])


def block(**changes) -> dict:
    return {"samples": {"prompts": PROMPTS, "every_n_steps": 2, "max_new_tokens": 5, **changes}}


def samples(folder: RunFolder) -> list[dict]:
    return [json.loads(line) for line in folder.samples.read_text().split("\n")[:-1]]


def metrics(folder: RunFolder) -> list[dict[str, str]]:
    with open(folder.metrics_csv, newline="") as file:
        return [{key: value for key, value in row.items() if key != "train/tokens_per_second"}
                for row in csv.DictReader(file)]


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture
def plain(llama_folder, tmp_path) -> str:
    """The tiny Llama without dropout."""
    path = shutil.copytree(llama_folder, tmp_path / "plain")
    config = (path / "config.json").read_text().replace('"attention_dropout": 0.1', '"attention_dropout": 0.0')
    (path / "config.json").write_text(config)
    return str(path)


@pytest.fixture
def clm(tmp_path) -> dict:
    text = tmp_path / "texts.txt"
    text.write_text("\n\n".join(f"the quick brown fox jumps over {n} lazy dogs" * (1 + n % 3) for n in range(40)))
    return {"class_path": "CLMData", "init_args": {"source": str(text), "documents": "paragraph", "val_size": 0.2,
                                                   "max_length": 48, "batch_size": 4}}


# Generated text -----------------------------------------------------------------------------------------------------


def greedy_search(model, tokenizer, prompts: list[str], steps: int = 5) -> list[str]:
    """Greedy search without a cache, one prompt at a time."""
    answers = []
    for prompt in prompts:
        ids = [tokenizer.bos_token_id, *tokenizer.encode(prompt, add_special_tokens=False)]
        start = len(ids)
        while len(ids) < start + steps and ids[-1] != tokenizer.eos_token_id:
            with torch.no_grad():
                ids.append(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item())
        answers.append(tokenizer.decode(ids[start:], skip_special_tokens=True))
    return answers


@SLOW_ON_JAX
def test_samples_are_answers_of_the_base_and_the_trained_model(recipe, folder, plain, engine):
    changes = {**LORA, "model__init_args__pretrained": plain, "engine": engine}
    assert main(["fit", *recipe(**changes, **block())]) == 0
    rows = samples(folder)
    assert [(row["step"], row["prompt"]) for row in rows] == [(step, p) for step in (0, 2, 4, 6) for p in PROMPTS]
    rendered = ["Below is an instruction that describes a task. Write a response that appropriately completes the "
                f"request.\n\n### Instruction:\n{prompt}\n\n### Response:" for prompt in PROMPTS]
    tokenizer = AutoTokenizer.from_pretrained(folder.model)
    model = AutoModelForCausalLM.from_pretrained(plain).eval()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for layer in (model.model.embed_tokens, model.lm_head):
        layer.weight.data[320:] = layer.weight.data[:320].mean(0)
    base = greedy_search(model, tokenizer, rendered)
    assert [row["output"] for row in rows[:2]] == base and [row["base"] for row in rows] == base * 4
    tuned = greedy_search(PeftModel.from_pretrained(model, folder.model).eval(), tokenizer, rendered)
    assert [row["output"] for row in rows[-2:]] == tuned != base


def test_prompts_are_encoded_as_rows_to_predict(tmp_path, llama_folder, instructions, monkeypatch):
    monkeypatch.setenv("LMMODS_CACHE", str(tmp_path / "cache"))
    for template in ("alpaca", "chatml", "vicuna"):
        data = SFTData(str(instructions), predict_source=str(instructions), template=template, eval_batch_size=1,
                       pad_to_multiple_of=1, add_tokens=["<|im_start|>", "<|im_end|>"])
        data.connect(pretrained=str(llama_folder), seed=7, max_positions=256)
        data.setup()
        rows = [json.loads(line) for line in instructions.read_text().splitlines()]
        batches = {batch["index"].item(): batch["input_ids"][0].tolist() for batch in data.predict_dataloader()}
        chosen = [index for index, row in enumerate(rows) if not row["input"].strip()]
        assert data.encode_prompts([rows[n]["instruction"] for n in chosen]) == [batches[n] for n in chosen]


def test_prompts_of_language_modelling_start_a_document(tmp_path, llama_folder, clm, monkeypatch):
    monkeypatch.setenv("LMMODS_CACHE", str(tmp_path / "cache"))
    data = CLMData(**{**clm["init_args"], "val_size": 0.0})
    data.connect(pretrained=str(llama_folder), seed=7, max_positions=256)
    data.setup("fit")
    prompt_ids, = data.encode_prompts(["the quick brown"])
    assert data.tokenizer.decode(prompt_ids) == "<s>the quick brown"


def test_prompts_of_plain_texts_get_no_template(tmp_path, llama_folder, monkeypatch):
    monkeypatch.setenv("LMMODS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.jsonl").write_text('{"text": "the quick brown fox"}\n' * 4)
    data = SFTData(str(tmp_path / "rows.jsonl"), template="alpaca")
    data.connect(pretrained=str(llama_folder), seed=7, max_positions=256)
    data.setup("fit")
    prompt_ids, = data.encode_prompts(["the quick"])
    assert data.tokenizer.decode(prompt_ids) == "<s>the quick"


# No effect on training -----------------------------------------------------------------------------------------------


@pytest.fixture
def noisy_generation(monkeypatch):
    """Make generation use every random state."""
    quiet = decoding.generate

    def generate(*args, **kwargs):
        torch.rand(3), np.random.rand(3), random.random()
        return quiet(*args, **kwargs)

    monkeypatch.setattr(decoding, "generate", generate)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "changes"), [
    pytest.param("torch", {"model__init_args__lora": {"rank": 4, "dropout": 0.2}, "trainer__accumulate_grad_batches": 3,
                           "model__init_args__gradient_checkpointing": True}, id="qlora-torch"),
    pytest.param("torch", FULL, id="full-torch"),
    pytest.param("jax", {"model__init_args__quantize": None, "model__init_args__lora": {"rank": 4, "dropout": 0.2},
                         "trainer__accumulate_grad_batches": 3}, id="lora-jax", marks=pytest.mark.slow),
])
def test_a_run_with_samples_equals_one_without(recipe, tmp_path, noisy_generation, engine, changes):
    without, sampled = RunFolder(tmp_path / "without"), RunFolder(tmp_path / "sampled")
    states = []
    for run, extra in ((without, {}), (sampled, block(every_n_steps=1))):
        changes = {**changes, "engine": engine, "trainer__default_root_dir": str(run.root)}
        assert main(["fit", *recipe(**changes, **extra)]) == 0
        states.append((torch.get_rng_state().tolist(), np.random.get_state()[1:3], random.getstate()))
    assert str(states[0]) == str(states[1])
    assert len(samples(sampled)) == 14 and not without.samples.exists()
    assert metrics(sampled) == metrics(without)
    files = sorted(path.name for path in without.model.iterdir())
    assert sorted(path.name for path in sampled.model.iterdir()) == files
    for name in set(files) - {"README.md"}:  # which quotes the recipe
        assert (sampled.model / name).read_bytes() == (without.model / name).read_bytes(), name
    assert_same_checkpoint(sampled, without)


@SLOW_ON_JAX
def test_measured_speed_excludes_sampling(recipe, folder, engine, monkeypatch, clock):
    written = SampleWriter.write

    def slow(self, *args):
        clock.now += 1000
        return written(self, *args)

    monkeypatch.setattr(SampleWriter, "write", slow)
    assert main(["fit", *recipe(**LORA, **block(every_n_steps=4, compare_base=False), engine=engine)]) == 0
    assert clock.now > 1000 and 0 < max(seconds_of_steps(folder)) < 1


# Resume --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "sampled_steps"), [(4, {0}), (6, {0, 2}), (12, {0, 2, 4})])
def test_an_interrupted_run_resumes_with_the_same_samples(recipe, finished, tmp_path, stop_at, batch, sampled_steps):
    """In the middle of a step, in a sampled step, and in a sampled step with validation."""
    changes = {**block(), "trainer__accumulate_grad_batches": 3}
    straight, broken = finished(**changes), RunFolder(tmp_path / "broken")
    stop_at(batch)
    arguments = recipe(**changes, trainer__default_root_dir=str(broken.root))
    assert main(["fit", *arguments]) == 130
    assert {row["step"] for row in samples(broken)} == sampled_steps
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert broken.samples.read_bytes() == straight.samples.read_bytes()


@pytest.mark.slow
@ENGINES
def test_rows_after_the_checkpoint_are_written_again(recipe, folder, engine):
    """As after a kill, when the file is ahead of the checkpoint."""
    changes = {**LORA, **block(), "engine": engine, "checkpoint": {"every_n_steps": 1, "keep_last": 9}}
    arguments = recipe(**changes)
    assert main(["fit", *arguments]) == 0
    expected = folder.samples.read_bytes()
    assert main(["fit", *arguments, "--ckpt_path", "3", "--overwrite", "true"]) == 0
    assert folder.samples.read_bytes() == expected


@pytest.mark.slow
@ENGINES
def test_a_lost_file_is_reported_and_the_base_is_not_sampled_again(recipe, folder, engine, capsys):
    changes = {**LORA, **block(), "engine": engine, "trainer__limit_val_batches": 0,
               "model__init_args__optimizer": {"lr": 0.01}}
    assert main(["fit", *recipe(**changes, trainer__max_steps=4)]) == 0
    expected = samples(folder)
    folder.samples.unlink()
    assert main(["fit", *recipe(**changes), "--ckpt_path", "last"]) == 0
    assert "base is null" in capsys.readouterr().out
    rows = samples(folder)
    assert [(row["step"], row["base"]) for row in rows] == [(6, None)] * 2 and len(expected) == 6


@ENGINES
def test_a_run_stopped_early_is_sampled_at_its_end(recipe, folder, engine):
    stopping = [{"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss", "patience": 1,
                                                              "divergence_threshold": 0.0}}]
    assert main(["fit", *recipe(**LORA, **block(every_n_steps=50, compare_base=False), engine=engine,
                                trainer__callbacks=stopping)]) == 0
    assert [(row["step"], row["base"]) for row in samples(folder)] == [(4, None)] * 2
    assert folder.completed.exists()


class Log:
    """Logger that accepts tables."""

    def __init__(self):
        self.tables = []

    def log_table(self, key, columns, data, step):
        self.tables.append((key, columns, data, step))


def test_samples_are_written_to_the_file_and_to_loggers(tmp_path, capsys):
    folder, log = RunFolder(tmp_path), Log()
    writer = SampleWriter(["a  b", "c"])
    writer.begin(folder, None)
    writer.write(0, ["x", "y"], [])
    writer.write(100, ["é\n1", "z" * 200], [log])
    assert log.tables == [("samples", ["step", "prompt", "base", "output"],
                           [[100, "a  b", "x", "é\n1"], [100, "c", "y", "z" * 200]], 100)]
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2] == "sample at step 100: a b -> é 1" and len(printed[-1]) < 120
    again = SampleWriter(["a  b", "new"])
    again.begin(folder, 100)
    assert "base is null" in capsys.readouterr().out
    again.write(100, ["1", "2"], [])  # a run resumed at its end: the same step never appears twice
    assert samples(folder) == [
        {"step": 0, "prompt": "a  b", "base": "x", "output": "x"},
        {"step": 0, "prompt": "c", "base": "y", "output": "y"},
        {"step": 100, "prompt": "a  b", "base": "x", "output": "1"},
        {"step": 100, "prompt": "new", "base": None, "output": "2"}]
    SampleWriter().begin(folder, 50)  # without prompts, rows after the checkpoint are dropped as well
    assert [row["step"] for row in samples(folder)] == [0, 0]


# Loggers -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@ENGINES
def test_wandb_gets_tables_and_tensorboard_texts(recipe, folder, engine, tmp_path, monkeypatch):
    import wandb
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [{"class_path": "TensorBoardLogger", "init_args": {"save_dir": str(folder.root), "name": "",
                                                                 "version": "tensorboard"}},
               {"class_path": "WandbLogger", "init_args": {"project": "test"}}]
    assert main(["fit", *recipe(**LORA, **block(), engine=engine, trainer__logger=loggers)]) == 0
    wandb.finish()
    rows = samples(folder)
    tables = [json.loads(path.read_text()) for path in (folder.root / "wandb").rglob("*.table.json")]
    assert sorted(tuple(row) for table in tables for row in table["data"]) == sorted(
        tuple(row.values()) for row in rows)
    events = EventAccumulator(str(folder.root / "tensorboard"))
    events.Reload()
    texts = {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples/text_summary")}
    assert list(texts) == [0, 2, 4, 6] and all(f"    {prompt}" in texts[6] for prompt in PROMPTS)


def test_a_sample_on_tensorboard_is_text(tmp_path):
    """No line of a prompt leaves its block, by TensorBoard's own renderer; the file keeps the prompt."""
    render = pytest.importorskip("tensorboard.plugin_util").markdown_to_safe_html
    prompt = "<b>a</b>\n```\r# mine\r\r<b>b</b>\r[x](javascript:y) [z](http://z)\u2028\r\n`c`\x0c<i>d</i>\n\n* e"
    writer, texts = SampleWriter([prompt], compare_base=False), []
    writer.begin(RunFolder(tmp_path / "run"), None)
    logger = SimpleNamespace(experiment=SimpleNamespace(add_text=lambda _, text, __: texts.append(text)))
    writer.write(1, [prompt], [logger])
    page = render(texts[0])
    assert re.sub(r"<pre><code>.*?</code></pre>", "", page, flags=re.DOTALL).split() == [
        "<p>prompt:</p>", "<p>output:</p>"]
    assert set(re.findall(r"<(\w+)", page)) == {"p", "pre", "code"}
    assert samples(RunFolder(tmp_path / "run"))[0]["prompt"] == prompt


# Both engines; test_mmlu.py tests conversations and several devices ---------------------------------------------------


@pytest.mark.slow
def test_both_engines_continue_the_same_texts(recipe, tmp_path, plain, clm):
    by_engine = []
    for engine in ("torch", "jax"):
        run = RunFolder(tmp_path / engine)
        assert main(["fit", *recipe(
            **LORA, data=clm, **block(prompts=["the quick brown", "the"], max_new_tokens=12), engine=engine,
            model__class_path="CLM", model__init_args__pretrained=plain, trainer__default_root_dir=str(run.root))]) == 0
        by_engine.append(samples(run))
    assert by_engine[0] == by_engine[1] and len({row["output"] for row in by_engine[0]}) > 2


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "message"), [
    ({"prompts": []}, "samples.prompts"), ({"prompts": ["a", " "]}, "samples.prompts"),
    ({"every_n_steps": 0}, "samples.every_n_steps is 0"), ({"max_new_tokens": 0}, "samples.max_new_tokens is 0"),
])
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(UserError, match=message):
        SampleWriter(**settings)


@ENGINES
def test_a_prompt_that_is_too_long_is_rejected_before_anything_is_written(recipe, folder, engine, capsys):
    assert main(["fit", *recipe(**LORA, **block(prompts=["Add.", "one " * 300]), engine=engine)]) == 2
    errors = capsys.readouterr().err
    assert "samples.prompts: 'one one" in errors and "256 positions" in errors
    assert not folder.root.exists()


@ENGINES
@pytest.mark.parametrize("task", ["MLM", "QA"])
def test_a_task_that_generates_nothing_is_rejected(recipe, folder, tmp_path, bert_folder, engine, task, capsys, clm):  # noqa: F811
    config = {"model_type": "bert", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1,
              "num_attention_heads": 4, "max_position_embeddings": 64}
    data = {"MLM": {**clm["init_args"], "tokenizer": str(bert_folder)},
            "QA": {"source": squad(tmp_path), "tokenizer": str(bert_folder), "max_length": 48, "stride": 16,
                   "question_max_length": 16}}[task]
    assert main(["fit", *recipe(**block(), engine=engine, model={"class_path": task, "init_args": {"config": config}},
                                data={"class_path": f"{task}Data", "init_args": data})]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: samples.prompts") and "null" in errors
    assert not folder.root.exists()


def test_a_misspelt_key_is_an_error(recipe, capsys):
    assert main(["fit", *recipe(**block(), samples__every_n_step=3)]) == 2
    assert "Did you mean samples.every_n_steps?" in capsys.readouterr().err
