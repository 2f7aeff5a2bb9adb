"""SequenceClassificationData: labels read once and cached, texts encoded as by transformers, rows kept or counted."""

import csv
import json
import math
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from transformers import AutoConfig

from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.encode.encoder import Ragged
from lmmods.data.encode.labels import Labels, SequenceEncoder
from lmmods.data.encode.tokenizer import TokenizerOptions, load_tokenizer
from lmmods.data.labels import make_truncating_tokenizer
from lmmods.data.read.readers import Row
from lmmods.data.sequence_classification import SequenceClassificationData
from tests.data.conftest import CORPUS
from tests.data.test_damaged_rows import WRONG
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture


def build(path, folder, stage="fit", names=None, **fields):
    data = SequenceClassificationData(path, **{"tokenizer": folder, "max_length": 64, "batch_size": 4, **fields})
    data.connect(pretrained=folder, max_positions=512, label_names=names)
    data.setup(stage)
    return data


def make_rows(labels, **more):
    return [{"text": f"The fox number {n}" + " again" * (n % 7), "label": label, **more}
            for n, label in enumerate(labels)]


def read_rows(data, role="train"):
    """Return the rows of all batches by the index of their source row."""
    loader = {"train": data.train_batches, "val": data.val_dataloader, "test": data.test_dataloader,
              "predict": data.predict_dataloader}[role]()
    rows = {}
    for batch in loader:
        for position, index in enumerate(batch["index"].tolist()):
            if index >= 0:
                source_index = data.rows(role)[index]["index"]
                rows[source_index] = {name: column[position] for name, column in batch.items()}
    return rows


# Labels


@pytest.mark.parametrize("labels,expected,indices", [
    (["b", "a", "b", "c"], ["a", "b", "c"], [1, 0, 1, 2]),
    ([1, 0, 10, 2], ["0", "1", "2", "10"], [1, 0, 3, 2]),
    ([True, False, True], ["false", "true"], [1, 0, 1]),
    (["10", "9", " 9"], ["9", "10"], [1, 0, 0]),
    ([-1, 1, 0], ["-1", "0", "1"], [0, 2, 1]),
    (["yes", 1, "no"], ["1", "no", "yes"], [2, 0, 1]),
])
def test_labels_are_read_from_the_rows_and_sorted(labels, expected, indices, bert_folder, write_jsonl):  # noqa: F811
    data = build(write_jsonl(make_rows(labels)), bert_folder)
    assert data.labels == expected and data.problem_type == "single_label"
    rows = read_rows(data)
    assert [int(rows[n]["labels"]) for n in range(len(labels))] == indices
    config = AutoConfig.for_model("bert", **data.network_fields)
    assert config.num_labels == len(expected) and config.problem_type == "single_label_classification"
    assert [config.id2label[n] for n in range(len(expected))] == expected and config.label2id[expected[1]] == 1


