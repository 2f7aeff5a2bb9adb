"""Tasks with heads on both engines: equal steps under any batch split and on two processes, and their exports."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoTokenizer

from lmmods.cli import main
from lmmods.runs.folder import RunFolder
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture
from tests.finished_runs import TIMED, alike, rows
from tests.forks import together

BERT = {"model_type": "bert", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, "initializer_range": 0.2}
LLAMA = {"model_type": "llama", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
         "attention_dropout": 0.1}
QLORA = {"model__init_args__quantize": "nf4",
         "model__init_args__lora": {"rank": 4, "dropout": 0.1, "targets": "all-linear"}}
# A constant added before a softmax has no effect: these get no gradient, and Adam moves them by rounding errors only.
WITHOUT_GRADIENT = ("key.bias", "layer.1.output.LayerNorm.bias")
WORDS = "the quick brown fox jumps over lazy dogs".split()
SPLIT_DEPENDENT = TIMED | {"train/epoch"}  # metrics that depend on the batch split
STEPS = 8


def make_text(index: int) -> str:
    return " ".join(WORDS[(index * step + step) % len(WORDS)] for step in range(1, 3 + index % 7))


def make_labelled(index: int) -> dict[str, Any]:
    return {"text": make_text(index), "label": ("odd", "even", "third")[index % 3]}


def make_sentence_pair(index: int) -> dict[str, Any]:
    return {"sentence1": make_text(index), "sentence2": make_text(index + 1), "label": index % 2}


def make_multi_labelled(index: int) -> dict[str, Any]:
    return {"text": make_text(index), "labels": [word for word in WORDS[:3] if word in make_text(index)]}


def make_valued(index: int) -> dict[str, Any]:
    return {"text": make_text(index), "label": index % 5 + 0.5}


def make_tagged(index: int) -> dict[str, Any]:
    words = make_text(index).split()
    return {"tokens": words, "ner_tags": ["B-BEAST" if word in ("fox", "dogs") else "O" for word in words]}


def make_answer_pair(index: int) -> dict[str, Any]:
    return {"prompt": f"Say {WORDS[index % 8]}.", "chosen": make_text(index), "rejected": "lazy " * (1 + index % 4),
            "margin": index % 2 / 2}


# Task, model config, function of a row, and changes of the recipe.
CASES: dict[str, tuple[str, dict, Callable[[int], dict], dict[str, Any]]] = {
    "single": ("SequenceClassification", BERT, make_labelled, {"model__init_args__class_weights": "balanced"}),
    "pair-decoder": ("SequenceClassification", LLAMA, make_sentence_pair, {}),
    "several": ("SequenceClassification", BERT, make_multi_labelled, {}),
    "value": ("SequenceClassification", BERT, make_valued, {}),
    "single-qlora": ("SequenceClassification", LLAMA, make_labelled, QLORA),
    "encoder-qlora": ("SequenceClassification", BERT, make_sentence_pair, QLORA),
    "tags": ("TokenClassification", BERT, make_tagged, {"model__init_args__class_weights": {"B-BEAST": 2.0}}),
    "tags-qlora": ("TokenClassification", LLAMA, make_tagged, QLORA),
    "reward": ("Reward", LLAMA, make_answer_pair, {"model__init_args__center_rewards_coefficient": 0.01,
                                        "data__init_args__template": "alpaca"}),
    "reward-qlora": ("Reward", LLAMA, make_answer_pair, {**QLORA, "data__init_args__template": "alpaca"}),
}
AUTO = {"SequenceClassification": "AutoModelForSequenceClassification", "Reward": "AutoModelForSequenceClassification",
        "TokenClassification": "AutoModelForTokenClassification"}


@pytest.fixture
def write_case(recipe, tmp_path, tokenizer_folder, bert_folder):  # noqa: F811
    """Return a function that writes a case's recipe and returns its run folder and the arguments."""
    return lambda *args, **changes: write_case_recipe(recipe, tmp_path, tokenizer_folder, bert_folder, CASES, *args,
                                                      **changes)


def write_case_recipe(recipe: Any, tmp_path: Path, tokenizer_folder: Path, bert_folder: str, cases: dict, name: str,  # noqa: F811
                      folder: str, **changes: Any) -> tuple[RunFolder, list[str]]:
    task, config, row, case_changes = cases[name]
    tokenizer = AutoTokenizer.from_pretrained(bert_folder if config is BERT else tokenizer_folder)
    base, source = tmp_path / config["model_type"], tmp_path / f"{name}.jsonl"
    if not base.exists():
        torch.manual_seed(0)
        fields = {**config, "vocab_size": len(tokenizer)}
        model = transformers.AutoModel.from_config(CONFIG_MAPPING[fields.pop("model_type")](**fields))
        model.save_pretrained(base)
        tokenizer.save_pretrained(base)
    source.write_text("".join(json.dumps(row(index)) + "\n" for index in range(26)))
    run = RunFolder(tmp_path / folder)
    model = {"pretrained": str(base), "optimizer": {"lr": 1e-3, "schedule": "linear", "warmup": 2}}
    data = {"source": str(source), "val_size": 5, "max_length": 48, "batch_size": 3}
    return run, recipe(f"{folder}.yaml", **{
        "model": {"class_path": task, "init_args": model}, "data": {"class_path": f"{task}Data", "init_args": data},
        "data__init_args__pad_to_multiple_of": 48, "trainer__max_steps": STEPS, "trainer__val_check_interval": STEPS,
        "trainer__accumulate_grad_batches": 2, "trainer__gradient_clip_val": 0.5,
        "trainer__default_root_dir": str(run.root), **case_changes, **changes})


