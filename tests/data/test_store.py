"""The cache: reused, rebuilt when a relevant setting or file changes, safe with two processes at once."""

import json

import datasets
import numpy as np
import pytest

from lmmods.core.errors import UserError
from lmmods.data.sft import SFTData
from tests.forks import Fork


def show_sum(path: str, folder: str, cache: str) -> None:
    print(sum(sum(row["input_ids"]) for row in build(path, folder, cache_dir=cache).rows_for_inspection(10**6)))


def list_folders(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").iterdir())


def build(path, folder, **fields):
    data = SFTData(path, tokenizer=folder, **{"max_length": 512, **fields})
    data.prepare_data()
    data.setup("fit")
    return data


def test_a_second_run_reads_the_cache(spm_folder, write_jsonl, alpaca_rows, tmp_path, monkeypatch):
    path = write_jsonl(alpaca_rows)
    first = build(path, spm_folder).rows_for_inspection(99)
    monkeypatch.setattr("lmmods.data.store.cache.build_store", lambda *args, **kwargs: pytest.fail("encoded again"))
    assert build(path, spm_folder, batch_size=7, val_size=3, seed=9).rows_for_inspection(1)
    assert build(path, spm_folder).rows_for_inspection(99) == first


@pytest.mark.parametrize(
    "fields",
    [
        {"template": "chatml"},
        {"max_length": 64},
        {"train_on_prompt": True},
        {"train_on_last": True},
        {"on_overflow": "skip"},
        {"add_tokens": ["<x>"]},
        {"target_max_length": 9},
        {"roles": {"a": "user"}},
    ],
)
def test_a_changed_encoding_option_makes_a_new_store(fields, spm_folder, write_jsonl, alpaca_rows, tmp_path):
    path = write_jsonl(alpaca_rows)
    build(path, spm_folder)
    build(path, spm_folder, **fields)
    assert len(list_folders(tmp_path)) == 2


def test_another_file_or_tokenizer_makes_a_new_store(spm_folder, byte_level_folder, write_jsonl, alpaca_rows, tmp_path):
    build(write_jsonl(alpaca_rows), spm_folder)
    build(write_jsonl(alpaca_rows), byte_level_folder)
    build(write_jsonl(alpaca_rows[1:]), spm_folder)
    assert len(list_folders(tmp_path)) == 3


def test_rebuild_cache_rewrites_the_store(spm_folder, write_jsonl, alpaca_rows, tmp_path):
    path = write_jsonl(alpaca_rows)
    build(path, spm_folder)
    (store,) = (tmp_path / "cache").iterdir()
    before = (store / "info.json").stat().st_mtime_ns
    build(path, spm_folder, rebuild_cache=True)
    assert list_folders(tmp_path) == [store.name] and (store / "info.json").stat().st_mtime_ns > before


def test_a_failed_build_leaves_no_store(spm_folder, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"instruction": "a", "output": "b"}\n{"instr')
    with pytest.raises(UserError, match="a.jsonl:2"):
        build(str(tmp_path / "a.jsonl"), spm_folder)
    assert list_folders(tmp_path) == []


@pytest.mark.slow
def test_two_processes_share_one_store(spm_folder, write_jsonl, alpaca_rows, tmp_path):
    path = write_jsonl(alpaca_rows * 20)
    runs = [Fork(show_sum, path, spm_folder, str(tmp_path / "cache")) for _ in range(2)]
    sums = [run.communicate(timeout=100).splitlines()[-1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0] and int(sums[0]) == int(sums[1])
    assert len(list_folders(tmp_path)) == 1


@pytest.mark.slow  # starts processes
def test_worker_processes_give_the_same_store(chat_folder, write_jsonl, alpaca_rows):
    path = write_jsonl(alpaca_rows * 60)
    one = build(path, chat_folder, num_proc=1).rows_for_inspection(10**6)
    assert build(path, chat_folder, num_proc=2, rebuild_cache=True).rows_for_inspection(10**6) == one


def test_the_store_is_an_arrow_file_that_datasets_opens(spm_folder, write_jsonl, alpaca_rows, tmp_path):
    data = build(write_jsonl(alpaca_rows), spm_folder)
    (store,) = (tmp_path / "cache").iterdir()
    table = datasets.Dataset.from_file(str(store / "encoded.arrow"))
    assert table[3]["input_ids"] == data.rows_for_inspection(4)[3]["input_ids"]
    assert json.loads((store / "info.json").read_text())["rows_read"] == len(alpaca_rows)
    assert np.array_equal(data.rows("train").lengths, [len(row) for row in table["input_ids"]])


def test_an_unwritable_cache_is_rejected(spm_folder, write_jsonl, alpaca_rows, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="the cache cannot be written"):
        build(write_jsonl(alpaca_rows), spm_folder, cache_dir=str(tmp_path / "file"))
