"""Which files a path refers to: only regular ones are opened, each once, and nothing is skipped silently."""

import json
import os
import socket
import zipfile
from pathlib import Path

import fsspec
import pytest

from lmmods.core.errors import UserError
from lmmods.data.read.source_reader import SourceReader
from lmmods.recipe.source import Source

pytestmark = pytest.mark.timeout(60)  # a test that waits for a pipe fails


def read_values(path) -> list:
    return [row.values["n"] for row in SourceReader(Source(str(path)))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a.jsonl; its parent is the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"n": "a"}\n')
    return folder


ODD = {
    "a pipe": os.mkfifo,
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(os.path.relpath(path)),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "does not exist": lambda path: path.symlink_to("nowhere.jsonl"),
    "cannot be read": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("problem", ODD)
@pytest.mark.parametrize("path", ["{0}", "{0}/odd.jsonl", "{0}/*", "{0}/**/*.jsonl", "file://{0}", "file://{0}/odd.jsonl",
                                  "zip://x.jsonl::{0}/odd.jsonl", "simplecache::file://{0}/odd.jsonl",
                                  "gzip://x::file://{0}/odd.jsonl"])
def test_a_file_that_is_not_regular_is_rejected_by_name(problem, path, folder):
    ODD[problem](folder / "odd.jsonl")
    with pytest.raises(UserError, match=rf"odd.jsonl: .*{problem}"):
        list(SourceReader(Source(path.format(folder))))


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/stdin"])
def test_devices_are_not_read(device):
    with pytest.raises(UserError, match="this is a|unknown file type|cannot be read"):
        list(SourceReader(Source(device)))


def test_symbolic_links_are_followed_once(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.jsonl").write_text('{"n": "b"}\n')
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "c.jsonl").symlink_to(tmp_path / "elsewhere" / "b.jsonl")
    (folder / "round").symlink_to(".")
    (folder / "up").symlink_to("..")
    (folder / "x.json").mkdir()
    (folder / "x.json" / "d.jsonl").write_text('{"n": "d"}\n')
    assert read_values(folder) == ["a", "b", "b", "d"]  # a.jsonl, c.jsonl, link/b.jsonl, x.json/d.jsonl
    assert read_values(f"{folder}/**/*.jsonl") == ["a", "b", "b", "d"]
    assert read_values("**/a.jsonl") == ["a"] and read_values("data/**") == ["a", "b", "b", "d"]
    assert read_values("./data/**/x.*/*.jsonl") == ["d"]


def test_an_unreadable_folder_is_rejected(folder, monkeypatch):
    (folder / "closed").mkdir()
    original = os.listdir

    def listdir(path="."):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return original(path)

    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(UserError, match="closed: this folder cannot be read"):
        SourceReader(Source(str(folder)))


def test_files_inside_archives_are_read(folder, tmp_path):
    with zipfile.ZipFile(tmp_path / "box.zip", "w") as box:
        box.writestr("in/a.jsonl", '{"n": "1"}\n')
        box.writestr("in/b.jsonl", '{"n": "2"}\n')
        box.writestr("in/notes.md", "x")
    for url in ("zip://in::box.zip", "zip://in/*.jsonl::box.zip", f"zip://in::file://{tmp_path}/box.zip"):
        assert read_values(url) == ["1", "2"], url
    assert read_values("zip://in/b.jsonl::box.zip") == ["2"]
    assert read_values(f"simplecache::file://{folder}/a.jsonl") == ["a"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # fsspec's FTP, closing what it lacks
@pytest.mark.parametrize("url", [
    "zip://", "zip://a.jsonl", "zip://a.jsonl::", "zip://a.jsonl::none.zip", "zip://a.jsonl::data/a.jsonl",
    "zip://a::zip://b::zip://c", "tar://a.jsonl::memory://none", "memory://", "memory://none", "memory://none/a.jsonl",
    "memory://none/*.jsonl", "http://", "https:///a.jsonl", "file://", "local://", "ftp://", "zzz://x", "://x", "a:://b",
    "dir://x", "github://a/b.jsonl", "reference://x", "generic://x", "gzip://a.jsonl::data/a.jsonl", "memory://x\0.jsonl",
    "http://[/a.jsonl", "blockcache::data/a.jsonl"])
def test_a_bad_url_is_a_user_error(url, folder):
    with pytest.raises(UserError):
        list(SourceReader(Source(url)))


def test_url_schemes_and_file_types_are_recognised(folder):
    memory = fsspec.filesystem("memory")
    memory.pipe({"/kinds/a.jsonl": b'{"n": "1"}\n', "/kinds/notes.md": b"x", "/kinds/.b.jsonl": b"no"})
    assert read_values("memory://kinds") == ["1"]
    from lmmods.recipe.source import compression, file_type

    assert file_type("https://host/x.jsonl.gz?token=a/b") == ".jsonl"
    assert compression("https://host/x.jsonl.gz?token=a/b") == "gzip" and compression("zip://a.csv::b.gz") is None


def test_a_zstandard_file_without_its_package_names_the_package(folder, monkeypatch):
    monkeypatch.setattr("lmmods.data.read.readers.compr", {None: None})
    (folder / "a.jsonl.zst").write_bytes(b"x")
    with pytest.raises(UserError, match="needs the package zstandard"):
        list(SourceReader(Source(str(folder / "a.jsonl.zst"))))


# Columns that data.columns names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_renamed_column_replaces_the_other_and_is_counted(is_reversed, folder):
    rows = [{"a": "1", "text": "x"}, {"a": "2", "text": "y"}, {"a": "3"}]
    rows = [dict(reversed(row.items())) if is_reversed else row for row in rows]
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = SourceReader(Source(str(path), columns={"a": "text"}))
    for _ in range(2):
        assert [row.values for row in reader] == [{"text": "1"}, {"text": "2"}, {"text": "3"}]
        assert reader.replaced == {"text": 2}


def test_two_columns_can_swap_names(folder):
    (folder / "a.jsonl").write_text('{"a": "1", "b": "2"}\n')
    reader = SourceReader(Source(str(folder / "a.jsonl"), columns={"a": "b", "b": "a"}))
    assert [row.values for row in reader] == [{"b": "1", "a": "2"}] and not reader.replaced


def test_renaming_two_columns_to_one_name_is_rejected():
    with pytest.raises(UserError, match="maps several columns to 'text'"):
        Source(str(Path("x")), columns={"a": "text", "b": "text"})
