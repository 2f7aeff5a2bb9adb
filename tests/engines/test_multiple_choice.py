"""Multiple choice on both engines: what tests/engines/test_heads.py asks of every head."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForMultipleChoice, AutoTokenizer

from lmmods.cli import main
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture
from tests.engines import test_heads as heads


def chosen(number: int) -> dict[str, Any]:
    choices = [heads.text(number + place) for place in range(2 + number % 3)]
    return {"question": heads.text(2 * number), "choices": choices, "answer": number % len(choices)}


CASES = {"choice": ("MultipleChoice", heads.BERT, chosen, {}),
         "choice-qlora": ("MultipleChoice", heads.BERT, chosen, heads.QLORA)}


@pytest.fixture(autouse=True)
def without_gradient(monkeypatch):
    # A softmax over choices does not see what is added to all of them.
    monkeypatch.setattr(heads, "WITHOUT_GRADIENT", (*heads.WITHOUT_GRADIENT, "classifier.bias"))


@pytest.fixture
def head(recipe, tmp_path, tokenizer_folder, bert_folder):  # noqa: F811
    return lambda *args, **changes: heads.written(recipe, tmp_path, tokenizer_folder, bert_folder, CASES, *args,
                                                  **changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_both_engines_say_the_same(head, name):
    heads.both_engines_agree(head, name, take_turns=name == "choice")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_any_cut_of_a_batch_gives_the_same_steps(head, engine):
    heads.any_cut_gives_the_same_steps(head, "choice", engine)


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(head):
    heads.two_processes_take_the_steps_of_one(head, "choice")


@pytest.mark.slow
def test_parity_compares_the_engines(head, capsys):
    heads.engines_pass_parity(head, "choice", capsys)


def test_an_export_gives_transformers_the_same_answers(head):
    run, arguments = head("choice", "run")
    assert main(["fit", *arguments]) == 0 and main(["predict", *arguments, "--ckpt_path", "last"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    model = AutoModelForMultipleChoice.from_pretrained(run.model).eval()
    for row in heads.predicted(run):
        inputs = tokenizer([row["question"]] * len(row["choices"]), row["choices"], truncation="only_first",
                           max_length=48, padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = model(**{name: values.unsqueeze(0) for name, values in inputs.items()}).logits[0]
        assert row["prediction"] == row["choices"][int(logits.argmax())]
        assert row["probabilities"] == pytest.approx(logits.softmax(-1).tolist(), abs=1e-3)