def test_numbers_and_lists_in_csv_cells_are_labels(bert_folder, tmp_path):  # noqa: F811
    for name, cells, problem_type in (("a", ["0", "1", "0"], "single_label"), ("b", ["0.5", "1", "-2e1"], "regression"),
                                      ("c", ['["x", "y"]', "[]", '["y"]'], "multi_label")):
        with open(tmp_path / f"{name}.csv", "w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *(("the fox", cell) for cell in cells)])
        data = build(str(tmp_path / f"{name}.csv"), bert_folder)
        assert data.problem_type == problem_type and len(read_rows(data)) == 3
    assert data.labels == ["x", "y"] and read_rows(data)[0]["labels"].tolist() == [1, 1]


def test_lists_of_labels_are_multi_label(bert_folder, write_jsonl):  # noqa: F811
    path = write_jsonl(make_rows([["b", "a"], [], ["c"], ["a", "a"], "a", [["a"]], None]))
    data = build(path, bert_folder)
    assert data.labels == ["a", "b", "c"] and data.problem_type == "multi_label"
    rows = read_rows(data)
    assert {n: row["labels"].tolist() for n, row in rows.items()} == {0: [1, 1, 0], 1: [0, 0, 0], 2: [0, 0, 1]}
    assert rows[0]["labels"].dtype == torch.float32
    assert data.network_fields["problem_type"] == "multi_label_classification"
    assert data.report["sources"][path]["rows_dropped"] == 4
    assert data.codec.count_labels(data.rows("train")) == {"a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize("lists,fields,labels,rows", [
    # Two classes: read as label indices, each row would have both.
    ([[1, 0], [0, 1], [1, 0]], {}, ["0", "1"], [[1, 0], [0, 1], [1, 0]]),
    ([[1.0, 0.0], [False, True], ["1", "0"]], {}, ["0", "1"], [[1, 0], [0, 1], [1, 0]]),
    ([[1, 0], [0, 1]], {"labels": ["ham", "spam"]}, ["ham", "spam"], [[1, 0], [0, 1]]),
    ([[1, 0], [0, 1]], {"labels": ["1", "0"]}, ["1", "0"], [[0, 1], [1, 0]]),
    ([[1, 1, 0, 1], [0, 0, 0, 0]], {}, ["0", "1", "2", "3"], [[1, 1, 0, 1], [0, 0, 0, 0]]),
    ([[0] * 11 + [1], [1] + [0] * 11], {}, [str(n) for n in range(12)], [[0] * 11 + [1], [1] + [0] * 11]),
    # Label indices: no list has a number for each label.
    ([[0, 1], [0], [1], []], {}, ["0", "1"], [[1, 1], [1, 0], [0, 1], [0, 0]]),
    ([[0], [1]], {}, ["0", "1"], [[1, 0], [0, 1]]),
    ([[0, 1], [1, 0]], {"labels": ["a", "b", "c"]}, ["a", "b", "c"], [[1, 1, 0], [1, 1, 0]]),
    ([[0, 2], [0, 1]], {}, ["0", "1", "2"], [[1, 0, 1], [1, 1, 0]])])
def test_lists_of_zeros_and_ones_mark_labels(lists, fields, labels, rows, bert_folder, write_jsonl):  # noqa: F811
    path = write_jsonl(make_rows(lists))
    for names in (None, ["1", "0"]):  # the model's order of the same labels
        data = build(path, bert_folder, names=names, **fields)
        result = {n: dict(zip(data.labels, row["labels"].tolist(), strict=True)) for n, row in read_rows(data).items()}
        assert result == {n: dict(zip(labels, row, strict=True)) for n, row in enumerate(rows)}
        assert data.problem_type == "multi_label" and set(data.labels) == set(labels)
    notes = " ".join(data.report["sources"][path]["notes"])
    sizes = {len(row) for row in lists}
    reads_positions = len(sizes) == 1 and sizes == {len(labels)} and lists != [[0, 2], [0, 1]]
    assert ("a one marks the label at its position" in notes) == reads_positions
    assert ("they are label indices" in notes) == (not reads_positions and lists != [[0, 2], [0, 1]])


def test_other_lists_among_lists_of_zeros_and_ones_are_dropped(bert_folder, write_jsonl):  # noqa: F811
    path = write_jsonl(make_rows([[1, 0], [0, 1], []]))
    val = write_jsonl(make_rows([[0, 1], [1], [1, 0, 0]]), "val.jsonl")
    data = build(path, bert_folder, val_source=val)
    reason = "the label is not a list of 2 zeros and ones, as in other rows"
    for name, rows in ((path, 1), (val, 2)):
        assert {why: entry["rows"] for why, entry in data.report["sources"][name]["dropped"].items()} == {reason: rows}


def test_lists_of_fractions_are_rejected(bert_folder, write_jsonl):  # noqa: F811
    with pytest.raises(UserError, match=r"rows.jsonl:2: \[0.25, 0.75\] in the column 'label' is a list with fractions"):
        build(write_jsonl(make_rows([[1, 0], [0.25, 0.75], [0, 1]])), bert_folder)


