"""Decontamination: training rows that contain part of an evaluation row, compared with a plain n-gram search."""

import itertools
import random
import re
import types

import pytest

from lmmods.core.errors import UserError
from lmmods.data.clm import CLMData
from lmmods.data.encode.overlap import EvaluationNgrams
from lmmods.data.read.readers import Row
from lmmods.data.sft import SFTData
from tests.data.test_duplicates import WORDS


def list_ngrams(texts, size):
    split_texts = [re.findall(r"\w+", text.lower()) for text in texts]
    return {tuple(words[start : start + size]) for words in split_texts for start in range(len(words) - size + 1)}


@pytest.mark.parametrize("size", [1, 4, 13])
def test_matches_equal_a_search_for_word_ngrams(size):
    rng = random.Random(size)
    vocabulary = WORDS if size > 1 else [f"w{n}" for n in range(20000)]
    evaluated = {name: [[" ".join(rng.choices(vocabulary, k=rng.randrange(1, 40))) for _ in range(2)]
                        for _ in range(30)] for name in ("one", "two")}
    ngrams = EvaluationNgrams([(name, [Row("x", 1, {"a": row[0], "b": [{"c": row[1]}], "n": 3}) for row in rows])
                               for name, rows in evaluated.items()], size)
    expected = {name: set().union(*(list_ngrams(row, size) for row in rows)) for name, rows in evaluated.items()}
    outcomes = []
    for _ in range(300):
        words = rng.choices(vocabulary, k=30)
        if rng.random() < 0.5:
            copied = rng.choice(rng.choice(evaluated[rng.choice(["one", "two"])])).split()
            start = rng.randrange(len(copied))
            words[10:10] = copied[start : start + size + rng.randrange(-2, 3)]
        texts = [" ".join(words[:26]).upper() + ".", ", ".join(words[26:])]
        ngrams_of_row = list_ngrams(texts, size)
        outcomes.append(ngrams.source_of(texts))
        assert (outcomes[-1] is not None) == any(ngrams_of_row & ngrams_of_set for ngrams_of_set in expected.values())
        assert outcomes[-1] is None or ngrams_of_row & expected[outcomes[-1]]
    assert {None, "one", "two"} == set(outcomes)
    short = [sum(not list_ngrams(row, size) for row in rows) for rows in evaluated.values()]
    assert ngrams.notes == [f"looked for {size} consecutive words of {30 - count} rows of {name}"
                            + (f"; {count} more have only shorter texts" if count else "")
                            for name, count in zip(evaluated, short, strict=True)]


def test_a_large_evaluation_set_is_matched_in_full():
    rows = [Row("x", n, {"a": f"row {n} of many"}) for n in range(2500)]
    ngrams = EvaluationNgrams([("many", rows)], 4)
    assert all(ngrams.source_of([row.values["a"]]) == "many" for row in rows)
    assert ngrams.source_of(["row 2500 of many"]) is None and EvaluationNgrams([], 4).source_of(["a b c d e"]) is None


# Runs -----------------------------------------------------------------------------------------------------------------

TIDE = "Why does the tide follow the moon and why are there two of them on most days of a month"


@pytest.fixture
def rows():
    """Ten rows; the third and the last contain the question of the evaluation set."""
    rows = [{"instruction": f"Say {n}. " + "And tell me how you came to this number. " * (n % 3), "output": str(n)}
            for n in range(10)]
    rows[2]["instruction"] = f"Here is a question: {TIDE.lower().replace(' ', chr(10))}?"
    rows[9]["output"] = f"It was asked: '{TIDE}'."
    return rows


def build(source, folder, evaluation, data_class=SFTData, **fields):
    data = data_class(source, tokenizer=folder, **{"max_length": 512, "decontaminate": evaluation, **fields})
    data.trainer = types.SimpleNamespace(max_steps=9, state=None, data_rank=0, num_data_ranks=1, batches_per_step=1)
    data.prepare_data()
    data.setup("fit")
    return data


EVALUATED = [{"question": TIDE + "?", "choices": {"text": ["gravity", "wind"]}}, {"question": "Too short?"},
             {"question": "And tell me how you came to this number. And tell"}]


