"""Tasks with classification heads on both engines: equal steps under any cut, on two processes, and their exports."""

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
# A softmax over keys does not see what is added to all of them: Adam moves these by rounding errors alone.
WITHOUT_GRADIENT = ("key.bias", "layer.1.output.LayerNorm.bias")
WORDS = "the quick brown fox jumps over lazy dogs".split()
CUT = TIMED | {"train/epoch"}  # what depends on how steps are cut into micro-batches
STEPS = 8


def text(number: int) -> str:
    return " ".join(WORDS[(number * step + step) % len(WORDS)] for step in range(1, 3 + number % 7))


def classified(number: int) -> dict[str, Any]:
    return {"text": text(number), "label": ("odd", "even", "third")[number % 3]}


def paired(number: int) -> dict[str, Any]:
    return {"sentence1": text(number), "sentence2": text(number + 1), "label": number % 2}


def several(number: int) -> dict[str, Any]:
    return {"text": text(number), "labels": [word for word in WORDS[:3] if word in text(number)]}


def valued(number: int) -> dict[str, Any]:
    return {"text": text(number), "label": number % 5 + 0.5}


def tagged(number: int) -> dict[str, Any]:
    words = text(number).split()
    return {"tokens": words, "ner_tags": ["B-BEAST" if word in ("fox", "dogs") else "O" for word in words]}


def judged(number: int) -> dict[str, Any]:
    return {"prompt": f"Say {WORDS[number % 8]}.", "chosen": text(number), "rejected": "lazy " * (1 + number % 4),
            "margin": number % 2 / 2}


# The task, its network, its rows, and changes of the recipe.
CASES: dict[str, tuple[str, dict, Callable[[int], dict], dict[str, Any]]] = {
    "single": ("SequenceClassification", BERT, classified, {"model__init_args__class_weights": "balanced"}),
    "pair-decoder": ("SequenceClassification", LLAMA, paired, {}),
    "several": ("SequenceClassification", BERT, several, {}),
    "value": ("SequenceClassification", BERT, valued, {}),
    "single-qlora": ("SequenceClassification", LLAMA, classified, QLORA),
    "encoder-qlora": ("SequenceClassification", BERT, paired, QLORA),
    "tags": ("TokenClassification", BERT, tagged, {"model__init_args__class_weights": {"B-BEAST": 2.0}}),
    "tags-qlora": ("TokenClassification", LLAMA, tagged, QLORA),
    "reward": ("Reward", LLAMA, judged, {"model__init_args__center_rewards_coefficient": 0.01,
                                        "data__init_args__template": "alpaca"}),
    "reward-qlora": ("Reward", LLAMA, judged, {**QLORA, "data__init_args__template": "alpaca"}),
}
AUTO = {"SequenceClassification": "AutoModelForSequenceClassification", "Reward": "AutoModelForSequenceClassification",
        "TokenClassification": "AutoModelForTokenClassification"}


@pytest.fixture
def head(recipe, tmp_path, tokenizer_folder, bert_folder):  # noqa: F811
    """A function that writes the recipe of a case into a run folder of its own; returns both."""
    return lambda *args, **changes: written(recipe, tmp_path, tokenizer_folder, bert_folder, CASES, *args, **changes)


def written(recipe: Any, tmp_path: Path, tokenizer_folder: Path, bert_folder: str, cases: dict, name: str,  # noqa: F811
            folder: str, **changes: Any) -> tuple[RunFolder, list[str]]:
    task, config, row, own = cases[name]
    tokenizer = AutoTokenizer.from_pretrained(bert_folder if config is BERT else tokenizer_folder)
    base, source = tmp_path / config["model_type"], tmp_path / f"{name}.jsonl"
    if not base.exists():
        torch.manual_seed(0)
        fields = {**config, "vocab_size": len(tokenizer)}
        model = transformers.AutoModel.from_config(CONFIG_MAPPING[fields.pop("model_type")](**fields))
        model.save_pretrained(base)
        tokenizer.save_pretrained(base)
    source.write_text("".join(json.dumps(row(number)) + "\n" for number in range(26)))
    run = RunFolder(tmp_path / folder)
    model = {"pretrained": str(base), "optimizer": {"lr": 1e-3, "schedule": "linear", "warmup": 2}}
    data = {"source": str(source), "val_size": 5, "max_length": 48, "batch_size": 3}
    return run, recipe(f"{folder}.yaml", **{
        "model": {"class_path": task, "init_args": model}, "data": {"class_path": f"{task}Data", "init_args": data},
        "data__init_args__pad_to_multiple_of": 48, "trainer__max_steps": STEPS, "trainer__val_check_interval": STEPS,
        "trainer__accumulate_grad_batches": 2, "trainer__gradient_clip_val": 0.5,
        "trainer__default_root_dir": str(run.root), **own, **changes})


