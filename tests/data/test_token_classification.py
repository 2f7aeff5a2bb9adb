"""TokenClassificationData: tags on tokens by transformers' word ids, CoNLL files, and tags from logits."""

import gzip
import json

import numpy as np
import pytest
import torch
from seqeval import metrics as seqeval
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.encode.labels import Labels, TokenEncoder
from lmmods.data.encode.tokenizer import TokenizerOptions, load_tokenizer
from lmmods.data.labels import make_truncating_tokenizer
from lmmods.data.read.readers import LONGEST, TOO_LONG, Row, read_file
from lmmods.data.token_classification import TokenClassificationData
from lmmods.runs.inspect import show_data
from tests.data.conftest import CORPUS
from tests.data.test_damaged_rows import WRONG
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture
from tests.data.test_sequence_classification import read_rows

WORDS = [["EU", "rejects", "German", "call", "to", "boycott", "British", "lamb", "."], ["Peter", "Blackburn"],
         ["BRUSSELS", "1996-08-22"], ["Größe", "can't", "東京", "U.S.", "[SEP]", "again"]]
TAGS = [["B-ORG", "O", "B-MISC", "O", "O", "O", "B-MISC", "O", "O"], ["B-PER", "I-PER"], ["B-LOC", "O"],
        ["O", "O", "B-LOC", "I-LOC", "O", "O"]]
NAMES = ["B-LOC", "B-MISC", "B-ORG", "B-PER", "I-LOC", "I-PER", "O"]


def make_rows(words=WORDS, tags=TAGS, names=("tokens", "ner_tags")):
    return [dict(zip(names, pair)) for pair in zip(words, tags, strict=True)]


def build(path, folder, stage="fit", **fields):
    data = TokenClassificationData(path, **{"tokenizer": folder, "max_length": 128, "batch_size": 2, **fields})
    data.connect(pretrained=folder, max_positions=512)
    data.setup(stage)
    return data


@pytest.fixture(scope="session")
def split_folder(tmp_path_factory):
    """Tokenizer like Llama 3's: a pattern splits the text, then bytes."""
    tokenizer = Tokenizer(models.BPE())
    pattern = Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    folder = tmp_path_factory.mktemp("split")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return str(folder)


def run_ner(tokenizer, words, tags, names, label_all_tokens, **options):
    """Return ids and labels as transformers' run_ner makes them."""
    encoded = tokenizer(words, is_split_into_words=True, **options)
    labels, before = [], None
    for word in encoded.word_ids():
        if word is None:
            labels.append(IGNORED)
        elif word != before:
            labels.append(names.index(tags[word]))
        else:
            inner = tags[word].replace("B-", "I-") if tags[word].startswith("B-") else tags[word]
            inner = inner if inner in names else tags[word]
            labels.append(names.index(inner) if label_all_tokens else IGNORED)
        before = word
    return encoded.input_ids, labels


@pytest.mark.parametrize("label_all_tokens", [False, True])
@pytest.mark.parametrize("max_length", [10, 128])
@pytest.mark.parametrize("tokenizer_name", ["bert", "byte_level", "spm"])
def test_rows_have_the_tokens_and_labels_of_run_ner(tokenizer_name, max_length, label_all_tokens, request, write_jsonl):
    folder = request.getfixturevalue(f"{tokenizer_name}_folder")
    path = write_jsonl(make_rows())
    data = build(path, folder, max_length=max_length, label_all_tokens=label_all_tokens)
    assert data.labels == NAMES
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer_name == "byte_level":  # transformers needs this, but sets it only in its own classes
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    options = {"split_special_tokens": True}
    tokens_cut = 0
    for n, row in sorted(read_rows(data).items()):
        inside = row["attention_mask"].bool()
        ids, labels = run_ner(tokenizer, WORDS[n], TAGS[n], NAMES, label_all_tokens, truncation=True,
                              max_length=max_length, **options)
        assert row["input_ids"][inside].tolist() == ids and row["labels"][inside].tolist() == labels
        assert (row["labels"][~inside] == IGNORED).all() and row["labels"].dtype == torch.int64
        full = tokenizer(WORDS[n], is_split_into_words=True, **options).input_ids
        tokens_cut += len(full) - len(ids)
    source = data.report["sources"][path]
    assert source["tokens_cut"] == tokens_cut and source["words"] == sum(map(len, WORDS))
    assert (source["words_cut"] > 0) == (max_length == 10)


