"""Multiple choice: rows in the usual layouts become batches of pairs, and logits become choices."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax
from transformers import AutoTokenizer

from lmmods.core.errors import UserError
from lmmods.data.multiple_choice import MultipleChoiceData
from lmmods.data.read.choices import holds_choices, read_question

BERT = "demo/bert"
TWO = {"question": "Two and two?", "choices": ["3", "4", "22"], "answer": 1}
PAGE = Path(__file__).parents[2] / "docs" / "tasks" / "multiple_choice.md"


def build_data(source, stage="fit", folder=BERT, **settings) -> MultipleChoiceData:
    data = MultipleChoiceData(source=source, **{"max_length": 64, "pad_to_multiple_of": 1, **settings})
    data.connect(pretrained=folder, seed=7)
    data.prepare_data()
    data.setup(stage)
    return data


def read_printed_rows() -> list[dict]:
    [block] = re.findall(r"<!-- rows -->\n```json\n(.*?)```", PAGE.read_text(), re.S)
    return [json.loads(line) for line in block.splitlines()]


def test_every_documented_layout_gives_the_same_question():
    """The text before the choices, the choices, and the right one."""
    rows = read_printed_rows()
    for row in rows:
        question = read_question(row)
        texts = {f"{question.first} {second}" for second in question.seconds}
        assert texts == {"Tom is hungry. He eats a stone.", "Tom is hungry. He eats a pear."}, row
        assert question.choices[question.answer] == "a pear." and holds_choices(row), row
    assert len(rows) == 11


@pytest.mark.parametrize(("answer", "index"), [
    (0, 0), (1.0, 1), ("1", 1), ("b", 1), ("C", 2), ("22", 2), (" 4 ", 1)])
def test_an_answer_may_be_an_index_a_letter_or_a_text(answer, index):
    assert read_question({**TWO, "answer": answer}).answer == index


def test_an_answer_is_a_choice_before_an_index_but_a_label_is_not():
    row = {"question": "?", "choices": ["1", "2", "0"]}
    assert read_question({**row, "answer": "1"}).answer == 0
    assert read_question({**row, "label": "1"}).answer == read_question({**row, "answer": 1}).answer == 1
    named = {"question": "?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}}
    assert read_question({**named, "answerKey": "1"}).answer == 0
    assert read_question({"sentence": "The _ is red.", "option1": "a", "option2": "b", "answer": "2"}).answer == 1


@pytest.mark.parametrize(("row", "reason"), [
    ({**TWO, "answer": 3}, "answer is not one of the choices"),
    ({**TWO, "answer": "E"}, "answer is not one of the choices"),
    ({**TWO, "answer": "five"}, "answer is not one of the choices"),
    ({**TWO, "answer": 0.5}, "answer is not one of the choices"),
    ({**TWO, "answer": [1]}, "answer is neither a number nor a string"),
    ({**TWO, "answer": True}, "answer is neither a number nor a string"),
    ({**TWO, "answer": None}, "the right choice is missing"), ({**TWO, "answer": -1}, "the right choice is missing"),
    ({**TWO, "question": " "}, "no text before the choices"), ({**TWO, "question": {}}, "no text before the choices"),
    ({**TWO, "question": ["Two?"]}, "question is a list, not text"),
    ({**TWO, "choices": ["4"]}, "fewer than two choices"), ({**TWO, "choices": ["4", " "]}, "choice 1 is empty"),
    ({**TWO, "choices": ["4", None]}, "choices is null"), ({**TWO, "choices": "4, 5"}, "choices is text, but not JSON"),
    ({**TWO, "choices": {"text": ["4", "5"], "label": ["A"]}}, "choices is not a list of strings"),
    ({**TWO, "choices": 4}, "choices is not a list of strings")])
def test_unusable_questions_are_dropped_with_their_reason(row, reason, write_jsonl):
    data = build_data(write_jsonl([TWO, row]))
    [source] = data.report["sources"].values()
    assert {why: entry["rows"] for why, entry in source["dropped"].items()} == {reason: 1}
    assert source["rows_kept"] == len(data.items("train")) == 1


def test_pairs_are_encoded_as_by_transformers(write_jsonl):
    """Token ids, types and mask of `tokenizer(first, second)`, padded together."""
    rows = [{"sent1": "the man", "sent2": "He", **{f"ending{n}": f"{'walks ' * n}home" for n in range(4)}, "label": 2},
            {"question": "Who [SEP] is it?", "choices": ["a man", "a cat", "the", "x y z"], "answer": "D"}]
    data = build_data(write_jsonl(rows), batch_size=2, shuffle=False)
    batch = next(iter(data.train_batches()))
    tokenizer = AutoTokenizer.from_pretrained(BERT)
    # Names of special tokens in a text are text.
    first = ["the man"] * 4 + ["Who [ SEP ] is it?"] * 4
    second = [f"He {rows[0][f'ending{n}']}" for n in range(4)] + rows[1]["choices"]
    expected = tokenizer(first, second, padding=True, return_tensors="pt")
    for name in ("input_ids", "token_type_ids", "attention_mask"):
        assert batch[name].flatten(0, 1).tolist() == expected[name].tolist(), name
    assert batch["labels"].tolist() == [2, 3] and batch["choices"].tolist() == [4, 4]
    assert batch["index"].tolist() == [0, 1]
    real = batch["attention_mask"].bool()
    assert len(batch["token_seeds"][real].unique()) == real.sum()  # no two positions share their dropout


def test_only_the_context_is_truncated(write_jsonl):
    row = {"context": "red blue " * 40, "question": "Which colour is it?", "choices": ["green", "red and blue"],
           "answer": 1}
    data = build_data(write_jsonl([row]), max_length=30)
    pairs = [answer["input_ids"] for answer in data.items("train")[0]["answers"]]
    tokenizer = AutoTokenizer.from_pretrained(BERT)
    expected = tokenizer([row["context"]] * 2, [f"{row['question']} {choice}" for choice in row["choices"]],
                         truncation="only_first", max_length=30)["input_ids"]
    assert [ids.tolist() for ids in pairs] == expected
    full = tokenizer([row["context"]] * 2, [f"{row['question']} {choice}" for choice in row["choices"]])["input_ids"]
    [source] = data.report["sources"].values()
    assert (source["rows_cut"], source["tokens_cut"]) == (1, sum(map(len, full)) - 60)


def test_a_question_with_a_too_long_choice_is_truncated_and_counted(write_jsonl):
    """Otherwise the accuracy would only cover shorter questions; all pairs are truncated as by transformers."""
    row = {**TWO, "choices": ["4", "5 " * 80]}
    path = write_jsonl([TWO, row], "val.jsonl")
    data = build_data(write_jsonl([TWO]), "validate", val_source=path)
    expected = AutoTokenizer.from_pretrained(BERT)([TWO["question"]] * 2, row["choices"], truncation="longest_first",
                                                   max_length=64)["input_ids"]
    assert [answer["input_ids"].tolist() for answer in data.items("val")[1]["answers"]] == expected
    result = data.answer("val", {0: np.array([0, 1, 0], np.float32), 1: np.array([1, 0, 0], np.float32)})
    assert result.scores == {"accuracy": 0.5} and len(result.rows) == 2
    [source] = (entry for name, entry in data.report["sources"].items() if name == path)
    assert source["rows_cut"] == source["choices_cut"] == 1
    assert "truncated choices, too, in 1 of these rows" in data.report_table()


def test_a_max_length_without_space_for_a_token_is_rejected(write_jsonl):
    with pytest.raises(UserError, match="data.max_length is 3, but the tokenizer adds 3 special tokens"):
        build_data(write_jsonl([TWO]), max_length=3)


def test_questions_with_fewer_choices_are_padded(write_jsonl):
    rows = [TWO, {**TWO, "choices": ["3", "4"]}, {**TWO, "choices": ["3", "4", "5", "6"]}]
    data = build_data(write_jsonl(rows), batch_size=2, shuffle=False)
    first, second = list(data.train_batches())
    # All batches have the maximum number of choices, so processes that do not read a batch know its shape.
    assert first["input_ids"].shape[:2] == (2, 4) and second["input_ids"].shape[:2] == (1, 4)
    assert first["choices"].tolist() == [3, 2] and second["choices"].tolist() == [4]
    missing = np.arange(4) >= first["choices"][:, None].numpy()
    assert (first["attention_mask"].sum(-1).numpy()[missing] == 1).all()
    assert (first["input_ids"].numpy()[missing] == data.tokenizer.pad_token_id).all()
    padding = data.collator()([None])
    assert padding["labels"].tolist() == [-100] and padding["choices"].tolist() == [1]
    assert padding["attention_mask"].sum(-1).tolist() == [[1] * 4] and padding["index"].tolist() == [-1]


def test_batches_have_token_types_only_if_the_model_does(write_jsonl, byte_level_folder):
    data = MultipleChoiceData(source=write_jsonl([TWO]), max_length=64)
    data.connect(pretrained=BERT, token_types=False)
    assert "token_type_ids" not in next(iter(data.train_batches()))
    assert "token_type_ids" not in next(iter(build_data(write_jsonl([TWO]), folder=byte_level_folder).train_batches()))


def test_evaluation_logits_become_choices_and_probabilities(write_jsonl):
    rows = [TWO, {**TWO, "choices": ["3", "4"]}, {**TWO, "answer": 0}]
    data = build_data(write_jsonl([TWO]), "validate", val_source=write_jsonl(rows, "val.jsonl"))
    # The second row has two choices: its third logit belongs to a padding sequence.
    logits = np.array([[0.5, 2, -1], [0.25, 0.5, 9], [1, 1.5, 3]], np.float32)
    result = data.answer("val", dict(enumerate(logits)))
    assert result.scores == {"accuracy": 2 / 3} and result.files == {}
    assert [(row["choice"], row["prediction"]) for row in result.rows] == [(1, "4"), (1, "4"), (2, "22")]
    for row, expected in zip(result.rows, ([0.5, 2, -1], [0.25, 0.5], [1, 1.5, 3]), strict=True):
        np.testing.assert_allclose(row["probabilities"], softmax(expected), rtol=1e-6)
    assert {name: result.rows[2][name] for name in TWO} == rows[2]


@pytest.mark.parametrize("answers", [(None, -1, "none"), (1, 1, 1)])
def test_predict_needs_no_answers(answers, write_jsonl):
    source = write_jsonl([{**TWO, "answer": answer} for answer in answers], "asked.jsonl")
    data = build_data(write_jsonl([TWO]), "predict", predict_source=source, eval_batch_size=2)
    outputs = {}
    for batch in data.predict_dataloader():
        assert "labels" not in batch and batch["input_ids"].shape[1] == 3
        outputs |= {index: np.array([0, 1, 0], np.float32) for index in batch["index"].tolist() if index >= 0}
    result = data.predictions(outputs)
    assert [row["prediction"] for row in result.rows] == ["4"] * 3
    assert result.scores == ({"accuracy": 1.0} if None not in answers else {})
    assert data.example(2)["answer"] == answers[2]


def test_predict_reports_why_it_has_no_scores(write_jsonl, capsys):
    source = write_jsonl([TWO, {**TWO, "answer": None}], "asked.jsonl")
    data = build_data(write_jsonl([TWO]), "predict", predict_source=source)
    for _ in range(2):
        assert data.predictions({n: np.array([0, 1, 0], np.float32) for n in range(2)}).scores == {}
    assert capsys.readouterr().out.count("warning: predict has no scores: 1 of 2 rows have no right answer") == 1


def test_choices_in_csv_cells_are_read_as_json(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('question,choices,label\nTwo and two?,"[""3"", ""4"", ""22""]",1\nOne?,"[""0"", ""1""]",1\n')
    data = build_data(str(path))
    assert [row["answer"] for row in (data.rows("train")[0], data.rows("train")[1])] == [1, 1]


def test_inspection_names_the_right_choice(write_jsonl):
    inspected = build_data(write_jsonl([TWO])).rows_for_inspection(1)
    assert [row["name"] for row in inspected] == ["choice 0", "choice 1, right", "choice 2"]


def test_rows_without_choices_and_packing_are_rejected(write_jsonl):
    with pytest.raises(UserError, match="are not a question with choices"):
        build_data(write_jsonl([{"text": "Two and two?", "label": 1}]))
    with pytest.raises(UserError, match="a question's choices stay together"):
        MultipleChoiceData(source="a.jsonl", packing=True)
    assert not holds_choices({"question": "Two?", "context": "Two and two are four.", "answers": {"text": ["four"]}})


@pytest.mark.parametrize("settings", [{"streaming": True}, {"num_workers": 2}], ids=["stream", "workers"])
def test_streams_and_workers_give_the_same_batches(settings, write_jsonl):
    rows = [{**TWO, "answer": n % 3} for n in range(4)]
    data = build_data(write_jsonl(rows), batch_size=2, shuffle=False, **settings)
    loader = iter(data.train_batches())
    assert [next(loader)["labels"].tolist() for _ in range(2)] == [[0, 1], [2, 0]]