def same_rows(run: RunFolder, other: RunFolder, without: set[str] = TIMED) -> None:
    found, expected = rows(run, without), rows(other, without)
    assert len(found) == len(expected) == STEPS
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-6), row["step"]


def same_export(run: RunFolder, other: RunFolder) -> None:
    exported, = (path.name for path in other.model.glob("*.safetensors"))
    weights, wanted = (load_file(each.model / exported) for each in (run, other))
    assert weights.keys() == wanted.keys()
    for key, weight in weights.items():
        if not key.endswith(WITHOUT_GRADIENT):
            torch.testing.assert_close(weight, wanted[key], rtol=1e-3, atol=2e-5)


def predicted(run: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.predictions.read_text().splitlines()]


def both_engines_agree(head: Any, name: str, take_turns: bool = False) -> None:
    """The same losses step by step, metrics, exports and predictions; then each run goes on half way with the other."""
    runs, half = [], STEPS // 2
    saves = {"checkpoint": {"every_n_steps": half, "keep_last": 9}} if take_turns else {}
    for engine in ("torch", "jax"):
        run, arguments = head(name, engine, engine=engine, **saves)
        assert main(["fit", *arguments]) == 0
        assert main(["predict", *arguments, "--ckpt_path", "last"]) == 0
        runs.append(run)
    same_rows(*runs)
    same_export(*runs)
    metrics, wanted = (json.loads(run.metrics_json.read_text()) for run in runs)
    assert alike({key: value for key, value in metrics.items() if key not in TIMED},
                 {key: value for key, value in wanted.items() if key not in TIMED})
    assert alike(predicted(runs[0]), predicted(runs[1]))
    assert json.loads(runs[0].data_report.read_text()) == json.loads(runs[1].data_report.read_text())
    expected = rows(runs[0])
    for run, then in zip(runs, ("jax", "torch"), strict=True) if take_turns else ():
        again = ["--config", str(run.config), "--engine", then]
        assert main(["fit", *again, "--ckpt_path", str(half), "--overwrite", "true"]) == 0
        for row, wanted in zip(rows(run), expected, strict=True):
            assert row == pytest.approx(wanted, rel=1e-4, abs=1e-6), row["step"]


# Pairs of sentences, decoders and rewards on codes are among the other cases and under parity below.
@pytest.mark.parametrize("name", ["single", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES
                                              if name not in ("single", "pair-decoder", "reward-qlora"))])
def test_both_engines_say_the_same(head, name):
    both_engines_agree(head, name, take_turns=name in ("value", "tags-qlora", "reward"))


def any_cut_gives_the_same_steps(head: Any, name: str, engine: str) -> None:
    runs = []
    for size in (6, 1):
        run, arguments = head(name, f"cut{size}", engine=engine, data__init_args__batch_size=size,
                              trainer__accumulate_grad_batches=6 // size)
        assert main(["fit", *arguments]) == 0
        runs.append(run)
    for run in runs[1:]:
        same_rows(run, runs[0], CUT)
        same_export(run, runs[0])


@pytest.mark.parametrize(("name", "engine"), [
    ("tags", "torch"), ("reward", "torch"), *(pytest.param(name, engine, marks=pytest.mark.slow) for name, engine in (
        ("several", "torch"), ("single-qlora", "torch"), ("tags", "jax"), ("reward-qlora", "jax")))])
def test_any_cut_of_a_batch_gives_the_same_steps(head, name, engine):
    any_cut_gives_the_same_steps(head, name, engine)


def two_processes_take_the_steps_of_one(head: Any, name: str) -> None:
    # Rows of the last round leave one process without any.
    one, arguments = head(name, "one")
    assert main(["fit", *arguments]) == 0
    for strategy in ("ddp", "fsdp"):
        two, arguments = head(name, strategy, trainer__devices=2, trainer__strategy=strategy,
                              trainer__accumulate_grad_batches=1)
        together(["fit", *arguments])
        same_rows(two, one, CUT)
        same_export(two, one)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["value", "tags", "reward-qlora"])
def test_two_processes_take_the_steps_of_one(head, name):
    two_processes_take_the_steps_of_one(head, name)


def engines_pass_parity(head: Any, name: str, capsys: pytest.CaptureFixture) -> None:
    _, arguments = head(name, "parity")
    assert main(["inspect", *arguments, "--parity", "true"]) == 0
    said = capsys.readouterr().out
    assert re.search("^Parity: pass", said, re.M) and said.count(": pass, tolerance") == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["several", "pair-decoder", "tags", "reward-qlora"])
