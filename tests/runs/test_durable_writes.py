"""Files of a run survive a power failure: contents reach the disk before their names."""

import os
from pathlib import Path

import pytest

from lmmods.runs.checkpoint import read_checkpoint, write_checkpoint
from lmmods.runs.run_files import write_bytes


@pytest.fixture
def calls(monkeypatch) -> list[int | str]:
    """Calls of `os.fsync`, as inodes, and of `os.replace`, as new names; both still run."""
    calls: list[int | str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        calls.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def record_replace(source: str | Path, target: str | Path) -> None:
        calls.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    return calls


def test_a_file_is_renamed_after_its_content_is_on_disk(calls, tmp_path):
    path = tmp_path / "metrics.json"
    write_bytes(path, b"{}")
    assert calls[:2] == [path.stat().st_ino, "metrics.json"] and path.read_bytes() == b"{}"


def test_a_checkpoint_is_renamed_after_all_its_files_are_on_disk(calls, tmp_path):
    folder = tmp_path / "step=3"
    write_checkpoint(folder, {"global_step": 3})
    renamed = calls.index("step=3")
    assert {path.stat().st_ino for path in (folder, *folder.iterdir())} <= set(calls[:renamed])
    assert tmp_path.stat().st_ino in calls[renamed:]  # the name itself
    assert read_checkpoint(folder)["global_step"] == 3