def test_decimal_commas_are_not_read_as_classes(bert_folder, tmp_path):  # noqa: F811
    path = tmp_path / "a.tsv"
    path.write_text("text\tscore\nfox\t3\nfox\t0,5\nfox\t-1,25\n")
    with pytest.raises(UserError, match="a.tsv:3: '0,5' in the column 'score' looks like .* decimal comma"):
        build(str(path), bert_folder)
    with pytest.raises(UserError, match="no usable row.*the label has a decimal comma instead of a point .2 rows"):
        path.write_text("text\tscore\nfox\t0,5\nfox\t-1,25\n")
        build(str(path), bert_folder, problem_type="regression")
    assert build(str(path), bert_folder, problem_type="single_label").labels == ["-1,25", "0,5"]
    path.write_text("text\tscore\nfox\t0,5\nfox\tmany\n")  # a label may have a comma
    assert build(str(path), bert_folder).labels == ["0,5", "many"]


def test_nearly_one_label_per_row_is_rejected(bert_folder, write_jsonl):  # noqa: F811
    path = write_jsonl(make_rows([f"id-{n}" for n in range(30)]))
    with pytest.raises(UserError, match=r"'label' has 30 different values in 30 rows \(id-0, id-1, id-10 \.\.\.\)"):
        build(path, bert_folder)
    assert len(build(path, bert_folder, problem_type="single_label").labels) == 30
    assert len(build(path, bert_folder, labels=[f"id-{n}" for n in range(30)]).labels) == 30
    assert len(build(write_jsonl(make_rows([f"id-{n % 20}" for n in range(30)])), bert_folder).labels) == 20


def test_numeric_labels_are_regression_targets(bert_folder, write_jsonl):  # noqa: F811
    path = write_jsonl(make_rows([0.5, 2, "3.5", float("nan"), "many", True, None, 1e400]))
    data = build(path, bert_folder, problem_type="regression")
    rows = read_rows(data)
    assert {n: float(row["labels"]) for n, row in rows.items()} == {0: 0.5, 1: 2, 2: 3.5}
    assert data.report["sources"][path]["dropped"]["the label is not a number"]["rows"] == 5
    config = AutoConfig.for_model("bert", **data.network_fields)
    assert config.num_labels == 1 and config.problem_type == "regression"
    assert build(write_jsonl(make_rows([0.5, 1.0, 2])), bert_folder).problem_type == "regression"
    with pytest.raises(UserError, match="applies to labels"):
        data.class_weights("balanced")


def test_padding_rows_have_no_label(bert_folder, write_jsonl):  # noqa: F811
    for labels, is_none in (([0, 1], lambda column: column == IGNORED), ([0.5, 1.5], torch.isnan),
                            ([["a"], ["b"]], torch.isnan)):
        data = build(write_jsonl(make_rows(labels)), bert_folder)
        batch = data.collator()([data.items("train")[0], None])
        assert bool(is_none(batch["labels"][1]).all()) and not bool(is_none(batch["labels"][0]).any())
        assert batch["index"].tolist() == [0, -1] and batch["attention_mask"][1].sum() == 1


def test_data_labels_sets_the_labels_and_their_order(bert_folder, write_jsonl):  # noqa: F811
    path = write_jsonl(make_rows(["a", "b", "z", "c", "a"]))
    data = build(path, bert_folder, labels=["c", "b", "a"])
    assert {n: int(row["labels"]) for n, row in read_rows(data).items()} == {0: 2, 1: 1, 3: 0, 4: 2}
    assert data.report["sources"][path]["dropped"]["a label that is not in data.labels"]["first"] == [f"{path}:3"]
    data = build(write_jsonl(make_rows([0, 1, 2, 0])), bert_folder, labels=["bad", "good"])  # numbers are indices
    assert {n: int(row["labels"]) for n, row in read_rows(data).items()} == {0: 0, 1: 1, 3: 0}