def test_a_tokenizer_that_splits_by_a_pattern_keeps_words_whole(split_folder, write_jsonl):
    """Each word has the same tokens as within a text, without an extra space."""
    data = build(write_jsonl(make_rows()), split_folder)
    for n, row in read_rows(data).items():
        ids = row["input_ids"][row["attention_mask"].bool()].tolist()
        assert ids == data.tokenizer(" " + " ".join(WORDS[n]), add_special_tokens=False).input_ids


@pytest.mark.parametrize("num_words", [3, 9])
def test_words_without_a_token_are_counted_and_never_right(num_words, bert_folder, write_jsonl):  # noqa: F811
    words = ["the", "\u200b", "", "fox", "\u00ad", "dog", " ", "x", "y"][:num_words]
    tags = (["A", "B"] * 5)[:num_words]
    path = write_jsonl(make_rows([words, ["\u200b"]], [tags, ["A"]]))
    data = build(path, bert_folder)
    source = data.report["sources"][path]
    expected = sum(not data.tokenizer.tokenize(word) for word in words)
    assert source["words_without_token"] == expected and source["dropped"]["the tokenizer finds no token"]["rows"] == 1
    item = data.rows("train")[0]
    logits = np.eye(2, dtype=np.float32)[np.maximum(item["labels"], 0)]
    result = data.answer("train", {0: logits})
    assert result.rows[0]["prediction"] == [tag if data.tokenizer.tokenize(word) else None
                                            for word, tag in zip(words, tags, strict=True)]
    assert result.scores["accuracy"] == (num_words - expected) / num_words
    assert result.scores["words_not_seen"] == expected


def test_unusable_rows_are_counted_with_their_reason(bert_folder, write_jsonl):  # noqa: F811
    rows = [*make_rows(), {"tokens": ["a"], "ner_tags": []}, {"tokens": [], "ner_tags": []}, {"tokens": ["a"]},
            {"ner_tags": ["O"]}, {"tokens": "a b", "ner_tags": ["O", "O"]}, {"tokens": ["a"], "ner_tags": None},
            {"tokens": [["a"]], "ner_tags": ["O"]}, {"tokens": [None], "ner_tags": ["O"]},
            {"tokens": ["a"], "ner_tags": [{"x": 1}]}, {"tokens": '["a"]', "ner_tags": '["O"]'},
            {"tokens": [12, True], "ner_tags": ["O", "O"]}, {"tokens": ["a"], "ner_tags": [""]}]
    path = write_jsonl(rows)
    source = build(path, bert_folder).report["sources"][path]
    assert source["rows_read"] == len(rows) == source["rows_kept"] + source["rows_dropped"]
    assert {reason: entry["rows"] for reason, entry in source["dropped"].items()} == {
        "the numbers of words and tags differ": 1, "empty tokens": 1, "ner_tags is missing": 1,
        "tokens is missing": 1, "tokens is text, but not JSON": 1, "ner_tags is not a list": 1,
        "a word is a list, not text": 1, "a word is null": 1, "the label is a dict, not text": 1,
        "the label is empty": 1}
    assert source["rows_kept"] == 6


@pytest.mark.parametrize("prompts_only", [False, True])
def test_a_wrong_value_gives_a_row_or_a_reason(prompts_only, bert_folder):  # noqa: F811
    tokenizer = make_truncating_tokenizer(load_tokenizer(TokenizerOptions(bert_folder)).tokenizer, 16)
    encoder = TokenEncoder(tokenizer, prompts_only, "tokens", "tags", Labels(["A", "B-C", "I-C"], None), True, "")
    row = {"tokens": ["the", "fox"], "tags": ["A", "B-C"]}
    rows = [row, *({**row, column: value} for column in row for value in WRONG),
            *({**row, column: [row[column][0], value]} for column in row for value in WRONG), {"tokens": ["a"]}]
    encoded = encoder(rows)
    assert encoded.positions[0] == 0
    positions = [*encoded.positions.tolist(), *(position for position, _ in encoded.dropped)]
    assert sorted(positions) == list(range(len(rows)))
    assert all(reason and len(reason) < 100 for _, reason in encoded.dropped)
    assert (len(rows) - 1 in encoded.positions) is prompts_only


