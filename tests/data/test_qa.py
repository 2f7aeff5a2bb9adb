"""QAData: windows contain the answer at its labels; oddities of real files are corrected or counted."""

import csv
import json

import numpy as np
import pytest

from lmmods.data.encode.windows import locate
from lmmods.data.qa import QAData
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture

CONTEXT = (
    "The quick brown fox jumps over the lazy dog. " * 12
    + "Größe 42 is the sum of 12 and 30. "
    + "The dog jumps again. " * 12
)
ANSWERS = ["42", "12 and 30", "quick brown fox"]


def squad(tmp_path, name="squad.json", **changes):
    qas = [
        {
            "id": str(n),
            "question": "what is the sum?",
            "answers": [{"text": text, "answer_start": CONTEXT.index(text)}] * 2,
        }
        for n, text in enumerate(ANSWERS)
    ]
    qas.append({"id": "none", "question": "who?", "answers": [], "is_impossible": True})
    qas += changes.get("more", [])
    path = tmp_path / name
    path.write_text(
        json.dumps({"version": "1", "data": [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": qas}]}]})
    )
    return str(path)


def build(path, folder, **fields):
    data = QAData(
        path, tokenizer=folder, **{"max_length": 64, "stride": 16, "question_max_length": 16, "batch_size": 3, **fields}
    )
    data.setup("fit")
    return data


def iterate_windows(data, role="train"):
    for batch in data.train_batches():
        for n in range(len(batch["index"])):
            row = {key: value[n] for key, value in batch.items()}
            yield row, data.codec.window(data.rows(role), int(row["index"]))


def test_each_label_marks_its_answer_in_the_window(bert_folder, tmp_path):  # noqa: F811
    data = build(squad(tmp_path), bert_folder)
    num_windows, covered = {}, {}
    for row, window in iterate_windows(data):
        question = data.rows("train").source_row(window["question"])
        offsets = window["offsets"]
        inside = offsets[offsets[:, 1] > 0]
        covered.setdefault(question["id"], []).append((inside[:, 0].min(), inside[:, 1].max()))
        start, end = int(row["start_positions"]), int(row["end_positions"])
        if start == window["cls_position"]:
            continue
        text = question["context"][offsets[start, 0] : offsets[end, 1]]
        assert text == data.codec.golds(data.rows("train").source_row(window["question"]))[0]
        num_windows[question["id"]] = num_windows.get(question["id"], 0) + 1
    assert set(num_windows) == {"0", "1", "2"}
    for spans in covered.values():  # windows overlap and reach from end to end
        spans.sort()
        assert spans[0][0] == 0 and spans[-1][1] == len(CONTEXT.rstrip())
        assert all(later[0] < earlier[1] for earlier, later in zip(spans, spans[1:], strict=False))


def test_left_padding_shifts_the_label_positions(bert_folder, tmp_path):  # noqa: F811
    data = build(squad(tmp_path), bert_folder)
    data.tokenizer.padding_side = "left"
    data = QAData(
        squad(tmp_path), tokenizer=bert_folder, max_length=64, stride=16, question_max_length=16, batch_size=3
    )
    data.tokenizer.padding_side = "left"
    data.setup("fit")
    checked = 0
    for row, window in iterate_windows(data):
        pad = int((row["attention_mask"] == 0).sum())
        start, end = int(row["start_positions"]) - pad, int(row["end_positions"]) - pad
        if start != window["cls_position"]:
            text = data.rows("train").source_row(window["question"])["context"]
            assert text[window["offsets"][start, 0] : window["offsets"][end, 1]] in ANSWERS
            checked += 1
    assert checked >= 3


@pytest.mark.parametrize(
    "context,text,start,expected",
    [
        ("a fox jumps", "fox", 2, "fox"),
        ("a fox jumps", "fox", 3, "fox"),
        ("a fox  jumps", "fox jumps", 2, "fox  jumps"),
        ("a fox jumps", "cat", 2, None),
        ("fox" + "x" * 99 + "fox", "fox", 100, "fox"),
        ("a fox", "", 1, None),
        ("a", "fox", -5, None),
    ],
)
def test_an_answer_is_located_near_its_offset(context, text, start, expected):
    span = locate(context, text, start)
    assert (None if span is None else context[slice(*span)]) == expected


def test_wrong_answer_offsets_are_corrected_or_counted(bert_folder, tmp_path):  # noqa: F811
    more = [
        {"id": "moved", "question": "q", "answers": [{"text": "42", "answer_start": CONTEXT.index("42") + 3}]},
        {"id": "lost", "question": "q", "answers": [{"text": "no such words", "answer_start": 3}]},
        {"id": "broken", "question": "q", "answers": [{"text": "42"}]},
        {"id": "none", "question": "q"},
    ]
    path = squad(tmp_path, more=more)
    data = build(path, bert_folder)
    source = data.report["sources"][path]
    assert source["answers_moved_to_their_place"] == 1 and source["answers_not_in_context"] == 1
    assert "  1 questions have an answer that is not in their context: the loss ignores them" in data.report_table()
    assert source["questions_without_answer"] == 1 and source["questions"] == 6
    assert {reason: entry["rows"] for reason, entry in source["dropped"].items()} == {
        "answers are not {text, answer_start}": 1,
        "answers is missing": 1,
    }
    questions = data.rows("train")
    lost = [row for row, window in iterate_windows(data) if questions.source_row(window["question"])["id"] == "lost"]
    assert lost and all(int(row["start_positions"]) == -100 for row in lost)


def test_flat_rows_train_and_predict_needs_no_answers(bert_folder, write_jsonl):  # noqa: F811
    rows = [
        {
            "id": "1",
            "title": "",
            "context": CONTEXT,
            "question": "q",
            "answers": {"text": ["42"], "answer_start": [CONTEXT.index("42")]},
        }
    ]
    data = build(
        write_jsonl(rows),
        bert_folder,
        predict_source=write_jsonl([{"context": CONTEXT, "question": "q [SEP] [MASK]"}], "ask.jsonl"),
    )
    assert any(int(row["start_positions"]) > 0 for row, _ in iterate_windows(data))
    batch = next(iter(data.predict_dataloader()))
    assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "index"}
    assert all(row.tolist().count(3) == 2 for row in batch["input_ids"])
    assert data.example(int(batch["index"][0]))["question"] == "q [SEP] [MASK]"


def test_long_questions_are_truncated_and_counted(bert_folder, tmp_path):  # noqa: F811
    more = [
        {"id": "long", "question": "the fox " * 40, "answers": [{"text": "42", "answer_start": CONTEXT.index("42")}]}
    ]
    path = squad(tmp_path, more=more)
    data = build(path, bert_folder)
    assert data.report["sources"][path]["questions_cut"] == 1 and data.rows("train").lengths.max() <= 64
    assert "  truncated 1 questions to data.question_max_length" in data.report_table()


def test_a_flat_csv_file_equals_the_same_rows_in_json(tmp_path, bert_folder):  # noqa: F811
    rows = [{"id": str(n), "question": "what is the sum?", "context": CONTEXT, "is_impossible": False,
             "answers": {"text": [text], "answer_start": [CONTEXT.index(text)]}} for n, text in enumerate(ANSWERS)]
    rows.append({**rows[0], "id": "list", "answers": [{"text": "42", "answer_start": CONTEXT.index("42")}]})
    rows.append({**rows[0], "id": "none", "answers": {"text": [], "answer_start": []}, "is_impossible": True})
    rows.append({**rows[0], "id": "null", "answers": None, "is_impossible": None})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        for row in rows:
            flag = {None: "", True: "True", False: "false"}[row["is_impossible"]]
            answers = "" if row["answers"] is None else json.dumps(row["answers"])
            writer.writerow({**row, "is_impossible": flag, "answers": answers}.values())
    as_json, as_csv = (build(str(tmp_path / name), bert_folder) for name in ("a.jsonl", "a.csv"))
    sets = [data.rows("train") for data in (as_json, as_csv)]
    assert len(sets[0]) == len(sets[1]) > 12
    for left, right in zip(*sets):
        assert all((left[key] == right[key]).all() if key in ("input_ids", "offsets") else
                   list(left) == list(right) for key in left)
        assert (left["start_positions"], left["end_positions"]) == (right["start_positions"], right["end_positions"])
    for index, row in enumerate(rows):
        from_json, from_csv = (data.rows("train").source_row(index) for data in (as_json, as_csv))
        assert from_json == from_csv == row
        assert as_json.codec.golds(from_json) == as_csv.codec.golds(from_csv)
        assert as_json.codec.is_labelled(from_json) == as_csv.codec.is_labelled(from_csv) == (row["id"] != "null")
    assert as_json.report["sources"][str(tmp_path / "a.jsonl")]["dropped"] == {}
    assert as_csv.report["sources"][str(tmp_path / "a.csv")]["dropped"] == {}


@pytest.mark.parametrize("start", [-3, -(10**30), 10**30, float("inf")])
def test_offsets_outside_the_context_are_corrected_or_counted(start, tmp_path, bert_folder):  # noqa: F811
    row = {"question": "what?", "context": "The fox jumps.", "answers": {"text": ["fox"], "answer_start": [start]}}
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 2 + json.dumps({**row, "answers": None}))
    counts = build(str(tmp_path / "a.jsonl"), bert_folder).report["sources"][str(tmp_path / "a.jsonl")]
    if start == float("inf"):
        assert counts["rows_dropped"] == 2
    else:
        assert counts["answers_moved_to_their_place"] + counts.get("answers_not_in_context", 0) == 2


def test_questions_without_an_id_stay_distinct_and_a_number_is_a_context(tmp_path, bert_folder):  # noqa: F811
    row = {"question": "what?", "context": 1234, "answers": {"text": ["1234"], "answer_start": [0]}}
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({**row, **more}) + "\n" for more in ({}, {"id": None}, {"id": ""}, {"id": "x"})))
    data = build(str(path), bert_folder)
    lengths = [len(data.codec.window(data.rows("train"), index)["offsets"]) for index in range(4)]
    result = data.answer("train", {index: (np.zeros(length), np.zeros(length)) for index, length in enumerate(lengths)})
    assert list(result.files["predictions.json"]) == ["0", "1", "2", "x"] and len(result.rows) == 4