@pytest.mark.parametrize("names,expected", [
    (["Pos", "neg", "NEUTRAL"], ["pos", "neg", "neutral"]), (["LABEL_0", "LABEL_1", "LABEL_2"], None),
    (["pos", "neg"], None), (["pos", "neg", "neutral", "mixed"], None), (None, None)])
def test_the_models_order_of_the_same_labels_is_used(names, expected, bert_folder, write_jsonl):  # noqa: F811
    path = write_jsonl(make_rows(["neg", "pos", "neutral"]))
    assert build(path, bert_folder, names=names).labels == (expected or ["neg", "neutral", "pos"])
    assert build(path, bert_folder, names=names, labels=["neutral", "neg", "pos"]).labels == ["neutral", "neg", "pos"]


def test_class_names_saved_by_datasets_are_used(bert_folder, tmp_path):  # noqa: F811
    """As `datasets` writes Parquet files, with class names; -1 is a hidden label."""
    features = {"sentence": {"dtype": "string", "_type": "Value"},
                "label": {"names": ["negative", "positive", "never"], "_type": "ClassLabel"}}
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    table = pa.table({"sentence": ["the fox", "the dog", "a fox"], "label": [1, 0, -1]})
    table = table.replace_schema_metadata(metadata)
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        path = str(tmp_path / name)
        data = build(path, bert_folder)
        assert data.labels == ["negative", "positive", "never"]
        assert {n: int(row["labels"]) for n, row in read_rows(data).items()} == {0: 1, 1: 0}
        assert list(data.report["sources"][path]["dropped"]) == ["a label without a name"]
        named = build(path, bert_folder, columns={"label": "verdict"}, label_column="verdict")
        assert named.labels == ["negative", "positive", "never"]


def test_labels_are_cached_and_stored_in_checkpoints(bert_folder, write_jsonl, tmp_path):  # noqa: F811
    path = write_jsonl(make_rows(["b", "a", "c"]))
    data = build(path, bert_folder)
    [cached] = (tmp_path / "cache").glob("labels-*.json")
    content = json.loads(cached.read_text())
    assert content == {"labels": ["a", "b", "c"], "problem_type": "single_label", "text_columns": ["text"],
                       "label_column": "label", "label_lists": None}
    cached.write_text(json.dumps({**content, "labels": ["c", "b", "a"]}))  # read, not computed again
    assert build(path, bert_folder).labels == ["c", "b", "a"]
    cached.write_text("{")
    assert build(path, bert_folder).labels == ["a", "b", "c"]
    data.train_batches()
    state = json.loads(json.dumps(data.state_dict()))
    del state["labels"]["label_lists"]  # as in checkpoints of earlier versions
    resumed = SequenceClassificationData(write_jsonl(make_rows(["x", "y"]), "other.jsonl"), tokenizer=bert_folder,
                                         test_source=path, max_length=64)
    resumed.resume_from({"SequenceClassificationData": state})
    assert resumed.network_fields == data.network_fields
    resumed.setup("test")
    assert {n: int(row["labels"]) for n, row in read_rows(resumed, "test").items()} == {0: 1, 1: 0, 2: 2}


# Weights and counts


def test_balanced_class_weights_follow_the_label_counts(bert_folder, write_jsonl):  # noqa: F811
    data = build(write_jsonl(make_rows(["a"] * 30 + ["b"] * 10)), bert_folder, labels=["a", "b", "never"])
    counts = data.codec.count_labels(data.rows("train"))
    assert counts == data.report["splits"]["train"]["labels"] == {"a": 30, "b": 10, "never": 0}
    assert data.class_weights("balanced").tolist() == pytest.approx([40 / (2 * 30), 40 / (2 * 10), 1])
    assert data.class_weights("balanced").dtype == np.float32
    assert data.class_weights({"b": 3}).tolist() == [1, 3, 1] and data.class_weights(None) is None
    with pytest.raises(UserError, match="'bb' is not a label.*did you mean"):
        data.class_weights({"bb": 1})
    assert "labels of train: a 30 (75.0%), b 10 (25.0%); none of never" in data.report_table()


