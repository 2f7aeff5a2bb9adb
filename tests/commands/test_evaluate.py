"""`evaluate`: lm-eval on a finished run with a local task, against likelihoods computed by hand."""

import functools
import json
import sys

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from lmmods.cli import main
from lmmods.torch_engine.compat.bitsandbytes import patch_cpu_kernels

QUESTIONS = [("the quick brown", ["fox", "dog", "3"], 0), ("Add 1 and 2.", ["1", "2", "3"], 2),
             ("jumps over the", ["lazy", "quick", "fox"], 1), ("### Response:", ["dog", "fox", "Write"], 1),
             ("one two", ["three", "response", "the"], 0), ("over the lazy", ["brown", "dog", "fox"], 2)]


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    """A multiple-choice task over a local file. The cached TaskManager reads lm-eval's own tasks only once."""
    tasks = pytest.importorskip("lm_eval.tasks")
    top = tmp_path_factory.mktemp("tasks")
    rows = top / "questions.jsonl"
    rows.write_text("".join(json.dumps({"question": q, "choices": c, "answer": a}) + "\n" for q, c, a in QUESTIONS))
    folder = top / "tasks"
    folder.mkdir()
    for name, file in (("guess", rows), ("lost", top / "lost.jsonl")):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({
            "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}},
            "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
            "doc_to_target": "answer", "doc_to_choice": "choices", "metric_list": [{"metric": "acc"}]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "TaskManager", functools.cache(tasks.TaskManager))
        yield str(folder)


def compute_accuracy(model, tokenizer) -> float:
    """Return the fraction of questions whose right choice is the most likely continuation."""
    hits = 0
    for question, choices, answer in QUESTIONS:
        scores = []
        for choice in choices:
            start, ids = tokenizer(question)["input_ids"], tokenizer(f"{question} {choice}")["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            scores.append(sum(logits[position - 1, ids[position]].item() for position in range(len(start), len(ids))))
        hits += scores.index(max(scores)) == answer
    return hits / len(QUESTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"model__init_args__quantize": None, "model__init_args__lora": None}],
                         ids=["qlora", "full"])
def test_scores_of_a_local_task_equal_those_computed_by_hand(finished, llama_folder, task_folder, changes, capsys):
    run = finished("run", **changes)
    before = json.loads(run.metrics_json.read_text())
    assert main(["evaluate", "--run", str(run.root), "--tasks", "guess", "--task_folder", task_folder]) == 0
    assert "guess" in capsys.readouterr().out
    if changes:
        model = AutoModelForCausalLM.from_pretrained(run.model)
    else:
        base = AutoModelForCausalLM.from_pretrained(llama_folder, device_map="cpu", quantization_config=(
            BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                               bnb_4bit_compute_dtype=torch.float32)))
        patch_cpu_kernels(base)
        tokenizer = AutoTokenizer.from_pretrained(run.model)
        base.resize_token_embeddings(len(tokenizer))
        model = PeftModel.from_pretrained(base, run.model)
    expected = compute_accuracy(model.eval(), AutoTokenizer.from_pretrained(run.model))
    metrics = json.loads(run.metrics_json.read_text())
    assert metrics == {**before, "eval/guess/acc": pytest.approx(expected)}
    assert json.loads((run.root / "evaluate.json").read_text())["n-samples"]["guess"]["effective"] == len(QUESTIONS)
    assert main(["evaluate", "--run", str(run.root), "--tasks", "gues", "--task_folder", task_folder]) == 2
    assert "--tasks gues: lm-eval has no such task" in capsys.readouterr().err


@pytest.mark.slow
def test_a_failed_task_does_not_affect_other_tasks(finished, task_folder, monkeypatch, capsys):
    """Missing data give one message at the end; a bug in a task raises its own error at the end."""
    import lm_eval

    arguments = ["evaluate", "--tasks", "lost,guess", "--task_folder", task_folder, "--limit", "2"]
    run = finished("first")
    assert main([*arguments, "--run", str(run.root)]) == 2
    out, err = capsys.readouterr()
    assert "guess" in out and "Wrote 1 scores" in out
    assert "lost failed: " in err and "error: evaluate: 1 of 2 tasks failed (lost: " in err and "are written" in err
    assert "eval/guess/acc" in json.loads(run.metrics_json.read_text())
    assert [*json.loads((run.root / "evaluate.json").read_text())["results"]] == ["guess"]

    def evaluate(model, tasks, **options):
        if tasks == ["lost"]:
            raise KeyError("column")
        return {"results": {"guess": {"acc,none": 0.5}}, "versions": {}, "n-shot": {}}

    monkeypatch.setattr(lm_eval, "simple_evaluate", evaluate)
    run = finished("second")
    with pytest.raises(KeyError):
        main([*arguments, "--run", str(run.root)])
    assert json.loads(run.metrics_json.read_text())["eval/guess/acc"] == 0.5


@pytest.mark.slow
def test_a_chat_template_is_rendered_within_limits(finished, task_folder, capsys):
    arguments = ["evaluate", "--tasks", "guess", "--task_folder", task_folder, "--limit", "1", "--apply_chat_template",
                 "true", "--run"]
    run = finished("run")
    template = run.model / "chat_template.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert main([*arguments, str(run.root)]) == 0
    template.write_text("{{ lipsum(n=10**7) }}")
    assert main([*arguments, str(run.root)]) == 2
    assert "error: the tokenizer's chat template exceeds the limits of a rendering" in capsys.readouterr().err
    template.unlink()
    assert main([*arguments, str(run.root)]) == 2
    assert "has no chat template. Remove it." in capsys.readouterr().err


def test_a_missing_run_or_package_is_an_error(tmp_path, monkeypatch, capsys):
    assert main(["evaluate", "--run", str(tmp_path / "none"), "--tasks", "guess"]) == 2
    assert "not a run folder" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", "--run", str(tmp_path), "--tasks", "guess"]) == 2
    assert "pip install -e '.[eval]'" in capsys.readouterr().err
