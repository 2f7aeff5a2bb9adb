"""Damaged files give one error that names file and line; harmless oddities are read."""

import gzip
import json
import tracemalloc
from random import Random

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest

from lmmods.core.errors import UserError
from lmmods.data.read import readers, source_reader
from lmmods.data.read.readers import read_file
from lmmods.data.read.source_reader import SourceReader
from lmmods.data.sft import SFTData
from lmmods.recipe.source import Source

DAMAGED = {
    "cut.jsonl": (b'{"a": 1}\n{"a": ', r"cut.jsonl:2: broken JSON"),
    "array_line.jsonl": (b'{"a": 1}\n[1, 2]\n', r":2: a record must be a JSON object"),
    "cut.json": (b'[\n {"a": 1},\n {"a": 2', r"cut.json:3: broken JSON"),
    "unclosed.json": (b'[\n {"a": 1}\n', r":3: broken JSON: the file ends inside the array"),
    "no_comma.json": (b'[{"a": 1}\n {"a": 2}]', r":2: broken JSON: unexpected '{'"),
    "rest.json": (b'[{"a": 1}]\n x', r"broken JSON: unexpected 'x'"),
    "number.json": (b"3", r"a record must be a JSON object"),
    "quotes.csv": (b'a,b\n1,2\n3,"x\n5,6\n', r"quotes.csv:3: broken CSV .*quote unbalanced"),
    "inside.csv": (b'a,b\n1,"x"y\n', r":2: broken CSV"),
    "more.csv": (b"a,b\n1,2,3\n", r":2: 3 fields, but the header names 2"),
    "fewer.csv": (b"a,b\n1,2\n1\n", r":3: 1 fields, but the header names 2"),
    "twice.csv": (b"a,a\n1,2\n", r":1: the header must name each column once"),
    "latin1.txt": ("ok\nGr\u00f6\u00dfe".encode("latin1"), r":2: byte 5 \(0xf6\) is not UTF-8"),
    "utf16.txt": ("hello".encode("utf-16"), r":1: (NUL byte|byte 0)"),
    "nul.csv": (b"a,b\n1,\x002\n", r":2: NUL byte at byte 6"),
    "cut.jsonl.gz": (gzip.compress(b'{"a": 1}\n' * 1000)[:-20], r"damaged or truncated"),
    "not.jsonl.gz": (b'{"a": 1}\n', r"damaged or truncated"),
    "cut.parquet": (b"PAR1xxxx", r"damaged Parquet"),
    "cut.arrow": (b"ARROW1xxxx", r"damaged Arrow"),
    "words.docx": (b"x", r"unknown file type"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_reported_with_its_location(name, tmp_path):
    content, message = DAMAGED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_file(str(tmp_path / name)))


ROWS = [{"a": "Größe\r\nzwei", "b": 'x, "y"\n'}, {"a": "東京 \u2028", "b": "\U0001f600"}]


def write_rows(path):
    if path.name.endswith("parquet"):
        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    elif path.name.endswith("arrow"):
        with pa.ipc.new_stream(str(path), pa.Table.from_pylist(ROWS).schema) as writer:
            writer.write_table(pa.Table.from_pylist(ROWS))
    elif path.name.endswith("json"):
        path.write_text("\ufeff" + json.dumps(ROWS, indent=1), encoding="utf-8")
    elif path.name.endswith("sv"):
        mark = "\t" if path.name.endswith("tsv") else ","
        cells = [["a", "b"], *([row["a"], row["b"]] for row in ROWS)]
        quoted = [mark.join('"' + cell.replace('"', '""') + '"' for cell in row) for row in cells]
        path.write_bytes(("\ufeff" + "\r\n".join(quoted)).encode())
    else:
        path.write_bytes("\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode())


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.tsv", "a.parquet", "a.arrow", "lines_inside.json"])
@pytest.mark.parametrize("packed", [False, True])
def test_every_file_type_gives_the_same_rows(name, packed, tmp_path):
    path = tmp_path / name
    if name.startswith("lines"):
        path.write_text("\n".join(map(json.dumps, ROWS)))
    else:
        write_rows(path)
    if packed:
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path = tmp_path / f"{name}.gz"
    assert [row.values for row in read_file(str(path))] == ROWS


def test_nested_objects_of_a_table_have_only_their_keys(tmp_path, monkeypatch):
    """Arrow gives every object of a column the keys of all of them, with null where one is missing."""
    rows = [{"calls": [{"name": "f", "arguments": {"city": "Paris"}}], "note": None},
            {"calls": [{"name": "g", "arguments": {"x": [1, None]}}], "note": "n"}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [row.values for row in read_file(str(tmp_path / "a.parquet"))] == rows
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    assert [row.values for row in SourceReader(Source("org/set"))] == rows


def test_records_have_the_line_where_they_start(tmp_path):
    (tmp_path / "a.json").write_text('[\n  {"a": 1},\n\n  {"a":\n 2}, {"a": 3}]')
    assert [row.line for row in read_file(str(tmp_path / "a.json"))] == [2, 4, 5]
    (tmp_path / "a.csv").write_text('a\n"x\ny"\nz\n')
    assert [row.line for row in read_file(str(tmp_path / "a.csv"))] == [2, 4]


def test_folders_globs_and_limits_are_read_and_missing_paths_rejected(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "notes.md", ".hidden.jsonl"):
        (tmp_path / name).write_text(json.dumps({"n": name}) + "\n")
    names = [[row.values["n"] for row in SourceReader(Source(str(path)))] for path in (tmp_path, tmp_path / "*.jsonl")]
    assert names == [["a.jsonl", "b.jsonl"]] * 2
    assert len(list(SourceReader(Source(str(tmp_path), limit=1)))) == 1
    with pytest.raises(UserError, match="did you mean 'a.jsonl'"):
        SourceReader(Source(str(tmp_path / "aa.jsonl")))
    with pytest.raises(UserError, match="no file matches"):
        SourceReader(Source(str(tmp_path / "*.csv")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no readable file"):
        SourceReader(Source(str(tmp_path / "empty")))
    with pytest.raises(UserError, match="data set: there is no folder .* the hub .* is not asked"):
        SourceReader(Source("someone/something"))


def test_the_fingerprint_depends_on_contents_and_settings(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}')
    first = SourceReader(Source(str(path))).fingerprint()
    assert (
        first == SourceReader(Source(str(path))).fingerprint() != SourceReader(Source(str(path), limit=3)).fingerprint()
    )
    path.write_text('{"a": 2}')
    assert first != SourceReader(Source(str(path))).fingerprint()


def test_urls_and_saved_datasets_are_read(tmp_path):
    rows = [{"a": "1"}, {"a": "2"}]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fsspec.filesystem("memory").pipe({"/box/a.jsonl": (tmp_path / "a.jsonl").read_bytes()})
    for path in (
        tmp_path / "saved",
        f"file://{tmp_path}/a.jsonl",
        "memory://box/a.jsonl",
        "memory://box",
        "memory://box/*.jsonl",
    ):
        reader = SourceReader(Source(str(path)))
        assert [row.values for row in reader] == rows, path
        assert reader.fingerprint() == SourceReader(Source(str(path))).fingerprint()
    with pytest.raises(UserError, match="box/b.jsonl: cannot be read"):
        list(SourceReader(Source("memory://box/b.jsonl")))
    with pytest.raises(UserError, match="nonsense://x"):
        SourceReader(Source("nonsense://x"))


def test_hub_datasets_are_loaded_by_name_split_and_revision(monkeypatch):
    requested = []

    def load(*args, **options):
        requested.append((*args, options))
        return datasets.Dataset.from_list([{"a": "1"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    reader = SourceReader(Source("org/set", name="de", split="train[:10%]", revision="v2"))
    assert [row.line for row in reader] == [1]
    SourceReader(Source("alpaca"), streaming=True)
    assert requested[0] == (
        "org/set",
        "de",
        {"data_files": None, "split": "train[:10%]", "revision": "v2", "streaming": False},
    )
    path, _, options = requested[1]
    assert path == "tatsu-lab/alpaca" and options["split"] == "train" and options["streaming"]


def test_source_options_that_do_not_apply_are_rejected(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(UserError, match="split is for hub datasets"):
        SourceReader(Source(str(tmp_path / "a.jsonl"), split="train"))
    with pytest.raises(UserError, match="limit is 0"):
        Source("x", limit=0)
    with pytest.raises(UserError, match="weight is 0"):
        Source("x", weight=0)


# Too long rows --------------------------------------------------------------------------------------------------------


@pytest.fixture
def limits(monkeypatch):
    """A function that lowers the maximum size of a row and of a read."""

    def lower(max_chars: int, at_once: int = 64) -> None:
        monkeypatch.setattr(readers, "LONGEST", max_chars)
        monkeypatch.setattr(readers, "LONG_PART", max_chars // 8)
        monkeypatch.setattr(readers, "READ_AT_ONCE", at_once)

    return lower


LONG = [{"a": "one", "b": "x"}, {"a": 'a "b", [c] {\\' * 400, "b": "y"}, {"a": "größer", "b": "z"}]


@pytest.mark.parametrize("name", ["a.jsonl", "lines.json", "array.json", "whole.json", "a.csv", "a.tsv", "a.parquet",
                                  "a.arrow", "a.jsonl.gz", "shared.arrow"])
def test_a_too_long_row_is_skipped_and_reported(name, tmp_path, limits):
    limits(1000)
    path = tmp_path / name
    if name == "array.json":
        path.write_text("[\n" + ",\n".join(map(json.dumps, LONG)) + "]")
    elif name == "whole.json":
        path.write_text(json.dumps({"version": 1, "data": LONG}))
    elif name == "lines.json" or "jsonl" in name:
        text = "\n" + "\n".join(map(json.dumps, LONG))
        path.write_bytes(gzip.compress(text.encode()) if "gz" in name else text.encode())
    elif "sv" in name:
        mark = "\t" if "tsv" in name else ","
        path.write_text("".join(f'"{a}"{mark}{b}\n' for a, b in [("a", "b"), *(
            (row["a"].replace('"', '""'), row["b"]) for row in LONG)]))
    else:
        table = pa.Table.from_pylist(LONG)
        if "shared" in name:
            table = table.set_column(0, "a", table["a"].dictionary_encode())
        if "parquet" in name:
            pyarrow.parquet.write_table(table, path)
        else:
            with pa.ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table)
    result = list(read_file(str(path)))
    assert [row.values for row in result] == [LONG[0], {}, LONG[2]]
    assert [row.problem for row in result] == [None, readers.TOO_LONG, None]
    first = {"array.json": 2, "a.csv": 2, "a.tsv": 2, "a.jsonl": 2, "lines.json": 2, "a.jsonl.gz": 2}.get(name, 1)
    assert [row.line for row in result] == [first, first + 1, first + 2]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz", "a.txt.gz", "blank.txt.gz"])
def test_reading_never_holds_a_whole_file_in_memory(name, tmp_path, limits):
    """64 MB compressed to 64 kB: memory is a small multiple of the limit."""
    limits(10_000 if "blank" in name else 1_000_000, 1 << 16)
    begin, end = {"a.js": (b'[{"a": "', b'"}]'), "a.cs": (b"a\n", b"\n")}.get(name[:4], (b"", b""))
    letter = b"\n" if "blank" in name else b"a"
    with gzip.open(tmp_path / name, "wb", 1) as file:
        file.write(begin)
        for _ in range(2 if "blank" in name else 64):
            file.write(letter * (100_000 if "blank" in name else 1_000_000))
        file.write(end)
    tracemalloc.start()
    try:
        for row in read_file(str(tmp_path / name)):
            assert row.problem or len(row.values["text"]) <= 1_000_000
        assert tracemalloc.get_traced_memory()[1] < 12_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("seed", range(20))
def test_array_elements_are_split_as_json_splits_them(seed, tmp_path, limits):
    """Wherever chunks, escapes, brackets in texts and spaces are."""
    limits(60, 1 + seed)
    rng = Random(seed)

    def make_value(depth):
        choice = rng.randrange(6 if depth else 3)
        text = "".join(rng.choices('ab\\"[]{},é\n', k=rng.randrange(12)))
        return [text, None, rng.random(), [], {}, {}][choice] if choice < 3 else (
            [make_value(depth - 1) for _ in range(rng.randrange(4))] if choice == 3 else
            {f"{text}{n}": make_value(depth - 1) for n in range(rng.randrange(4))})

    rows = [{"k": make_value(3)} for _ in range(30)]
    texts = [json.dumps(row, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1])) for row in rows]
    (tmp_path / "a.json").write_text("[ " + " ,\n".join(texts) + "\n]\n", encoding="utf-8")
    expected = [{} if len(text) > 60 else row for text, row in zip(texts, rows, strict=True)]
    assert any(expected) and {} in expected
    result = list(read_file(str(tmp_path / "a.json")))
    assert [row.values for row in result] == expected
    line, lines = 1, []
    for text in texts:
        lines.append(line)
        line += text.count("\n") + 1
    assert [row.line for row in result] == lines


@pytest.mark.parametrize(("content", "message"), [
    (b'[{"a": 1}, {"a": nothing}, {"b": "' + b"x" * 5000 + b'"}]', ":1: broken JSON .Expecting value"),
    (b'[{"a": 1},\n {"a": "' + b"x" * 5000, ":2: broken JSON .Unterminated string"),
    (b'[{"a": 1},\n ' + b"[" * 5000, ":2: broken JSON"),
    (b'{"a":\n "' + b"x" * 9000 + b'"}', "a.json: a JSON document of more than 8,000 characters"),
])
def test_too_long_broken_json_is_one_error(tmp_path, limits, monkeypatch, content, message):
    limits(1000)
    monkeypatch.setattr(readers, "LONGEST_DOCUMENT", 8000)
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_file(str(tmp_path / "a.json")))


@pytest.mark.parametrize("content", ['a,b\n1,2\n3,"' + "x" * 2000 + "\n5,6\n", "a,b\n1,2\n" + '3,"x\n' + "4\n" * 2000,
                                     "a," + "b" * 2000 + "\n1,2\n", 'a,b\n"x\n' + "y" * 2000 + '\n",1\n'])
def test_a_csv_record_without_a_clear_end_is_rejected(tmp_path, limits, content):
    limits(1000)
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(UserError, match=r"a\.csv:\d: the record that starts here has more than 1,000 characters"):
        list(read_file(str(tmp_path / "a.csv")))


@pytest.mark.parametrize("documents", ["file", "paragraph", "line"])
def test_a_too_long_line_of_text_is_read_in_parts(tmp_path, limits, documents):
    limits(8000)
    words = " ".join(f"größer{n}" for n in range(3000))
    text = f"first\n\nsecond {words}\nthird\n\nlast {'x' * 9000}\n"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    result = list(read_file(str(tmp_path / "a.txt"), documents))
    parts = [row.values["text"] for row in result]
    assert max(map(len, parts)) <= 1000 + len("third\n")
    joined = "".join(part + ("\n" if row.values["ends"] and documents != "file" else "")
                     for part, row in zip(parts, result, strict=True))
    assert joined.replace("\n", "") == text.replace("\n", "") and joined.count("\n") <= text.count("\n")
    assert all(part.startswith(" ") for part, row in zip(parts[1:], result[1:], strict=True)
               if not row.values["starts"] and row.line == 3)
    ends = {"file": 1, "paragraph": 3, "line": 4}[documents]
    assert [sum(row.values[key] for row in result) for key in ("starts", "ends")] == [ends, ends]


def test_a_too_long_hub_row_is_skipped(monkeypatch):
    monkeypatch.setattr(source_reader, "LONGEST", 1000)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(LONG))
    reader = SourceReader(Source("org/set", columns={"a": "text"}))
    assert [row.values.get("text") for row in reader] == ["one", None, "größer"]


@pytest.mark.parametrize("streaming", [False, True])
def test_too_long_rows_are_counted(streaming, spm_folder, write_jsonl, limits, capsys):
    path = write_jsonl([*LONG[1:2], {"instruction": "", "output": ""}, *LONG[1:2],
                        *({"instruction": str(n), "output": "word"} for n in range(9))])
    limits(1000)
    data = SFTData(path, tokenizer=spm_folder, streaming=streaming, batch_size=2, num_proc=1)
    data.setup("fit")
    source, = data.report["sources"].values()
    assert source["rows_read"] == 12 and source["rows_kept"] == 9
    assert source["dropped"][readers.TOO_LONG] == {"rows": 2, "first": [f"{path}:1", f"{path}:3"]}
    assert data.train_batches() is not None
    if not streaming:
        rows = data.rows_for_inspection(99)
        assert sorted(row["index"] for row in rows) == list(range(3, 12))
    only = write_jsonl(LONG[1:2], "only.jsonl")
    with pytest.raises(UserError, match=r"no usable row among 1 read: a row of more than .*first .*only.jsonl:1"):
        SFTData(only, tokenizer=spm_folder, streaming=streaming).setup("fit")