def test_contaminated_rows_are_dropped_and_counted(spm_folder, write_jsonl, rows, tmp_path):
    path, evaluation = write_jsonl(rows, "train.jsonl"), write_jsonl(EVALUATED, "evaluation.jsonl")
    data = build(path, spm_folder, evaluation)
    report = data.report["sources"][path]
    assert report["dropped"] == {f"13 consecutive words are also in {evaluation}": {
        "rows": 2, "first": [f"{path}:3", f"{path}:10"]}}
    assert report["rows_kept"] == 8 == len(data.rows("train"))
    assert f"looked for 13 consecutive words of 1 rows of {evaluation}; 2 more have only shorter texts" in \
        data.report_table()
    # Also validation rows split off from them; the rows of another source are not checked.
    data = build(path, spm_folder, evaluation, val_size=4)
    assert len(data.rows("train")) + len(data.rows("val")) == 8
    assert len(build(path, spm_folder, evaluation, val_source=path).rows("val")) == 10
    # Shorter n-grams also match the last evaluation row.
    assert len(build(path, spm_folder, evaluation, decontaminate_ngram=10).rows("train")) == 6
    assert len({folder.name for folder in (tmp_path / "cache").iterdir()}) == 3


def test_the_evaluation_set_is_part_of_the_rows_identity(spm_folder, write_jsonl, rows, tmp_path):
    path, evaluation = write_jsonl(rows, "train.jsonl"), write_jsonl(EVALUATED, "evaluation.jsonl")
    first = build(path, spm_folder, evaluation)
    other = build(path, spm_folder, write_jsonl(EVALUATED[1:], "evaluation.jsonl"))
    assert len(other.rows("train")) == 10
    assert first.identity()["decontaminate"] != other.identity()["decontaminate"]
    assert list(first.sources.describe()["decontaminate"][0]["files"]) == [evaluation]
    assert "decontaminate" not in SFTData(path, tokenizer=spm_folder).identity()


def test_evaluation_sets_have_separate_columns_and_limits(spm_folder, write_jsonl, rows):
    rows = [{("ask" if name == "instruction" else name): text for name, text in row.items()} for row in rows]
    sets = [write_jsonl([{"text": "a"}], "one.jsonl"),
            {"path": write_jsonl(EVALUATED, "two.jsonl"), "columns": {"question": "stem"}, "limit": 1}]
    data = build(write_jsonl(rows, "train.jsonl"), spm_folder, sets, columns={"ask": "instruction"})
    assert list(data.report["sources"].values())[0]["dropped"].keys() == {
        f"13 consecutive words are also in {sets[1]['path']}"}


def test_a_stream_drops_the_same_rows(spm_folder, write_jsonl, rows):
    path, evaluation = write_jsonl(rows, "train.jsonl"), write_jsonl(EVALUATED, "evaluation.jsonl")
    expected = build(path, spm_folder, evaluation).rows_for_inspection(99)
    data = build(path, spm_folder, evaluation, streaming=True, stream_window=4, batch_size=1)
    loader = iter(data.train_batches())
    assert sorted(batch["input_ids"][0][batch["attention_mask"][0].bool()].tolist()
                  for batch in itertools.islice(loader, 8)) == sorted(row["input_ids"] for row in expected)


def test_plain_text_documents_are_decontaminated(byte_level_folder, tmp_path, write_jsonl):
    (tmp_path / "train.txt").write_text(f"One fine day.\n\nThey asked: {TIDE}.\n\nTwo.\n")
    data = build(str(tmp_path / "train.txt"), byte_level_folder, write_jsonl(EVALUATED, "evaluation.jsonl"), CLMData,
                 documents="paragraph")
    assert len(data.rows("train")) == 2


def test_wrong_decontamination_settings_are_rejected(spm_folder, write_jsonl, rows):
    path = write_jsonl(rows, "train.jsonl")
    with pytest.raises(UserError, match="no usable row among 10 read: 2 consecutive words are also in"):
        build(path, spm_folder, path, decontaminate_ngram=2)
    with pytest.raises(UserError, match="decontaminate_ngram is 8, but must be 13, its default"):
        SFTData(path, decontaminate_ngram=8)
    with pytest.raises(UserError, match="decontaminate_ngram is 0, but must be 1 or more"):
        SFTData(path, decontaminate=path, decontaminate_ngram=0)
    with pytest.raises(UserError, match="weight applies only to data.source, not to data.decontaminate"):
        SFTData(path, decontaminate=[{"path": path, "weight": 2}])
    with pytest.raises(UserError, match="nowhere.jsonl: no such file"):
        build(path, spm_folder, "nowhere.jsonl")
