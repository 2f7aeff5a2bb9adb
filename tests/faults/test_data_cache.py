"""The data cache: damage is reported and repaired; leftovers of a kill or a full disk are never used."""

import contextlib
import errno
import json
import resource
import shutil
from pathlib import Path

import pytest

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.data.sft import SFTData
from lmmods.data.store import cache
from lmmods.data.store.arrow_store import FILES, MANIFEST, damage
from tests.data.conftest import alpaca_rows, spm_folder, write_jsonl  # noqa: F401 - fixtures
from tests.data.test_store import show_sum
from tests.forks import Fork

DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "flip": lambda path: flip(path, len(path.read_bytes()) // 2),
    "flip at the end": lambda path: flip(path, -1),
    "list": lambda path: path.write_text("[]"),
    "object": lambda path: path.write_text("{}"),
    "deep": lambda path: path.write_text("[" * 10_000),
    "folder": lambda path: (path.unlink(), path.mkdir()),
}


def flip(path: Path, index: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[index] ^= 1
    path.write_bytes(contents)


@pytest.fixture
def build(tmp_path, write_jsonl, alpaca_rows, spm_folder):  # noqa: F811
    """Return a function that builds or opens the store of some rows and returns all rows."""
    path = write_jsonl(alpaca_rows)

    def build(**fields):
        data = SFTData(path, tokenizer=spm_folder, max_length=512, cache_dir=str(tmp_path / "cache"), **fields)
        data.prepare_data()
        data.setup("fit")
        return [data.rows("train").source_row(row["index"]) | {"ids": row["input_ids"].tolist()}
                for row in map(data.rows("train").__getitem__, range(len(data.rows("train"))))]

    return build


@pytest.fixture
def store(build, tmp_path):
    """Return the folder of the only store."""
    build()
    (folder,) = (tmp_path / "cache").iterdir()
    return folder


@pytest.fixture
def forbid_encoding(monkeypatch):
    """Return a function after whose call encoding fails the test."""
    return lambda: monkeypatch.setattr(cache, "build_store", lambda *args, **kwargs: pytest.fail("encoded again"))


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_reported_and_repaired(name, kind, build, store, forbid_encoding, capsys):
    before = build()
    assert "damaged" not in capsys.readouterr().err
    DAMAGES[kind](store / name)
    assert build() == before
    output = capsys.readouterr().err
    assert f"{store} are damaged ({name} " in output and output.count("\n") == 1 and "rows.jsonl" in output
    forbid_encoding()
    assert build() == before and not capsys.readouterr().err
    assert list(store.parent.iterdir()) == [store]


@pytest.mark.parametrize("replacement", ["file", "empty folder", "link to nothing"])
def test_a_path_that_is_not_a_store_is_replaced(replacement, build, store):
    before = build()
    shutil.rmtree(store)
    if replacement == "file":
        store.write_text("")
    elif replacement == "empty folder":
        store.mkdir()
    else:
        store.symlink_to("nowhere")
    assert build() == before and damage(store) is None


def test_without_contents_damage_compares_only_sizes(store):
    flip(store / "rows.arrow", 500)
    assert damage(store, contents=False) is None and "rows.arrow" in damage(store)
    DAMAGES["cut"](store / "rows.arrow")
    assert "rows.arrow" in damage(store, contents=False)


def test_a_store_that_arrow_cannot_read_is_rebuilt(build, store, capsys):
    before = build()
    (store / "encoded.arrow").write_bytes(b"x" * 100)
    manifest = cache.stamps(store / name for name in FILES)
    (store / MANIFEST).write_text(json.dumps(manifest))
    assert build() == before and "are damaged" in capsys.readouterr().err


def test_a_store_repaired_by_another_process_is_kept(build, store, tmp_path, monkeypatch, forbid_encoding):
    before, good, results = build(), tmp_path / "good", []
    shutil.copytree(store, good)
    flip(store / "rows.arrow", 500)

    def check_late(folder, contents=True):
        result = damage(folder, contents)
        results.append(result)
        if len(results) == 1:
            store.rename(tmp_path / "bad")
            good.rename(store)
        return result

    monkeypatch.setattr(cache, "damage", check_late)
    forbid_encoding()
    assert build() == before and results[0] and not results[1]


def test_a_store_deleted_by_another_process_is_rebuilt(build, store, monkeypatch):
    before, opened = build(), []

    def open_late(folder):
        opened.append(folder)
        if len(opened) == 1:
            shutil.rmtree(store)
        return opened_store(folder)

    opened_store = cache.Store
    monkeypatch.setattr(cache, "Store", open_late)
    assert build() == before


@pytest.mark.slow
def test_two_processes_repair_a_store_at_once(build, store, tmp_path, spm_folder):  # noqa: F811
    flip(store / "encoded.arrow", 500)
    runs = [Fork(show_sum, str(tmp_path / "rows.jsonl"), spm_folder, str(tmp_path / "cache")) for _ in range(2)]
    sums = [run.communicate(timeout=100).splitlines()[-1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0] and int(sums[0]) == int(sums[1])
    assert list(store.parent.iterdir()) == [store] and damage(store) is None


# Kills ------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


@pytest.mark.parametrize("step", ["first batch", "tables open", "before info", "before manifest", "before commit"])
def test_leftovers_of_a_kill_are_not_used_as_a_store(step, build, store, monkeypatch, capsys):
    before = build()
    shutil.rmtree(store)

    def kill(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(cache.shutil, "rmtree", lambda *args, **kwargs: None)  # a kill leaves no time to clean up
        if step == "first batch":
            patch.setattr(cache._Writer, "add", kill)
        elif step == "tables open":
            patch.setattr(cache, "_result", kill)
        elif step == "before info":
            patch.setattr(cache._Writer, "finish", kill)
        elif step == "before manifest":
            patch.setattr(cache, "stamps", kill)
        else:
            patch.setattr(cache, "commit", kill)
        with pytest.raises(Killed):
            build()
    leftovers = list(store.parent.iterdir())
    assert len(leftovers) == 1 and ".tmp-" in leftovers[0].name
    assert build() == before and damage(store) is None and "damaged" not in capsys.readouterr().err


# Disks that cannot be written ------------------------------------------------------------------------------------


@contextlib.contextmanager
def limit_file_size(size: int):
    """Limit the size of all files of this process in bytes, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 100, 1000, 6000])
def test_a_full_disk_is_one_message_and_leaves_nothing(size, build, store):
    before = build()
    assert (store / "rows.arrow").stat().st_size > 6000
    shutil.rmtree(store)
    with limit_file_size(size), pytest.raises(UserError, match=r"cache: the cache cannot be written .*free some space.*"
                                                            r"data.cache_dir or LMMODS_CACHE"):
        build()
    assert not list(store.parent.iterdir())
    assert build() == before


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EIO"])
@pytest.mark.parametrize("method", ["_write", "_close"])
def test_each_write_error_is_reported(code, method, build, store, monkeypatch):
    shutil.rmtree(store)

    def fail(*args, **kwargs):
        raise OSError(getattr(errno, code), "no")

    with monkeypatch.context() as patch:
        patch.setattr(cache._Writer, method, fail)
        with pytest.raises(UserError, match="the cache cannot be written") as error:
            build()
    assert ("free some space" in str(error.value)) == (code != "EIO")
    assert not list(store.parent.iterdir()) and build()


def test_a_damaged_store_that_cannot_be_replaced_is_an_error(build, store, monkeypatch):
    flip(store / "rows.arrow", 500)

    def refuse(*args):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(UserError, match="this cache entry cannot be used .*Read-only"):
        build()


@pytest.mark.parametrize("folder", ["a\0b", "x" * 5000, "~nobody-of-this-name/cache"])
def test_an_invalid_cache_folder_is_rejected(folder, write_jsonl, alpaca_rows, spm_folder):  # noqa: F811
    with pytest.raises(UserError, match="cache"):
        SFTData(write_jsonl(alpaca_rows), tokenizer=spm_folder, max_length=64, cache_dir=folder).setup("fit")


def test_an_error_about_a_dead_tokenising_process_names_num_proc(build, store, monkeypatch):
    shutil.rmtree(store)

    def die(*args, **kwargs):
        raise cache.BrokenExecutor

    monkeypatch.setattr(cache.Future, "result", die)
    with pytest.raises(UserError, match="data.num_proc"):
        build()


def test_the_command_line_reports_a_full_disk_and_a_damaged_store(recipe, tmp_path, capsys):
    arguments = ["inspect", *recipe(data__init_args__cache_dir=str(tmp_path / "c")), "--rows", "1"]
    with limit_file_size(1000):
        assert main(arguments) == 2
    output = capsys.readouterr().err
    assert "the cache cannot be written" in output and "Traceback" not in output
    assert main(arguments) == 0
    expected = capsys.readouterr().out
    (folder,) = (tmp_path / "c").iterdir()
    DAMAGES["cut"](folder / "rows.arrow")
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out == expected and "are damaged (rows.arrow has changed since it was written)" in err