def assert_same_steps(run: RunFolder, other: RunFolder, without: set[str] = TIMED) -> None:
    steps, expected = rows(run, without), rows(other, without)
    assert len(steps) == len(expected) == STEPS
    for row, expected_row in zip(steps, expected, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-4, abs=1e-6), row["step"]


def assert_same_export(run: RunFolder, other: RunFolder) -> None:
    exported, = (path.name for path in other.model.glob("*.safetensors"))
    weights, expected = (load_file(folder.model / exported) for folder in (run, other))
    assert weights.keys() == expected.keys()
    for key, weight in weights.items():
        if not key.endswith(WITHOUT_GRADIENT):
            torch.testing.assert_close(weight, expected[key], rtol=1e-3, atol=2e-5)


def read_predictions(run: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.predictions.read_text().splitlines()]


def check_both_engines(write_case: Any, name: str, take_turns: bool = False) -> None:
    """Check equal losses, metrics, exports and predictions; then resume each run halfway on the other engine."""
    runs, half = [], STEPS // 2
    saves = {"checkpoint": {"every_n_steps": half, "keep_last": 9}} if take_turns else {}
    for engine in ("torch", "jax"):
        run, arguments = write_case(name, engine, engine=engine, **saves)
        assert main(["fit", *arguments]) == 0
        assert main(["predict", *arguments, "--ckpt_path", "last"]) == 0
        runs.append(run)
    assert_same_steps(*runs)
    assert_same_export(*runs)
    metrics, expected_metrics = (json.loads(run.metrics_json.read_text()) for run in runs)
    assert alike({key: value for key, value in metrics.items() if key not in TIMED},
                 {key: value for key, value in expected_metrics.items() if key not in TIMED})
    assert alike(read_predictions(runs[0]), read_predictions(runs[1]))
    assert json.loads(runs[0].data_report.read_text()) == json.loads(runs[1].data_report.read_text())
    expected = rows(runs[0])
    for run, other_engine in zip(runs, ("jax", "torch"), strict=True) if take_turns else ():
        options = ["--config", str(run.config), "--engine", other_engine]
        assert main(["fit", *options, "--ckpt_path", str(half), "--overwrite", "true"]) == 0
        for row, expected_metrics in zip(rows(run), expected, strict=True):
            assert row == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6), row["step"]


# The other cases and parity below cover sentence pairs, decoders and quantised reward models.
@pytest.mark.parametrize("name", ["single", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES
                                              if name not in ("single", "pair-decoder", "reward-qlora"))])
def test_both_engines_give_the_same_losses_exports_and_predictions(write_case, name):
    check_both_engines(write_case, name, take_turns=name in ("value", "tags-qlora", "reward"))


def check_any_batch_split(write_case: Any, name: str, engine: str) -> None:
    runs = []
    for size in (6, 1):
        run, arguments = write_case(name, f"split{size}", engine=engine, data__init_args__batch_size=size,
                                    trainer__accumulate_grad_batches=6 // size)
        assert main(["fit", *arguments]) == 0
        runs.append(run)
    for run in runs[1:]:
        assert_same_steps(run, runs[0], SPLIT_DEPENDENT)
        assert_same_export(run, runs[0])


@pytest.mark.parametrize(("name", "engine"), [
    ("tags", "torch"), ("reward", "torch"), *(pytest.param(name, engine, marks=pytest.mark.slow) for name, engine in (
        ("several", "torch"), ("single-qlora", "torch"), ("tags", "jax"), ("reward-qlora", "jax")))])
def test_any_batch_split_gives_the_same_steps(write_case, name, engine):
    check_any_batch_split(write_case, name, engine)


def check_two_processes(write_case: Any, name: str) -> None:
    # In the last micro-batch of an epoch, one process has no rows.
    one, arguments = write_case(name, "one")
    assert main(["fit", *arguments]) == 0
    for strategy in ("ddp", "fsdp"):
        two, arguments = write_case(name, strategy, trainer__devices=2, trainer__strategy=strategy,
                                    trainer__accumulate_grad_batches=1)
        together(["fit", *arguments])
        assert_same_steps(two, one, SPLIT_DEPENDENT)
        assert_same_export(two, one)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["value", "tags", "reward-qlora"])
def test_two_processes_take_the_steps_of_one(write_case, name):
    check_two_processes(write_case, name)