def test_class_weights_count_only_training_rows(bert_folder, write_jsonl):  # noqa: F811
    several = build(write_jsonl(make_rows([["a", "b"], ["a"], [], ["b"]] * 5)), bert_folder)
    assert several.class_weights("balanced").tolist() == pytest.approx([20 / (2 * 10)] * 2)
    path = write_jsonl(make_rows(["a", "b"] * 20))
    data = build([{"path": path, "weight": 2.0}], bert_folder, val_size=10)
    counts = data.codec.count_labels(data.rows("train"))
    assert sum(counts.values()) == 60 and sum(data.codec.count_labels(data.rows("val")).values()) == 10
    assert counts["a"] + 2 * data.codec.count_labels(data.rows("val"))["a"] == 40


# Encoding


@pytest.mark.parametrize("max_length", [12, 40])
@pytest.mark.parametrize("is_pair", [False, True])
def test_rows_have_the_tokens_of_transformers(is_pair, max_length, any_folder, bert_folder, write_jsonl):  # noqa: F811
    pairs = [(f"{text} {n}", CORPUS[(n * 3) % 5] * (n % 3 + 1)) for n, text in enumerate(CORPUS)]
    names = ("premise", "hypothesis") if is_pair else ("sentence",)
    rows = [{**dict(zip(names, pair)), "label": n % 2} for n, pair in enumerate(pairs)]
    for folder in (any_folder, bert_folder):
        data = build(write_jsonl(rows), folder, max_length=max_length)
        tokenizer = data.tokenizer
        encoded = read_rows(data)
        tokens_cut = 0
        for n, pair in enumerate(pairs):
            expected = tokenizer(*pair[: len(names)], truncation="longest_first", max_length=max_length,
                                 return_token_type_ids=True)
            ids = encoded[n]["input_ids"][encoded[n]["attention_mask"].bool()].tolist()
            assert ids == expected.input_ids
            tokens_cut += len(tokenizer(*pair[: len(names)]).input_ids) - len(ids)
            if "token_type_ids" in encoded[n]:
                assert encoded[n]["token_type_ids"][: len(ids)].tolist() == expected.token_type_ids
        [source] = data.report["sources"].values()
        assert source["tokens_cut"] == tokens_cut
    assert "token_type_ids" in encoded[0]
    assert "token_type_ids" not in read_rows(build(write_jsonl(rows), any_folder))[0]


def test_names_of_special_tokens_stay_text(bert_folder, write_jsonl):  # noqa: F811
    data = build(write_jsonl([{"text": "the [SEP] fox [PAD]", "label": n} for n in range(2)]), bert_folder)
    ids = read_rows(data)[0]["input_ids"]
    assert (ids == 3).sum() == 1


def test_rows_that_end_in_the_padding_token_are_counted(byte_level_folder, write_jsonl):
    """A text token that also pads: transformers' models would use the token before it."""
    rows = [{"text": "the fo" + letter, "label": n % 2} for n, letter in enumerate("xnxn")]
    data = build(write_jsonl(rows, "b.jsonl"), byte_level_folder, pad_token="n")
    [source] = data.report["sources"].values()
    ends = [data.tokenizer(row["text"]).input_ids[-1] == data.tokenizer.pad_token_id for row in rows]
    assert source["ends_in_padding"] == sum(ends) > 0