def test_questions_with_the_same_id_are_answered_separately(bert_folder, write_jsonl, capsys):  # noqa: F811
    """SQuAD's scorer counts each question, but its file has one answer per id: repeated ids get a suffix."""
    questions = [("a", "quick"), ("a", "fox"), ("", "lazy"), ("2", "dog"), ("a", "over")]
    context = "The quick brown fox jumps over the lazy dog."
    data = build(write_jsonl([
        {"id": key, "question": f"q {n}", "context": context,
         "answers": {"text": [text], "answer_start": [context.index(text)]}}
        for n, (key, text) in enumerate(questions)]), bert_folder)
    logits = {}
    for row, window in iterate_windows(data):  # confident in the right answer, except for the last question
        first, last = (int(row[f"{end}_positions"]) for end in ("start", "end"))
        wrong = window["question"] == 4
        logits[int(row["index"])] = tuple(10.0 * (np.arange(len(row["input_ids"])) == position - wrong)
                                          for position in (first, last))
    for _ in range(2):
        result = data.answer("train", logits)
    assert [row["prediction"] for row in result.rows[:4]] == [text for _, text in questions[:4]]
    assert result.scores["exact_match"] == 80.0 and len(result.rows) == 5
    files = result.files["predictions.json"]
    assert list(files) == list(result.files["nbest_predictions.json"]) == ["a", "a#1", "2", "2#3", "a#4"]
    assert list(files.values()) == [row["prediction"] for row in result.rows]
    output = capsys.readouterr().out
    assert output.count("warning: 3 questions of train share the id of another one, the first is a (") == 1
    assert "rows.jsonl:2)" in output


