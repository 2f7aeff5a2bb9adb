"""Which files a path stands for: only regular ones are opened, each once, and nothing is passed over in silence."""

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

pytestmark = pytest.mark.timeout(60)  # what would wait for a pipe fails here


def values(path) -> list:
    return [row.values["n"] for row in SourceReader(Source(str(path)))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a.jsonl, and the working directory beside it."""
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


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("named", ["{0}", "{0}/odd.jsonl", "{0}/*", "{0}/**/*.jsonl", "file://{0}", "file://{0}/odd.jsonl",
                                   "zip://x.jsonl::{0}/odd.jsonl", "simplecache::file://{0}/odd.jsonl",
                                   "gzip://x::file://{0}/odd.jsonl"])
def test_what_is_no_regular_file_is_refused_by_name(what, named, folder):
    ODD[what](folder / "odd.jsonl")
    with pytest.raises(UserError, match=rf"odd.jsonl: .*{what}"):
        list(SourceReader(Source(named.format(folder))))


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/stdin"])
def test_devices_are_not_read(device):
    with pytest.raises(UserError, match="this is a|unknown file type|cannot be read"):
        list(SourceReader(Source(device)))


def test_links_to_files_and_folders_are_followed_once(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.jsonl").write_text('{"n": "b"}\n')
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "c.jsonl").symlink_to(tmp_path / "elsewhere" / "b.jsonl")
    (folder / "round").symlink_to(".")
    (folder / "up").symlink_to("..")
    (folder / "x.json").mkdir()
    (folder / "x.json" / "d.jsonl").write_text('{"n": "d"}\n')
    assert values(folder) == ["a", "b", "b", "d"]  # a.jsonl, c.jsonl, link/b.jsonl, x.json/d.jsonl
    assert values(f"{folder}/**/*.jsonl") == ["a", "b", "b", "d"]
    assert values("**/a.jsonl") == ["a"] and values("data/**") == ["a", "b", "b", "d"]
    assert values("./data/**/x.*/*.jsonl") == ["d"]


def test_a_folder_that_cannot_be_read_is_an_error(folder, monkeypatch):
    (folder / "closed").mkdir()
    listed = os.listdir

    def listdir(path="."):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(UserError, match="closed: this folder cannot be read"):
        SourceReader(Source(str(folder)))


def test_files_in_archives(folder, tmp_path):
    with zipfile.ZipFile(tmp_path / "box.zip", "w") as box:
        box.writestr("in/a.jsonl", '{"n": "1"}\n')
        box.writestr("in/b.jsonl", '{"n": "2"}\n')
        box.writestr("in/notes.md", "x")
    for named in ("zip://in::box.zip", "zip://in/*.jsonl::box.zip", f"zip://in::file://{tmp_path}/box.zip"):
        assert values(named) == ["1", "2"], named
    assert values("zip://in/b.jsonl::box.zip") == ["2"]
    assert values(f"simplecache::file://{folder}/a.jsonl") == ["a"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # fsspec's FTP, closing what it lacks
@pytest.mark.parametrize("url", [
    "zip://", "zip://a.jsonl", "zip://a.jsonl::", "zip://a.jsonl::none.zip", "zip://a.jsonl::data/a.jsonl",
    "zip://a::zip://b::zip://c", "tar://a.jsonl::memory://none", "memory://", "memory://none", "memory://none/a.jsonl",
    "memory://none/*.jsonl", "http://", "https:///a.jsonl", "file://", "local://", "ftp://", "zzz://x", "://x", "a:://b",
    "dir://x", "github://a/b.jsonl", "reference://x", "generic://x", "gzip://a.jsonl::data/a.jsonl", "memory://x\0.jsonl",
    "http://[/a.jsonl", "blockcache::data/a.jsonl"])
def test_bad_urls_are_one_message(url, folder):
    with pytest.raises(UserError):
        list(SourceReader(Source(url)))


def test_kinds_of_urls(folder):
    memory = fsspec.filesystem("memory")
    memory.pipe({"/kinds/a.jsonl": b'{"n": "1"}\n', "/kinds/notes.md": b"x", "/kinds/.b.jsonl": b"no"})
    assert values("memory://kinds") == ["1"]
    from lmmods.recipe.source import compression, file_type

    assert file_type("https://host/x.jsonl.gz?token=a/b") == ".jsonl"
    assert compression("https://host/x.jsonl.gz?token=a/b") == "gzip" and compression("zip://a.csv::b.gz") is None


def test_zstandard_without_its_package(folder, monkeypatch):
    monkeypatch.setattr("lmmods.data.read.readers.compr", {None: None})
    (folder / "a.jsonl.zst").write_bytes(b"x")
    with pytest.raises(UserError, match="needs the package zstandard"):
        list(SourceReader(Source(str(folder / "a.jsonl.zst"))))


# Columns that data.columns names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("turned", [False, True])
def test_a_mapped_column_wins_and_the_other_is_counted(turned, folder):
    rows = [{"a": "1", "text": "x"}, {"a": "2", "text": "y"}, {"a": "3"}]
    rows = [dict(reversed(row.items())) if turned else row for row in rows]
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = SourceReader(Source(str(path), columns={"a": "text"}))
    for _ in range(2):
        assert [row.values for row in reader] == [{"text": "1"}, {"text": "2"}, {"text": "3"}]
        assert reader.replaced == {"text": 2}


def test_columns_can_change_places(folder):
    (folder / "a.jsonl").write_text('{"a": "1", "b": "2"}\n')
    reader = SourceReader(Source(str(folder / "a.jsonl"), columns={"a": "b", "b": "a"}))
    assert [row.values for row in reader] == [{"b": "1", "a": "2"}] and not reader.replaced


def test_two_columns_of_one_name_are_refused():
    with pytest.raises(UserError, match="maps several columns to 'text'"):
        Source(str(Path("x")), columns={"a": "text", "b": "text"})