def test_unusable_rows_are_counted_with_their_reason(bert_folder, write_jsonl):  # noqa: F811
    rows = [*make_rows(["a", "b"]), {"text": " ", "label": "a"}, {"text": "x", "label": None}, {"text": "x"},
            {"text": None, "label": "a"}, {"text": ["x"], "label": "a"}, {"text": "x", "label": {"a": 1}},
            {"label": "a"}, {"text": "x\ud800", "label": "a"}, {"text": "x", "label": ""}, {"text": 12, "label": "a"},
            {"text": "\u200b", "label": "b"}]
    path = write_jsonl([])
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    data = build(path, bert_folder)
    source = data.report["sources"][path]
    assert source["rows_read"] == len(rows) == source["rows_kept"] + source["rows_dropped"]
    reasons = {reason: entry["rows"] for reason, entry in source["dropped"].items()}
    assert reasons == {"empty text": 1, "the label is null": 1, "label is missing": 1, "text is null": 1,
                       "text is a list, not text": 1, "the label is a dict, not text": 1, "text is missing": 1,
                       "text with a lone surrogate (half of a character)": 1, "the label is empty": 1,
                       "the tokenizer finds no token": 1}
    assert sorted(read_rows(data)) == [0, 1, 11]


def test_a_pickled_encoder_gives_the_same_rows(bert_folder, write_jsonl):  # noqa: F811
    rows = make_rows(["a", "b"] * 20)
    path = write_jsonl(rows)
    one, two = (build(path, bert_folder, num_proc=n, cache_dir=f"{path}.{n}") for n in (1, 2))
    for n in range(40):
        assert (one.rows("train")[n]["input_ids"] == two.rows("train")[n]["input_ids"]).all()
    encoder, _ = one.codec.make_encoder(one.sources.training_readers()[0], Row("x", 1, rows[0]), False)
    unpickled = pickle.loads(pickle.dumps(encoder))
    texts = [{"text": "the [SEP] fox", "label": "a"}]
    assert unpickled(texts).columns["input_ids"].values.tolist() == encoder(texts).columns["input_ids"].values.tolist()


@pytest.mark.parametrize("problem_type,label", [
    ("single_label", "a"), ("multi_label", ["a", "b"]), ("regression", 1.5)])
@pytest.mark.parametrize("prompts_only", [False, True])
def test_a_wrong_value_gives_a_row_or_a_reason(problem_type, label, prompts_only, bert_folder):  # noqa: F811
    """Each wrong value in each column, directly to the encoder: JSON cannot contain some of them."""
    names = [] if problem_type == "regression" else ["a", "b"]
    tokenizer = make_truncating_tokenizer(load_tokenizer(TokenizerOptions(bert_folder)).tokenizer, 16, is_pair=True)
    encoder = SequenceEncoder(tokenizer, prompts_only, ["first", "second"], "label", problem_type, Labels(names, None))
    row = {"first": "the fox", "second": "jumps", "label": label}
    rows = [row, *({**row, column: value} for column in row for value in WRONG),
            *({name: value for name, value in row.items() if name != column} for column in row)]
    encoded = encoder(rows)
    assert encoded.positions[0] == 0
    positions = [*encoded.positions.tolist(), *(position for position, _ in encoded.dropped)]
    assert sorted(positions) == list(range(len(rows)))
    assert all(reason and len(reason) < 100 for _, reason in encoded.dropped)
    without = [position for position, values in enumerate(rows) if values.get("label") is None]
    assert set(without) <= set(encoded.positions if prompts_only else [position for position, _ in encoded.dropped])
    assert all(len(column.lengths if isinstance(column, Ragged) else column) == len(encoded.positions)
               for column in encoded.columns.values())


# Columns


@pytest.mark.parametrize("row,columns,label", [
    ({"idx": 1, "sentence1": "a", "sentence2": "b", "label": 1}, ["sentence1", "sentence2"], "label"),
    ({"hypothesis": "b", "premise": "a", "label": 1}, ["premise", "hypothesis"], "label"),
    ({"question": "b", "sentence": "a", "label": 1}, ["question", "sentence"], "label"),
    ({"author": "x", "text": "a", "labels": [1]}, ["text"], "labels"),
    ({"id": "7", "title": "a", "body": "b", "more": "c", "class": "x"}, ["title", "body"], "class"),
    ({"review": "a", "label_text": "good", "label": 1}, ["review"], "label"),
])
def test_usual_text_and_label_columns_are_recognised(row, columns, label, bert_folder, write_jsonl):  # noqa: F811
    other = {**row, label: [0] if isinstance(row[label], list) else "other"}
    data = build(write_jsonl([row, other] * 3), bert_folder)
    assert (data.text_columns, data.label_column) == (columns, label)
    assert SequenceClassificationData.recognise(Row("a.jsonl", 1, row))