def test_inspected_windows_show_the_location_of_their_question(bert_folder, write_jsonl):  # noqa: F811
    """There are more windows than questions."""
    path = write_jsonl([{"question": "q", "context": CONTEXT, "answers": {
        "text": ["42"], "answer_start": [CONTEXT.index("42")]}} for _ in range(2)])
    data = build(path, bert_folder)
    inspected = data.rows_for_inspection(100)
    assert len(inspected) == len(data.rows("train")) > 4
    expected = data.rows("train").index.tolist()
    assert [row["index"] for row in inspected] == expected
    assert [row["location"] for row in inspected] == [f"{path}:{index + 1}" for index in expected]
    assert {row["scored"] for row in inspected} == {"start and end of 42", "no answer: this window does not contain it"}


def test_questions_excluded_from_the_scores_are_reported(bert_folder, tmp_path, capsys):  # noqa: F811
    """SQuAD v1.1 has no questions without an answer; a damaged answer counts as missing."""
    def compute_scores(rows, **fields):
        path = tmp_path / f"ask{len(list(tmp_path.iterdir()))}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = QAData(squad(tmp_path), tokenizer=bert_folder, max_length=64, stride=16, question_max_length=16,
                      predict_source=str(path), **fields)
        data.setup("predict")
        sizes = data.rows("predict").lengths
        return data.predictions({n: (np.zeros(size), np.zeros(size)) for n, size in enumerate(sizes)}).scores

    row = {"id": "a", "question": "what?", "context": "the fox", "answers": {"text": ["the"], "answer_start": [0]}}
    empty = {**row, "id": "b", "answers": {"text": [], "answer_start": []}}
    assert compute_scores([row])["exact_match"] == compute_scores([row, empty])["exact_match"]
    assert ("warning: The scores of predict exclude 1 of 2 questions, which have no answer. Set "
            "data.version_2_with_negative to score them." in capsys.readouterr().out)
    assert "NoAns_f1" in compute_scores([row, empty], version_2_with_negative=True)
    assert capsys.readouterr().out == ""
    for fields in ({}, {"version_2_with_negative": True}):
        assert compute_scores([row, {**row, "id": "c", "answers": {"text": "the"}}], **fields) == {}
        assert "predict has no scores: 1 of 2 rows have no right answer" in capsys.readouterr().out
