"""The data cache: damage is found, told and mended; what a kill or a full disk leaves is never taken for a store."""

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


def flip(path: Path, place: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[place] ^= 1
    path.write_bytes(contents)


@pytest.fixture
def build(tmp_path, write_jsonl, alpaca_rows, spm_folder):  # noqa: F811
    """A function that makes or opens the store of some rows and gives all of them back."""
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
    """The folder of the one store that there is."""
    build()
    (folder,) = (tmp_path / "cache").iterdir()
    return folder


@pytest.fixture
def not_built(monkeypatch):
    """Call it, and from then on nothing may be encoded again."""
    return lambda: monkeypatch.setattr(cache, "build_store", lambda *args, **kwargs: pytest.fail("encoded again"))


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_reported_and_repaired(name, kind, build, store, not_built, capsys):
    before = build()
    assert "damaged" not in capsys.readouterr().err
    DAMAGES[kind](store / name)
    assert build() == before
    told = capsys.readouterr().err
    assert f"{store} are damaged ({name} " in told and told.count("\n") == 1 and "rows.jsonl" in told
    not_built()
    assert build() == before and not capsys.readouterr().err
    assert list(store.parent.iterdir()) == [store]


@pytest.mark.parametrize("stands_there", ["file", "empty folder", "link to nothing"])
def test_something_else_in_the_place_of_a_store(stands_there, build, store):
    before = build()
    shutil.rmtree(store)
    if stands_there == "file":
        store.write_text("")
    elif stands_there == "empty folder":
        store.mkdir()
    else:
        store.symlink_to("nowhere")
    assert build() == before and damage(store) is None


def test_sizes_are_compared_where_another_process_reads_the_bytes(store):
    flip(store / "rows.arrow", 500)
    assert damage(store, contents=False) is None and "rows.arrow" in damage(store)
    DAMAGES["cut"](store / "rows.arrow")
    assert "rows.arrow" in damage(store, contents=False)


def test_a_store_that_no_checksum_covers_but_arrow_refuses(build, store, capsys):
    before = build()
    (store / "encoded.arrow").write_bytes(b"x" * 100)
    manifest = cache.stamps(store / name for name in FILES)
    (store / MANIFEST).write_text(json.dumps(manifest))
    assert build() == before and "are damaged" in capsys.readouterr().err


def test_what_another_process_has_mended_meanwhile_stays(build, store, tmp_path, monkeypatch, not_built):
    before, good, looked = build(), tmp_path / "good", []
    shutil.copytree(store, good)
    flip(store / "rows.arrow", 500)

    def found_late(folder, contents=True):
        wrong = damage(folder, contents)
        looked.append(wrong)
        if len(looked) == 1:
            store.rename(tmp_path / "bad")
            good.rename(store)
        return wrong

    monkeypatch.setattr(cache, "damage", found_late)
    not_built()
    assert build() == before and looked[0] and not looked[1]


def test_a_store_that_another_process_takes_away_is_built_again(build, store, monkeypatch):
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
def test_two_processes_mend_at_once(build, store, tmp_path, spm_folder):  # noqa: F811
    flip(store / "encoded.arrow", 500)
    runs = [Fork(show_sum, str(tmp_path / "rows.jsonl"), spm_folder, str(tmp_path / "cache")) for _ in range(2)]
    sums = [run.communicate(timeout=100).splitlines()[-1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0] and int(sums[0]) == int(sums[1])
    assert list(store.parent.iterdir()) == [store] and damage(store) is None


# Kills ------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Nothing runs after it but what a test lets run."""


@pytest.mark.parametrize("step", ["first batch", "tables open", "before info", "before manifest", "before its name"])
def test_what_a_kill_leaves_is_no_store(step, build, store, monkeypatch, capsys):
    before = build()
    shutil.rmtree(store)

    def kill(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(cache.shutil, "rmtree", lambda *args, **kwargs: None)  # nobody cleans up after a kill
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
    left = list(store.parent.iterdir())
    assert len(left) == 1 and ".tmp-" in left[0].name
    assert build() == before and damage(store) is None and "damaged" not in capsys.readouterr().err


# A full disk, and others that cannot be written -------------------------------------------------------------------


@contextlib.contextmanager
def largest_file(size: int):
    """No file of this process can grow beyond `size` bytes, as on a full disk."""
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
    with largest_file(size), pytest.raises(UserError, match=r"cache: the cache cannot be written .*free some space.*"
                                                            r"data.cache_dir or LMMODS_CACHE"):
        build()
    assert not list(store.parent.iterdir())
    assert build() == before


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EIO"])
@pytest.mark.parametrize("place", ["_write", "_close"])
def test_each_write_error_is_reported(code, place, build, store, monkeypatch):
    shutil.rmtree(store)

    def fail(*args, **kwargs):
        raise OSError(getattr(errno, code), "no")

    with monkeypatch.context() as patch:
        patch.setattr(cache._Writer, place, fail)
        with pytest.raises(UserError, match="the cache cannot be written") as error:
            build()
    assert ("free some space" in str(error.value)) == (code != "EIO")
    assert not list(store.parent.iterdir()) and build()


def test_a_damaged_store_that_cannot_be_replaced(build, store, monkeypatch):
    flip(store / "rows.arrow", 500)

    def refuse(*args):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(UserError, match="this cache entry cannot be used .*Read-only"):
        build()


@pytest.mark.parametrize("named", ["a\0b", "x" * 5000, "~nobody-of-this-name/cache"])
def test_a_cache_folder_that_cannot_be(named, write_jsonl, alpaca_rows, spm_folder):  # noqa: F811
    with pytest.raises(UserError, match="cache"):
        SFTData(write_jsonl(alpaca_rows), tokenizer=spm_folder, max_length=64, cache_dir=named).setup("fit")


def test_a_process_that_dies_while_tokenising(build, store, monkeypatch):
    shutil.rmtree(store)

    def died(*args, **kwargs):
        raise cache.BrokenExecutor

    monkeypatch.setattr(cache.Future, "result", died)
    with pytest.raises(UserError, match="data.num_proc"):
        build()


def test_the_command_line_says_both(recipe, tmp_path, capsys):
    arguments = ["inspect", *recipe(data__init_args__cache_dir=str(tmp_path / "c")), "--rows", "1"]
    with largest_file(1000):
        assert main(arguments) == 2
    told = capsys.readouterr().err
    assert "the cache cannot be written" in told and "Traceback" not in told
    assert main(arguments) == 0
    first = capsys.readouterr().out
    (folder,) = (tmp_path / "c").iterdir()
    DAMAGES["cut"](folder / "rows.arrow")
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out == first and "are damaged (rows.arrow has changed since it was written)" in err
