"""Damaged files give one error that names file and line; oddities that are no damage are read."""

import gzip
import json

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest

from lmmods.core.errors import UserError
from lmmods.data.sources.readers import read_file
from lmmods.data.sources.source import Source
from lmmods.data.sources.source_reader import SourceReader

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
    "cut.jsonl.gz": (gzip.compress(b'{"a": 1}\n' * 1000)[:-20], r"damaged or cut off"),
    "not.jsonl.gz": (b'{"a": 1}\n', r"damaged or cut off"),
    "cut.parquet": (b"PAR1xxxx", r"damaged Parquet"),
    "cut.arrow": (b"ARROW1xxxx", r"damaged Arrow"),
    "words.docx": (b"x", r"unknown file type"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_reported_with_its_place(name, tmp_path):
    content, message = DAMAGED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_file(str(tmp_path / name)))


ROWS = [{"a": "Größe\r\nzwei", "b": 'x, "y"\n'}, {"a": "東京 \u2028", "b": "\U0001f600"}]


def write(path):
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
def test_every_type_gives_the_same_rows(name, packed, tmp_path):
    path = tmp_path / name
    if name.startswith("lines"):
        path.write_text("\n".join(map(json.dumps, ROWS)))
    else:
        write(path)
    if packed:
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path = tmp_path / f"{name}.gz"
    assert [row.values for row in read_file(str(path))] == ROWS


def test_objects_of_a_table_have_their_own_keys_alone(tmp_path, monkeypatch):
    """Arrow gives the objects of a column the keys of all of them, null where they have none."""
    rows = [{"calls": [{"name": "f", "arguments": {"city": "Paris"}}], "note": None},
            {"calls": [{"name": "g", "arguments": {"x": [1, None]}}], "note": "n"}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [row.values for row in read_file(str(tmp_path / "a.parquet"))] == rows
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    assert [row.values for row in SourceReader(Source("org/set"))] == rows


def test_lines_of_records(tmp_path):
    (tmp_path / "a.json").write_text('[\n  {"a": 1},\n\n  {"a":\n 2}, {"a": 3}]')
    assert [row.line for row in read_file(str(tmp_path / "a.json"))] == [2, 4, 5]
    (tmp_path / "a.csv").write_text('a\n"x\ny"\nz\n')
    assert [row.line for row in read_file(str(tmp_path / "a.csv"))] == [2, 4]


def test_folder_glob_limit_and_missing(tmp_path):
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


def test_fingerprint_follows_contents_and_settings(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}')
    first = SourceReader(Source(str(path))).fingerprint()
    assert (
        first == SourceReader(Source(str(path))).fingerprint() != SourceReader(Source(str(path), limit=3)).fingerprint()
    )
    path.write_text('{"a": 2}')
    assert first != SourceReader(Source(str(path))).fingerprint()


def test_urls_and_saved_data_sets(tmp_path):
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


def test_hub_sets_are_asked_for_by_name_split_and_revision(monkeypatch):
    asked = []

    def load(*args, **options):
        asked.append((*args, options))
        return datasets.Dataset.from_list([{"a": "1"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    reader = SourceReader(Source("org/set", name="de", split="train[:10%]", revision="v2"))
    assert [row.line for row in reader] == [1]
    SourceReader(Source("alpaca"), streaming=True)
    assert asked[0] == (
        "org/set",
        "de",
        {"data_files": None, "split": "train[:10%]", "revision": "v2", "streaming": False},
    )
    assert asked[1][0] == "tatsu-lab/alpaca" and asked[1][2]["split"] == "train" and asked[1][2]["streaming"]


def test_options_that_a_path_cannot_honour_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(UserError, match="split is for hub data sets"):
        SourceReader(Source(str(tmp_path / "a.jsonl"), split="train"))
    with pytest.raises(UserError, match="limit is 0"):
        Source("x", limit=0)
    with pytest.raises(UserError, match="weight is 0"):
        Source("x", weight=0)