@pytest.mark.parametrize("row", [
    {"text": "a"}, {"messages": [{"role": "user", "content": "x"}], "label": True},
    {"prompt": "a", "completion": "b", "label": True}, {"chosen": "a", "rejected": "b"},
    {"question": "a", "context": "b", "answers": {"text": [], "answer_start": []}},
    {"tokens": ["a"], "ner_tags": [0], "label": 1}, {"text": "a", "label": {"a": 1}},
    {"sent1": "a", "ending0": "b", "ending1": "c", "label": 1}, {"label": 1}])
def test_rows_of_other_tasks_are_not_recognised(row):
    assert SequenceClassificationData.recognise(Row("a.jsonl", 1, row)) is None


@pytest.mark.parametrize("row,fields,expected", [
    ({"text": "a", "x": 1}, {}, "jsonl:1: none of the usual columns .label, .*columns are text, x.*data.label_column"),
    ({"text": "a", "label": 1}, {"label_column": "lable"}, "no column 'lable'.*did you mean 'label'"),
    ({"text": "a", "label": 1}, {"text_columns": ["txt"]}, "no column 'txt'.*did you mean 'text'"),
    ({"n": 1, "label": 1}, {}, "no text column.*data.text_columns"),
    ({"text": "a", "label": "x"}, {}, "all rows have the label 'x'"),
    ({"text": "a", "label": None}, {},
     r"no row has a label in the column 'label', 3 read: the label is null \(3 rows, first .*rows.jsonl:1"),
    ({"text": "a", "label": 1}, {"max_length": 2, "labels": ["1", "2"]}, "adds 2 special tokens"),
    ({"text": "a", "label": 1}, {"streaming": True}, "List them in data.labels"),
    ({"text": "a", "label": 1}, {"packing": True}, "data.packing"),
    ({"text": "a", "label": 1}, {"labels": ["a"], "problem_type": "regression"}, "data.labels"),
    ({"text": "a", "label": 1}, {"text_columns": ["a", "b", "c"]}, "one or two columns"),
])
def test_wrong_settings_are_rejected_with_a_remedy(row, fields, expected, bert_folder, write_jsonl):  # noqa: F811
    with pytest.raises(UserError, match=expected):
        build(write_jsonl([row] * 3), bert_folder, **fields)


def test_more_than_10000_labels_are_rejected(bert_folder, write_jsonl):  # noqa: F811
    with pytest.raises(UserError, match="more than 10,000 different values"):
        build(write_jsonl([{"text": "a", "label": f"x{n}"} for n in range(10_002)]), bert_folder)


def test_a_stream_trains_with_named_labels(bert_folder, write_jsonl):  # noqa: F811
    data = build(write_jsonl(make_rows(["a", "b"] * 20)), bert_folder, streaming=True, labels=["b", "a"])
    data.trainer = None
    batch = next(iter(data.train_batches()))
    assert set(batch["labels"].tolist()) <= {0, 1} and data.problem_type == "single_label"
    assert data.codec.count_labels(data.rows("train")) == {"b": 20, "a": 20}
    with pytest.raises(UserError, match="stream"):
        data.class_weights("balanced")


# Outputs


def test_logits_become_a_label_and_probabilities(bert_folder, write_jsonl):  # noqa: F811
    rows = make_rows(["a", "b", "c", "b", "a"])
    data = build(write_jsonl(rows), bert_folder, "test", test_source=write_jsonl(rows, "test.jsonl"))
    logits = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    result = data.answer("test", dict(enumerate(logits)))
    for row, source, logit in zip(result.rows, rows, logits, strict=True):
        assert row["text"] == source["text"] and row["prediction"] == "abc"[logit.argmax()]
        assert row["probabilities"] == pytest.approx(
            dict(zip("abc", torch.from_numpy(logit).double().softmax(0).tolist(), strict=True)))
    right = sum(row["prediction"] == row["label"] for row in result.rows)
    assert result.scores["accuracy"] == right / 5 and result.scores["f1_macro"] <= 1
    assert np.trace(np.array(result.files["classes.json"]["confusion"])) == right
    json.dumps(result)
    assert data.answer("test", {}) == ([], {}, {}, ())