def check_parity(write_case: Any, name: str, capsys: pytest.CaptureFixture) -> None:
    _, arguments = write_case(name, "parity")
    assert main(["inspect", *arguments, "--parity", "true"]) == 0
    output = capsys.readouterr().out
    assert re.search("^Parity: pass", output, re.M) and output.count(": pass, tolerance") == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["several", "pair-decoder", "tags", "reward-qlora"])
def test_the_engines_pass_parity(write_case, name, capsys):
    check_parity(write_case, name, capsys)


def load_export(run: RunFolder, auto_class: str, base: Path) -> tuple[Any, Any]:
    """Load tokenizer and model of an export with the code on its card."""
    code = re.search("```python\n(.*?)```", (run.model / "README.md").read_text(), re.S)[1]
    assert f"{auto_class}.from_pretrained" in code
    scope: dict[str, Any] = {}
    # The card of an unpublished run names its own folder and the last part of the base's path.
    code = code.replace('name = "."  # this folder', f"name = {str(run.model)!r}")
    exec(re.sub(rf'from_pretrained\("[^"]*{base.name}"', f"from_pretrained({str(base)!r}", code), scope)
    return scope["tokenizer"], scope["model"].eval()


@pytest.mark.parametrize(("name", "engine"), [("single", "torch"), *(
    pytest.param(name, engine, marks=pytest.mark.slow) for name, engine in (
        ("several", "jax"), ("value", "torch"), ("single-qlora", "torch"), ("encoder-qlora", "jax"),
        ("tags", "jax")))])
def test_an_export_gives_the_same_predictions_in_transformers(write_case, name, engine, tmp_path):
    # Without quantisation, as the card loads the base unquantised.
    run, arguments = write_case(name, "run", engine=engine, model__init_args__quantize=None)
    assert main(["fit", *arguments]) == 0 and main(["predict", *arguments, "--ckpt_path", "last"]) == 0
    task, config, *_ = CASES[name]
    tokenizer, model = load_export(run, AUTO[task], tmp_path / config["model_type"])
    for row in read_predictions(run):
        if task == "TokenClassification":
            inputs = tokenizer(row["tokens"], is_split_into_words=True, return_tensors="pt")
            words = inputs.word_ids()
            first = [words.index(index) for index in range(len(row["tokens"]))]
            with torch.no_grad():
                label_ids = model(**inputs).logits[0, first].argmax(-1)
            assert row["prediction"] == [model.config.id2label[int(index)] for index in label_ids]
            continue
        texts = [row[key] for key in ("text", "sentence1", "sentence2") if key in row]
        with torch.no_grad():
            logits = model(**tokenizer(*texts, truncation=True, max_length=48, return_tensors="pt")).logits[0]
        if name == "value":
            assert row["prediction"] == pytest.approx(logits.item(), rel=1e-3)
            continue
        probabilities = logits.sigmoid() if name == "several" else logits.softmax(-1)
        assert row["probabilities"] == pytest.approx(
            {model.config.id2label[index]: value for index, value in enumerate(probabilities.tolist())}, abs=1e-3)


def test_an_export_runs_in_a_transformers_pipeline(write_case):
    run, arguments = write_case("single", "run")
    assert main(["fit", *arguments]) == 0 and main(["predict", *arguments, "--ckpt_path", "last"]) == 0
    classify = transformers.pipeline("text-classification", model=str(run.model), device="cpu")
    for row in read_predictions(run):
        scores = {label_score["label"]: label_score["score"] for label_score in classify(row["text"], top_k=None)}
        assert scores == pytest.approx(row["probabilities"], abs=1e-4)


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_an_adapter_of_another_task_is_rejected(write_case, demo_adapter, engine, capsys):
    _, arguments = write_case("reward", "run", engine=engine, **demo_adapter)
    assert main(["fit", *arguments]) == 2
    assert "is for another task, without score. Merge it" in capsys.readouterr().err


@pytest.fixture
def demo_adapter() -> dict[str, Any]:
    """Return keys that name the demo's SFT adapter."""
    folder = Path(__file__).parents[2] / "demo"
    return {"model__init_args__pretrained": str(folder / "llama"), "model__init_args__adapter":
            str(folder / "llama_sft")}


def test_a_run_keeps_its_labels_when_its_data_changes(write_case, tmp_path):
    """`test` on a finished run does not read labels from the data, which may have changed."""
    run, arguments = write_case("single", "run")
    assert main(["fit", *arguments]) == 0
    source = tmp_path / "single.jsonl"
    source.write_text("".join(json.dumps({"text": make_text(index), "label": "even"}) + "\n" for index in range(26)))
    test = tmp_path / "test.jsonl"
    test.write_text("".join(json.dumps(make_labelled(index)) + "\n" for index in range(9)))
    assert main(["test", "--config", str(run.config), "--ckpt_path", "last", "--data.test_source", str(test)]) == 0
    metrics = json.loads(run.metrics_json.read_text())
    assert 0 <= metrics["test/accuracy"] <= 1 and metrics["test/loss"] < 10