def test_numeric_tags_can_be_named_by_data_labels(bert_folder, write_jsonl):  # noqa: F811
    rows = make_rows(WORDS[:2], [[2, 0, 10, 0, 0, 0, 10, 0, 0], [1, 2]])
    assert build(write_jsonl(rows), bert_folder).labels == ["0", "1", "2", "10"]
    path = write_jsonl(rows, "b.jsonl")
    data = build(path, bert_folder, labels=["O", "B-PER", "I-PER"])
    assert data.report["sources"][path]["dropped"]["a label that is not in data.labels"]["rows"] == 1
    assert data.codec.count_labels(data.rows("train")) == {"O": 0, "B-PER": 1, "I-PER": 1}


def test_class_weights_and_the_model_config_follow_the_tags(bert_folder, write_jsonl):  # noqa: F811
    data = build(write_jsonl(make_rows()), bert_folder)
    flat = [tag for tags in TAGS for tag in tags]
    counts = data.codec.count_labels(data.rows("train"))
    assert counts == data.report["splits"]["train"]["labels"] == {n: flat.count(n) for n in NAMES}
    assert data.class_weights("balanced").tolist() == pytest.approx([len(flat) / (7 * flat.count(n)) for n in NAMES])
    config = AutoConfig.for_model("bert", **data.network_fields)
    assert [config.id2label[n] for n in range(config.num_labels)] == NAMES and config.problem_type is None


# CoNLL

CONLL = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

-DOCSTART- -X- -X- O
Peter NNP B-NP B-PER
Blackburn NNP I-NP I-PER\t
 \t
a\u00a0b XX I-NP O
# XX I-NP O"""