def test_logits_become_several_labels_or_a_number(bert_folder, write_jsonl):  # noqa: F811
    data = build(write_jsonl(make_rows([["a"], ["a", "b"], []])), bert_folder)
    result = data.answer("train", {n: np.array(row, np.float32) for n, row in enumerate([[1, -1], [2, 2], [-1, 1]])})
    assert [row["prediction"] for row in result.rows] == [["a"], ["a", "b"], ["b"]]
    assert result.scores["exact_match"] == pytest.approx(2 / 3)
    assert result.files["classes.json"]["classes"]["b"]["support"] == 1
    data = build(write_jsonl(make_rows([0.5, 1.5, 2.5])), bert_folder)
    result = data.answer("train", {n: np.array([n], np.float32) for n in range(3)})
    assert result.scores["mse"] == pytest.approx(0.25) and result.scores["pearson"] == pytest.approx(1)
    assert [row["prediction"] for row in result.rows] == [0, 1, 2] and result.files == {}


def test_predict_has_scores_only_for_labelled_rows(bert_folder, write_jsonl):  # noqa: F811
    path = write_jsonl(make_rows(["a", "b"]))
    for rows, num_scores in (([{"text": "the fox"}, {"text": "x", "label": "zzz"}], 0), (make_rows(["b", "a"]), 8)):
        data = build(path, bert_folder, "predict", predict_source=write_jsonl(rows, "ask.jsonl"))
        [batch] = data.predict_dataloader()
        assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "index"}
        result = data.predictions({int(n): np.array([1, 0], np.float32) for n in batch["index"] if n >= 0})
        assert [row["prediction"] for row in result.rows] == ["a", "a"] and len(result.scores) == num_scores
        assert data.example(1)["text"] == rows[1]["text"]
        assert all(map(math.isfinite, result.scores.values()))


def test_predict_reports_why_it_has_no_scores(bert_folder, write_jsonl, capsys):  # noqa: F811
    for label, other in (("a", "b"), ([1, 0], [0, 1]), (0.5, 1.5)):
        ask = write_jsonl(make_rows([label, None]), "ask.jsonl")
        data = build(write_jsonl(make_rows([label, other])), bert_folder, "predict", predict_source=ask)
        assert data.answer("predict", {n: np.array([1, 0], np.float32) for n in range(2)}).scores == {}
        assert "warning: predict has no scores: 1 of 2 rows have no right answer" in capsys.readouterr().out


def test_inspected_rows_show_label_and_location(bert_folder, write_jsonl):  # noqa: F811
    path = write_jsonl([{"text": "", "label": "a"}, *make_rows(["a", "b", "a"])])
    inspected = build(path, bert_folder).rows_for_inspection(2, [0, 2])
    assert [(row["location"], row["index"], row["scored"]) for row in inspected] == [
        (f"{path}:2", 1, "label a"), (f"{path}:4", 3, "label a")]
    assert not any("labels" in row for row in inspected)  # token labels would be shown as a loss mask


@pytest.mark.parametrize(("labels", "scored"), [
    ([["a", "c"], [], ["b"]], ["label a, c", "label (none)", "label b"]),
    ([1.5, 2, -3], ["label 1.5", "label 2", "label -3"])])
def test_inspected_rows_show_several_labels_and_numbers(bert_folder, write_jsonl, labels, scored):  # noqa: F811
    inspected = build(write_jsonl(make_rows(labels)), bert_folder).rows_for_inspection(3)
    assert [row["scored"] for row in inspected] == scored