def test_parity_compares_the_engines(head, name, capsys):
    engines_pass_parity(head, name, capsys)


def loaded(run: RunFolder, kind: str, base: Path) -> tuple[Any, Any]:
    """The tokenizer and the model of an export, loaded as its card says."""
    code = re.search("```python\n(.*?)```", (run.model / "README.md").read_text(), re.S)[1]
    assert f"{kind}.from_pretrained" in code
    found: dict[str, Any] = {}
    # The card of a run that is not published names its own folder, and shows of the base's path its end.
    code = code.replace('name = "."  # this folder', f"name = {str(run.model)!r}")
    exec(re.sub(rf'from_pretrained\("[^"]*{base.name}"', f"from_pretrained({str(base)!r}", code), found)
    return found["tokenizer"], found["model"].eval()


@pytest.mark.parametrize(("name", "engine"), [("single", "torch"), *(
    pytest.param(name, engine, marks=pytest.mark.slow) for name, engine in (
        ("several", "jax"), ("value", "torch"), ("single-qlora", "torch"), ("encoder-qlora", "jax"),
        ("tags", "jax")))])
def test_an_export_gives_transformers_the_same_answers(head, name, engine, tmp_path):
    # The card loads an adapter's base as it is in its files.
    run, arguments = head(name, "run", engine=engine, model__init_args__quantize=None)
    assert main(["fit", *arguments]) == 0 and main(["predict", *arguments, "--ckpt_path", "last"]) == 0
    task, config, *_ = CASES[name]
    tokenizer, model = loaded(run, AUTO[task], tmp_path / config["model_type"])
    for row in predicted(run):
        if task == "TokenClassification":
            inputs = tokenizer(row["tokens"], is_split_into_words=True, return_tensors="pt")
            words = inputs.word_ids()
            first = [words.index(place) for place in range(len(row["tokens"]))]
            with torch.no_grad():
                best = model(**inputs).logits[0, first].argmax(-1)
            assert row["prediction"] == [model.config.id2label[int(place)] for place in best]
            continue
        texts = [row[key] for key in ("text", "sentence1", "sentence2") if key in row]
        with torch.no_grad():
            logits = model(**tokenizer(*texts, truncation=True, max_length=48, return_tensors="pt")).logits[0]
        if name == "value":
            assert row["prediction"] == pytest.approx(logits.item(), rel=1e-3)
            continue
        shares = logits.sigmoid() if name == "several" else logits.softmax(-1)
        assert row["probabilities"] == pytest.approx(
            {model.config.id2label[place]: share for place, share in enumerate(shares.tolist())}, abs=1e-3)


def test_a_pipeline_of_transformers_takes_an_export(head):
    run, arguments = head("single", "run")
    assert main(["fit", *arguments]) == 0 and main(["predict", *arguments, "--ckpt_path", "last"]) == 0
    ask = transformers.pipeline("text-classification", model=str(run.model), device="cpu")
    for row in predicted(run):
        found = {each["label"]: each["score"] for each in ask(row["text"], top_k=None)}
        assert found == pytest.approx(row["probabilities"], abs=1e-4)


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_an_adapter_of_another_task_has_no_head_to_go_on_from(head, demo_adapter, engine, capsys):
    _, arguments = head("reward", "run", engine=engine, **demo_adapter)
    assert main(["fit", *arguments]) == 2
    assert "is for another task, without score. Merge it" in capsys.readouterr().err


@pytest.fixture
def demo_adapter() -> dict[str, Any]:
    """Keys that name the demo's adapter, which answers instructions."""
    folder = Path(__file__).parents[2] / "demo"
    return {"model__init_args__pretrained": str(folder / "llama"), "model__init_args__adapter":
            str(folder / "llama_sft")}


def test_labels_of_a_run_stay_when_its_rows_change(head, tmp_path):
    """A test of a run that has ended does not look for labels in rows that may be others by then."""
    run, arguments = head("single", "run")
    assert main(["fit", *arguments]) == 0
    source = tmp_path / "single.jsonl"
    source.write_text("".join(json.dumps({"text": text(number), "label": "even"}) + "\n" for number in range(26)))
    test = tmp_path / "test.jsonl"
    test.write_text("".join(json.dumps(classified(number)) + "\n" for number in range(9)))
    assert main(["test", "--config", str(run.config), "--ckpt_path", "last", "--data.test_source", str(test)]) == 0
    metrics = json.loads(run.metrics_json.read_text())
    assert 0 <= metrics["test/accuracy"] <= 1 and metrics["test/loss"] < 10