def test_conll_files_are_read_as_sentences(tmp_path):
    for name, text in (("a.conll", CONLL), ("b.bio", CONLL.replace(" ", "\t").replace("\t\t", "\t")),
                       ("c.iob", CONLL.replace("\n", "\r\n"))):
        path = str(tmp_path / name)
        (tmp_path / name).write_bytes(text.encode())
        rows = list(read_file(path))
        assert [(row.line, row.values or row.problem) for row in rows] == [
            (1, "a -DOCSTART- line, which is not a sentence"),
            (3, {"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]}),
            (6, "a -DOCSTART- line, which is not a sentence"),
            (7, {"tokens": ["Peter", "Blackburn"], "tags": ["B-PER", "I-PER"]}),
            (10, {"tokens": ["a\u00a0b", "#"], "tags": ["O", "O"]})]
    (tmp_path / "d.txt").write_text(CONLL)
    (tmp_path / "d.conll.gz").write_bytes(gzip.compress(CONLL.encode()))
    assert [row[1:] for row in read_file(str(tmp_path / "d.txt"), "conll")] == [row[1:] for row in rows]
    assert [row[1:] for row in read_file(str(tmp_path / "d.conll.gz"))] == [row[1:] for row in rows]


@pytest.mark.parametrize("text,expected", [
    ("", []), ("\n\n", []), ("a O\nb\n\nc O", ["lines of a sentence differ in their number of columns", ["c"]]),
    ("New York\tB-LOC\nis\tO\n", [["New York", "is"]]), ("a\nb\n", [["a", "b"]]), ("a  O \n", [["a"]])])
def test_blank_lines_and_columns_split_conll_sentences(text, expected, tmp_path):
    (tmp_path / "a.conll").write_text(text)
    assert [row.problem or row.values["tokens"] for row in read_file(str(tmp_path / "a.conll"))] == expected


COMMENTS = """#\thttp://example.org/0 [2009-10-17]
1\tDofun\tB-PER\tO
2\tlives\tO\tO

#\thttp://example.org/1 [2009-10-17]
1\tOlek\tB-PER\tO
2\tlives\tO\tO

1\tOlek\tO
2\tlives
"""


@pytest.mark.parametrize("text,expected", [
    (COMMENTS, r"no usable row among 3 read: a comment line \(#\), which is read as a word: remove such lines "
     r"\(2 rows, first .*a.conll:1\); lines of a sentence differ in their number of columns \(1 rows, first .*:9\)"),
    ("1\tDofun\tB-PER\tO\n2\tlives\tO\tO\n\n1\tOlek\tB-PER\tO\n", "1, 2, 3 and so on in every row.*tokens_column"),
    ("B-PER\tDofun\nO\tlives\n\nO\tin\nB-LOC\tGelumaz\n", r"look swapped: 'tokens' has 3 different words "
     r"\(B-LOC, B-PER, O\), 'tags' has 4 different tags \(Dofun, Gelumaz, in \.\.\.\)\. Set data.tokens_column"),
    ("\n\n".join(f"NN\tword{n}\nVB\tis{n}" for n in range(20)), "look swapped: 'tokens' has 2 .* 'tags' has 40 ")])
def test_a_conll_file_with_other_columns_is_rejected(text, expected, bert_folder, tmp_path):  # noqa: F811
    (tmp_path / "a.conll").write_text(text)
    with pytest.raises(UserError, match=expected):
        build(str(tmp_path / "a.conll"), bert_folder)


def test_a_file_with_the_tag_first_trains_with_named_columns(bert_folder, tmp_path):  # noqa: F811
    (tmp_path / "a.bio").write_text("B-PER\tDofun\nO\tlives\n\nO\tin\nB-LOC\tGelumaz\n")
    data = build(str(tmp_path / "a.bio"), bert_folder, tokens_column="tags", tags_column="tokens")
    assert data.labels == ["B-LOC", "B-PER", "O"] and data.rows_for_inspection(1)[0]["scored"] == "Dofun/B-PER lives/O"


def test_a_too_long_conll_sentence_is_skipped(tmp_path):
    path = tmp_path / "a.conll"
    with open(path, "w") as file:
        file.write("a O\n\n" + "b O\n" + "x" * (LONGEST + 1) + " O\n" + "c O\n\n" + "d O\n")
    assert [(row.line, row.values.get("tokens", row.problem)) for row in read_file(str(path))] == [
        (1, ["a"]), (3, TOO_LONG), (7, ["d"])]


def test_conll_files_train_validate_and_predict(bert_folder, tmp_path):  # noqa: F811
    for name in ("train.txt", "val.conll", "ask.txt"):
        (tmp_path / name).write_text("EU\nrejects\n\nPeter\n" if name == "ask.txt" else CONLL)
    data = build(str(tmp_path / "train.txt"), bert_folder, None, val_source=str(tmp_path / "val.conll"),
                 predict_source=str(tmp_path / "ask.txt"))
    assert data.labels == ["B-ORG", "B-PER", "I-PER", "O"] and len(read_rows(data, "val")) == 3
    assert data.report["sources"][str(tmp_path / "train.txt")]["rows_dropped"] == 2
    [batch] = data.predict_dataloader()
    assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "index"}
    result = data.predictions({n: np.eye(4, dtype=np.float32)[np.zeros(int(mask.sum()), int)]
                               for n, mask in zip(batch["index"].tolist(), batch["attention_mask"])})
    assert [row["prediction"] for row in result.rows] == [["B-ORG", "B-ORG"], ["B-ORG"]] and result.scores == {}
    assert result.rows[0]["entities"] == [{"type": "ORG", "start": 0, "end": 1, "text": "EU"},
                                          {"type": "ORG", "start": 1, "end": 2, "text": "rejects"}]


@pytest.mark.parametrize("label_all_tokens", [False, True])
def test_inspected_rows_show_words_with_tags(label_all_tokens, bert_folder, write_jsonl, capsys):  # noqa: F811
    data = build(write_jsonl(make_rows()), bert_folder, label_all_tokens=label_all_tokens)
    inspected = data.rows_for_inspection(len(WORDS))
    assert [row["scored"] for row in inspected] == [
        " ".join(f"{word}/{tag}" for word, tag in zip(*row, strict=True)) for row in zip(WORDS, TAGS, strict=True)]
    show_data(data, 1, "first")
    output = capsys.readouterr().out
    assert f"targets: {inspected[0]['scored']}\n" in output and "target tokens are [[marked]]" in output


# Outputs


@pytest.mark.parametrize("label_all_tokens", [False, True])
def test_logits_become_tags_and_entities(label_all_tokens, bert_folder, write_jsonl):  # noqa: F811
    data = build(write_jsonl(make_rows()), bert_folder, label_all_tokens=label_all_tokens)
    outputs = {}
    for n in range(len(WORDS)):
        item = data.items("train")[n]
        outputs[n] = np.eye(7, dtype=np.float32)[np.maximum(item["labels"], 0)]
    result = data.answer("train", outputs)
    assert [row["prediction"] for row in result.rows] == TAGS
    assert result.scores == {"accuracy": 1, "precision": 1, "recall": 1, "f1": 1}
    assert result.rows[3]["entities"] == [{"type": "LOC", "start": 2, "end": 4, "text": "東京 U.S."}]
    assert result.files["classes.json"]["entities"]["MISC"]["support"] == 2
    outputs[1] = -outputs[1]  # a wrong tag is now the largest
    scores = data.answer("train", outputs).scores
    assert scores["accuracy"] == pytest.approx(17 / 19) and scores["recall"] == pytest.approx(5 / 6)
    json.dumps(result)


def make_right_logits(data, role):
    """Return logits that predict the right tag for each word that the model sees."""
    rows = data.rows(role)
    return {n: np.eye(len(data.labels), dtype=np.float32)[np.maximum(rows[n]["labels"], 0)] for n in range(len(rows))}


@pytest.mark.parametrize("role", ["val", "test", "predict"])
def test_truncated_words_count_as_missed_entities(role, bert_folder, write_jsonl):  # noqa: F811
    """Truncated words are predicted as O, and no score rises when rows are truncated."""
    words = [["Peter", "Blackburn", "saw", "New", "York", "City", "."], ["EU", "again"]]
    tags = [["B-PER", "I-PER", "O", "B-LOC", "I-LOC", "I-LOC", "O"], ["B-ORG", "O"]]
    path, other = write_jsonl(make_rows(words, tags)), write_jsonl(make_rows(words, tags), "other.jsonl")
    stage, by_length = {"val": "validate"}.get(role, role), []
    for max_length in (4, 8, 16, 24, 32, 128):
        data = build(path, bert_folder, stage, max_length=max_length, **{f"{role}_source": other})
        result = data.answer(role, make_right_logits(data, role))
        predicted = [row["prediction"] for row in result.rows]
        unseen = [len(row) - len(set(data.rows(role)[n]["words"].tolist()) - {-1}) for n, row in enumerate(tags)]
        assert [row[len(row) - count:] for row, count in zip(predicted, unseen, strict=True)] == [
            ["O"] * count for count in unseen]
        assert result.scores.pop("words_not_seen", 0) == sum(unseen)
        assert result.scores == pytest.approx({"accuracy": seqeval.accuracy_score(tags, predicted), **{
            name: getattr(seqeval, f"{name}_score")(tags, predicted, zero_division=0)
            for name in ("precision", "recall", "f1")}})
        entities = result.files["classes.json"]["entities"]
        assert sum(entity["support"] for entity in entities.values()) == 3
        by_length.append([result.scores[name] for name in ("accuracy", "recall", "f1")])
    assert by_length == sorted(by_length) and by_length[-1] == [1, 1, 1] and by_length[0][2] < 1
    assert any(0 < f1 < 1 for *_, f1 in by_length)


def test_truncated_entities_are_missed_without_an_o_label(bert_folder, write_jsonl):  # noqa: F811
    """O is then not one of the labels, but truncated words still count as missed."""
    rows = make_rows([["Peter", "Blackburn", "Brussels"], ["EU"]], [["B-PER", "I-PER", "B-LOC"], ["B-LOC"]])
    data = build(write_jsonl(rows), bert_folder, max_length=4)
    result = data.answer("train", make_right_logits(data, "train"))
    assert "O" not in data.labels and result.rows[0]["prediction"][-1] == "O"
    expected = [row["ner_tags"] for row in rows]
    assert result.scores["recall"] == pytest.approx(seqeval.recall_score(
        expected, [row["prediction"] for row in result.rows], zero_division=0))
    assert sum(entry["support"] for entry in result.files["classes.json"]["classes"].values()) == 4


def test_evaluation_reports_dropped_and_truncated_rows(bert_folder, write_jsonl, capsys):  # noqa: F811
    path = write_jsonl(make_rows())
    val = write_jsonl([*make_rows(), {"tokens": [], "ner_tags": []}, {"tokens": ["a"]}, {"tokens": ["b"]}], "val.jsonl")
    data = build(path, bert_folder, "validate", val_source=val, max_length=10)
    output = capsys.readouterr().out
    assert (f"warning: Validation excludes rows of {val}, 7 read: ner_tags is missing (2 rows, first {val}:6); empty "
            f"tokens (1 rows, first {val}:5)." in output)
    source = data.report["sources"][val]
    assert (f"warning: Validation does not cover all of {val}: {source['rows_cut']} of 4 rows are longer than the "
            f"limits and lose {source['tokens_cut']} tokens in total." in output) and source["rows_cut"]
    build(path, bert_folder, "fit", val_source=val, max_length=10)  # has the data report
    assert "does not cover" not in capsys.readouterr().out
    build(path, bert_folder, "predict", test_source=val, max_length=10)
    output = capsys.readouterr().out
    assert output.count("does not cover") == 1 and "Predict does not cover" in output


def test_predict_reports_why_it_has_no_scores(bert_folder, write_jsonl, capsys):  # noqa: F811
    ask = write_jsonl([*make_rows(), {"tokens": ["a"], "ner_tags": ["B-GOD"]}], "ask.jsonl")
    data = build(write_jsonl(make_rows()), bert_folder, "predict", predict_source=ask)
    result = data.answer("predict", make_right_logits(data, "predict"))
    assert result.scores == {} and len(result.rows) == 5
    assert "warning: predict has no scores: 1 of 5 rows have no right answer, or one that training did not have" in (
        capsys.readouterr().out)


def test_parts_of_speech_have_no_entities(bert_folder, write_jsonl):  # noqa: F811
    rows = make_rows([["the", "fox"], ["it", "jumps"]], [["DT", "NN"], ["PRP", "VBZ"]], ("words", "pos_tags"))
    data = build(write_jsonl(rows), bert_folder)
    assert (data.tokens_column, data.tags_column) == ("words", "pos_tags")
    outputs = {n: np.zeros((len(data.rows("train")[n]["input_ids"]), 4), np.float32) for n in range(2)}
    result = data.answer("train", outputs)
    assert set(result.scores) == {"accuracy", "f1_macro"} and result.scores["accuracy"] == 0.25
    assert set(result.rows[0]) == {"words", "pos_tags", "prediction"}


@pytest.mark.parametrize("row,is_recognised", [
    ({"tokens": ["a"], "ner_tags": [1]}, True), ({"words": ["a"], "labels": ["O"], "id": 1}, True),
    ({"tokens": ["a"], "tags": ["O", "O"]}, False), ({"text": "a", "labels": [1]}, False), ({"tokens": ["a"]}, False)])
def test_rows_with_words_and_tags_are_recognised(row, is_recognised):
    assert bool(TokenClassificationData.recognise(Row("a.jsonl", 1, row))) is is_recognised


@pytest.mark.parametrize("row,fields,expected", [
    ({"tokens": ["a"]}, {}, "none of the usual columns .ner_tags, .*data.tags_column"),
    ({"text": "a", "tags": ["O"]}, {}, "none of the usual columns .tokens, words.*data.tokens_column"),
    ({"tokens": ["a"], "tags": ["O"]}, {"tags_column": "tag"}, "no column 'tag'.*did you mean 'tags'"),
    ({"tokens": ["a"], "tags": ["O"]}, {}, "all words have the tag 'O'"),
    ({"tokens": ["a"], "tags": None}, {},
     r"no row has a label in the column 'tags', 3 read: tags is not a list \(3 rows, first .*rows.jsonl:1"),
    ({"tokens": ["a"], "tags": ["O"]}, {"streaming": True}, "List them in data.labels")])
def test_wrong_columns_are_rejected_with_a_remedy(row, fields, expected, bert_folder, write_jsonl):  # noqa: F811
    with pytest.raises(UserError, match=expected):
        build(write_jsonl([row] * 3), bert_folder, **fields)
