"""Damaged and odd files of every type through whole data modules: one error with its location, or a counted row."""

import bz2
import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from lmmods.core.errors import UserError
from lmmods.data.clm import CLMData
from lmmods.data.mlm import MLMData
from lmmods.data.qa import QAData
from lmmods.data.sft import SFTData
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture

GOOD = {"instruction": "Add 1 and 2.", "output": "3"}
PARAGRAPH = {
    "context": "The fox jumps.",
    "qas": [{"id": "1", "question": "who?", "answers": [{"text": "fox", "answer_start": 4}]}],
}


def make_lines(*rows):
    return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows).encode()


def make_parquet(rows):
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def make_parquet_with_equal_names():
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["output", "output"]), buffer)
    return buffer.getvalue()


def make_squad(*paragraphs):
    return json.dumps({"data": [{"paragraphs": list(paragraphs)}]}).encode()


# task, file name, contents, error message
ERRORS = [
    ("sft", "a.jsonl", b"", "the dataset is empty"),
    ("sft", "a.json", b"", r"a.json:1: broken JSON"),
    ("sft", "b.json", b"[]", "the dataset is empty"),
    ("sft", "c.json", b"{}", "fit no known format"),
    ("sft", "d.json", b'"text"', "must be a JSON object"),
    ("sft", "e.json", b"null", "must be a JSON object"),
    ("sft", "f.json", b'[[{"a": 1}, 2]]', r"f.json:1: a record must be a JSON object"),
    ("sft", "f2.json", b'[[{"a": 1}]]', "no usable row among 1 read: messages has a turn without role or content"),
    ("sft", "g.json", b'[{"instruction": "a", "output": "b"},]', r"g.json:1: broken JSON"),
    ("sft", "h.json", b'[{"instruction": "a" "output": "b"}]', r"h.json:1: broken JSON"),
    ("sft", "i.json", b"[{'instruction': 'a'}]", r"i.json:1: broken JSON"),
    ("sft", "j.json", b"[" * 100_000, "broken JSON"),
    ("sft", "k.jsonl", make_lines(GOOD, GOOD, '{"instruction": "a", "out'), r"k.jsonl:3: broken JSON"),
    ("sft", "l.jsonl", make_lines(GOOD, "null"), r"l.jsonl:2: a record must be a JSON object"),
    ("sft", "m.jsonl", make_lines(GOOD, '{"a": 1} {"b": 2}'), r"m.jsonl:2: broken JSON"),
    ("sft", "n.jsonl", make_lines(GOOD) + b'\n{"instruction": "\xff"}', r"n.jsonl:2: byte 64 \(0xff\)"),
    ("sft", "o.jsonl", make_lines(GOOD) + b"\n\x00\x00\x00", r"o.jsonl:2: NUL byte"),
    ("sft", "p.jsonl", json.dumps(GOOD).encode("utf-16"), r"p.jsonl:1: (NUL byte|byte 0)"),
    ("sft", "q.jsonl", make_lines({"a": 1}), r"q.jsonl:1: the columns a fit no known format"),
    (
        "sft",
        "r.jsonl",
        make_lines({"instruction": None, "output": "a"}),
        r"no usable row among 1 read: instruction is null \(1 rows, first .*:1\); layout: alpaca",
    ),
    ("sft", "s.jsonl", make_lines({"instruction": "a", "output": ""}), "no usable row among 1 read: empty response"),
    ("sft", "t.jsonl", make_lines(GOOD) + b'\n{"id": ' + b"7" * 4301 + b"}", r"t.jsonl:2: .*more than 4300 digits"),
    ("sft", "t.json", b'[{"output": "a", "id": ' + b"7" * 4301 + b"}]", r"t.json:1: .*more than 4300 digits"),
    ("sft", "u.json", b'{"output": "a", "id": ' + b"7" * 4301 + b"}", r"u.json:1: .*more than 4300 digits"),
    ("sft", "v.jsonl", make_lines(GOOD, '{"output": "a", "output": "b"}'),
     r"v.jsonl:2: .*the key 'output' occurs twice"),
    ("sft", "w.jsonl", make_lines({**GOOD, "x": json.loads("[" * 200 + "]" * 200)}),
     r"w.jsonl:1: .*more than 100 deep"),
    ("sft", "x.jsonl", b"[" * 200 + b"]" * 200, r"x.jsonl:1: a record must be a JSON object"),
    ("sft", "c.parquet", make_parquet_with_equal_names(), "the schema must name each column once"),
    ("sft", "a.csv", b"", "the dataset is empty"),
    ("sft", "b.csv", b"instruction,output\n", "the dataset is empty"),
    ("sft", "c.csv", b'instruction,output\n"a,b\n', r"c.csv:2: broken CSV"),
    ("sft", "d.csv", b"instruction,output\na,b\nc\n", r"d.csv:3: 1 fields, but the header names 2"),
    ("sft", "e.csv", b"instruction;output\na;b\n", r"e.csv:2: the columns instruction;output fit no known format"),
    ("sft", "f.csv", b"instruction,,output\na,b,c\n", r"f.csv:1: the header must name each column once"),
    ("sft", "g.csv", b"instruction,output\na,\xe9\n", r"g.csv:2: byte 21 \(0xe9\)"),
    ("sft", "h.tsv", b"instruction\toutput\na\tb\tc\n", r"h.tsv:2: 3 fields, but the header names 2"),
    ("sft", "a.parquet", b"not parquet", "damaged Parquet"),
    ("sft", "b.parquet", make_parquet([GOOD])[:-9], "damaged Parquet"),
    ("sft", "a.arrow", b"", "damaged Arrow"),
    ("sft", "a.json.gz", gzip.compress(json.dumps([GOOD]).encode())[:-12], "damaged or truncated"),
    ("sft", "a.jsonl.bz2", bz2.compress(make_lines(GOOD) * 9)[:20], "damaged or truncated"),
    ("sft", "b.jsonl.gz", b"plain", "damaged or truncated"),
    ("sft", "a.xlsx", b"PK", "unknown file type"),
    ("clm", "a.txt", b"", "the dataset is empty"),
    ("clm", "b.txt", b"  \n\n \n", "the dataset is empty"),
    ("clm", "c.txt", b"good\n\x80\n", r"c.txt:2: byte 5 \(0x80\)"),
    ("clm", "d.txt", b"\x00" * 100, r"d.txt:1: NUL byte"),
    ("clm", "e.jsonl", make_lines({"content": "x"}), r"e.jsonl:1: no column 'text'; the columns are content"),
    ("mlm", "f.jsonl", make_lines({"text": ["x"]}), "no usable row among 1 read: text is a list"),
    ("qa", "a.json", b'{"data": []}', "the dataset is empty"),
    ("qa", "b.json", b'{"data": [{"title": "x"}]}', "no column 'question'"),
    ("qa", "c.json", make_squad({"context": "x"}), "no usable row among 1 read: question is null"),
    ("qa", "d.json", make_squad({"qas": PARAGRAPH["qas"]}), "context is null"),
    ("qa", "e.json", make_squad(PARAGRAPH)[:-5], r"e.json:1: broken JSON"),
    ("qa", "f.jsonl", make_lines({"question": "x", "answer": "y"}), r"f.jsonl:1: no column 'context'"),
]
# task, file name, contents, rows kept, reasons of the dropped rows
SKIPS = [
    (
        "sft",
        "a.jsonl",
        make_lines(GOOD, {"instruction": "a"}, {"output": "b"}),
        1,
        {"no response": 1, "instruction is missing": 1},
    ),
    ("sft", "b.jsonl", make_lines(GOOD, {"instruction": "a", "output": {"x": 1}}), 1,
     {"output is a dict, not text": 1}),
    ("sft", "c.jsonl", make_lines(GOOD, {"instruction": 5, "output": 1.5}, {"instruction": "a", "output": True}), 3,
     {}),
    (
        "sft",
        "d.jsonl",
        make_lines(GOOD, '{"instruction": "a", "output": "\\ud83d"}'),
        1,
        {"text with a lone surrogate (half of a character)": 1},
    ),
    ("sft", "e.jsonl", make_lines(GOOD, '{"instruction": "a\\u0000b", "output": "c"}'), 2, {}),
    (
        "sft",
        "f.jsonl",
        make_lines(GOOD, {"instruction": "a" * 300_000, "output": "b" * 300_000}),
        1,
        {"response longer than the limits": 1},
    ),
    ("sft", "g.jsonl", b"\xef\xbb\xbf" + make_lines(GOOD) + b"\r\n\r\n" + make_lines(GOOD) + b"\r\n", 2, {}),
    (
        "sft",
        "h.jsonl",
        make_lines(
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            {"messages": [{"role": "user", "content": "a"}]},
            {"messages": None},
            {"messages": [{"role": "assistant", "content": "b"}]},
        ),
        1,
        {"no response": 1, "messages is empty or missing": 1, "the conversation starts with the assistant": 1},
    ),
    ("sft", "i.csv", b'instruction,output\r\n"a\r\nb","say ""c"""\r\n,\r\n', 1, {"empty response": 1}),
    ("sft", "j.parquet", make_parquet([GOOD, {"instruction": "a", "output": None}]), 1, {"no response": 1}),
    ("sft", "k.json", json.dumps(GOOD).encode(), 1, {}),
    (
        "sft",
        "l.jsonl",
        make_lines({"text": "### Human: a### Assistant: b"}, {"text": "nothing"}),
        1,
        {"text has no '### Human:' or '### Assistant:' in it": 1},
    ),
    (
        "clm",
        "m.jsonl",
        make_lines({"text": "a"}, {"text": None}, {"text": " "}, {}),
        1,
        {"text is null": 1, "empty text": 1, "text is missing": 1},
    ),
    ("clm", "n.txt", b"\xef\xbb\xbfone\r\ntwo\r\n", 1, {}),
    (
        "qa",
        "o.json",
        make_squad(PARAGRAPH, {"context": "x"}, {"context": " ", "qas": PARAGRAPH["qas"]}),
        1,
        {"question is null": 1, "empty context": 1},
    ),
    (
        "qa",
        "p.json",
        make_squad(PARAGRAPH, {**PARAGRAPH, "qas": [{"id": "2", "question": "q", "answers": [{"text": "fox"}]}]}),
        1,
        {"answers are not {text, answer_start}": 1},
    ),
    (
        "sft",
        "r.jsonl",
        make_lines(GOOD, '{"instruction": "a", "output": NaN}', '{"instruction": 1e999, "output": "b"}',
                   '{"instruction": "NaN", "output": "1e999"}'),
        2,
        {"output is nan (NaN or too large a number), not text": 1,
         "instruction is inf (NaN or too large a number), not text": 1},
    ),
    ("sft", "s.csv", b"instruction,output\nNaN,1e999\nInfinity," + b"7" * 5000 + b"\n", 1,
     {"response longer than the limits": 1}),
    (
        "sft",
        "t.jsonl",
        make_lines(
            {"message_id": "1", "parent_id": None, "text": "a", "role": "prompter"},
            {"message_id": "2", "parent_id": "1", "text": "b", "role": "assistant"},
            {"message_id": ["x"], "parent_id": None, "text": "c", "role": "prompter"},
            {"message_id": "3", "parent_id": "4", "text": "round", "role": "prompter"},
            {"message_id": "4", "parent_id": "3", "text": "round", "role": "assistant"},
        ),
        1,
        {"messages is empty or missing": 3},
    ),
    (
        "qa",
        "r.csv",
        b"question,context,answers,is_impossible\n"
        + b'who?,The fox jumps.,"{""text"": [""fox""], ""answer_start"": [4]}",False\n'
        + b"""who?,The fox jumps.,"{'text': array(['fox']), 'answer_start': array([4])}",\n"""
        + b'who?,The fox jumps.,"{""text"": ""fox"", ""answer_start"": 4}",\n'
        + b'who?,The fox jumps.,"{""text"": [""fox""], ""answer_start"": [4]}",perhaps\n',
        1,
        {"answers is text, but not JSON": 1, "answers are not {text, answer_start}": 1,
         "is_impossible is neither true nor false": 1},
    ),
    ("qa", "q.json", make_squad(PARAGRAPH, {**PARAGRAPH, "qas": "none"}), 1, {"question is null": 1}),
]


