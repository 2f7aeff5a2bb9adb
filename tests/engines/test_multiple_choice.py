"""Multiple choice on both engines: the checks of tests/engines/test_heads.py."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForMultipleChoice, AutoTokenizer

from lmmods.cli import main
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture
from tests.engines import test_heads as heads


def make_choice(index: int) -> dict[str, Any]:
    choices = [heads.make_text(index + offset) for offset in range(2 + index % 3)]
    return {"question": heads.make_text(2 * index), "choices": choices, "answer": index % len(choices)}


CASES = {"choice": ("MultipleChoice", heads.BERT, make_choice, {}),
         "choice-qlora": ("MultipleChoice", heads.BERT, make_choice, heads.QLORA)}


@pytest.fixture(autouse=True)
def exclude_classifier_bias(monkeypatch):
    # A constant added to all choices has no effect on their softmax, so it gets no gradient.
    monkeypatch.setattr(heads, "WITHOUT_GRADIENT", (*heads.WITHOUT_GRADIENT, "classifier.bias"))


@pytest.fixture
def write_case(recipe, tmp_path, tokenizer_folder, bert_folder):  # noqa: F811
    return lambda *args, **changes: heads.write_case_recipe(recipe, tmp_path, tokenizer_folder, bert_folder, CASES,
                                                            *args, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_both_engines_give_the_same_losses_exports_and_predictions(write_case, name):
    heads.check_both_engines(write_case, name, take_turns=name == "choice")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_any_batch_split_gives_the_same_steps(write_case, engine):
    heads.check_any_batch_split(write_case, "choice", engine)


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(write_case):
    heads.check_two_processes(write_case, "choice")


@pytest.mark.slow
def test_the_engines_pass_parity(write_case, capsys):
    heads.check_parity(write_case, "choice", capsys)


def test_an_export_gives_the_same_predictions_in_transformers(write_case):
    run, arguments = write_case("choice", "run")
    assert main(["fit", *arguments]) == 0 and main(["predict", *arguments, "--ckpt_path", "last"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    model = AutoModelForMultipleChoice.from_pretrained(run.model).eval()
    for row in heads.read_predictions(run):
        inputs = tokenizer([row["question"]] * len(row["choices"]), row["choices"], truncation="only_first",
                           max_length=48, padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = model(**{name: values.unsqueeze(0) for name, values in inputs.items()}).logits[0]
        assert row["prediction"] == row["choices"][int(logits.argmax())]
        assert row["probabilities"] == pytest.approx(logits.softmax(-1).tolist(), abs=1e-3)