@pytest.fixture
def build(tmp_path, spm_folder, bert_folder):  # noqa: F811
    def build(task, name, contents):
        path = tmp_path / name
        path.write_bytes(contents)
        classes = {"sft": SFTData, "clm": CLMData, "mlm": MLMData, "qa": QAData}
        folder = spm_folder if task in ("sft", "clm") else bert_folder
        fields = {"stride": 8, "question_max_length": 16} if task == "qa" else {}
        data = classes[task](str(path), tokenizer=folder, max_length=256, batch_size=2, **fields)
        data.setup("fit")
        return data

    return build


@pytest.mark.parametrize(
    "task,name,contents,message", ERRORS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_damaged_file_is_one_error_with_its_location(task, name, contents, message, build):
    with pytest.raises(UserError, match=message) as error:
        build(task, name, contents)
    assert name in str(error.value) or "no usable row" in str(error.value)


@pytest.mark.parametrize(
    "task,name,contents,num_kept,reasons", SKIPS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_odd_rows_are_counted(task, name, contents, num_kept, reasons, build):
    data = build(task, name, contents)
    source = next(iter(data.report["sources"].values()))
    assert source["rows_kept"] == num_kept
    assert {reason: entry["rows"] for reason, entry in source["dropped"].items()} == reasons
    assert all(name in entry["first"][0] for entry in source["dropped"].values())
    assert all(len(batch["input_ids"]) for batch in data.train_batches())


def test_at_least_60_malformed_files_are_covered():
    assert len(ERRORS) + len(SKIPS) >= 60
