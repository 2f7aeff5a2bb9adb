"""The run folder: when a run may start, which checkpoint a resume uses, what is deleted."""

import os

import pytest

from lmmods.core.errors import UserError
from lmmods.runs.checkpoint import write_manifest
from lmmods.runs.folder import RunFolder, commit_folder, write_text


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def write_checkpoints(folder: RunFolder, *names: str) -> None:
    """Write checkpoints as the previous version did, without a list of the run's files."""
    for name in names:
        write_text(folder.checkpoint(name) / "state.json", "{}")
        write_manifest(folder.checkpoint(name))
    write_text(folder.config, "a: 1\n")


def test_a_run_may_start_in_a_new_folder_without_creating_it(folder):
    folder.check_can_start(overwrite=False)
    assert not folder.root.exists()


def test_a_folder_with_an_unfinished_run_needs_resume_or_overwrite(folder):
    write_checkpoints(folder, "step=5")
    with pytest.raises(UserError, match=r"unfinished run \(step=5\).*--ckpt_path last.*--overwrite true"):
        folder.check_can_start(overwrite=False)
    folder.check_can_start(overwrite=True)


def test_a_finished_run_is_not_overwritten_by_default(folder):
    write_checkpoints(folder, "step=5")
    folder.completed.touch()
    with pytest.raises(UserError, match="finished run"):
        folder.check_can_start(overwrite=False)


def test_a_new_run_deletes_the_old_run_and_nothing_else(folder):
    write_checkpoints(folder, "step=5")
    (folder.root / "notes.txt").write_text("mine")
    folder.begin(None)
    assert {p.name for p in folder.root.iterdir()} == {".run-files.json", "notes.txt"}


def test_checkpoints_are_ordered_by_step_not_by_name(folder):
    write_checkpoints(folder, "step=10", "step=9", "step=10+3", "step=100")
    assert folder.names() == ["step=9", "step=10", "step=10+3", "step=100"]
    assert folder.find("last").name == "step=100"
    assert folder.find("best") is None


def test_last_is_the_newest_checkpoint_wherever_its_link_points(folder):
    """A run may be killed after committing a checkpoint and before moving the link to it."""
    write_checkpoints(folder, "step=5", "step=7")
    folder.point("last", folder.checkpoint("step=5"))
    assert folder.resolve("last").name == "step=7"
    folder.point("last", folder.checkpoint("step=8"))
    assert folder.resolve("last").name == "step=7"
    assert folder.resolve("5").name == "step=5"
    assert folder.resolve(str(folder.checkpoint("step=5"))).name == "step=5"
    with pytest.raises(UserError, match="does not exist.*step=5, step=7"):
        folder.resolve("6")


def test_a_resume_before_later_checkpoints_needs_overwrite(folder):
    write_checkpoints(folder, "step=5", "step=7")
    (folder.checkpoints / ".step=9-123").mkdir()
    with pytest.raises(UserError, match="step=7"):
        folder.check_can_resume(folder.checkpoint("step=5"), overwrite=False)
    folder.check_can_resume(folder.checkpoint("step=7"), overwrite=False)
    folder.begin(folder.checkpoint("step=5"))
    assert [p.name for p in folder.checkpoints.iterdir()] == ["step=5"]
    assert folder.config.exists()


def test_a_resume_into_the_folder_of_another_run_is_rejected(folder, tmp_path):
    other = RunFolder(tmp_path / "other")
    write_checkpoints(other, "step=3")
    folder.check_can_resume(other.checkpoint("step=3"), overwrite=False)
    write_checkpoints(folder, "step=5")
    with pytest.raises(UserError, match="unfinished run"):
        folder.check_can_resume(other.checkpoint("step=3"), overwrite=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written"):
        RunFolder(tmp_path / "run").check_can_start(overwrite=False)


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        RunFolder(tmp_path / "file" / "run").check_can_start(overwrite=False)


def test_a_commit_replaces_the_whole_folder(tmp_path):
    for name, text in (("new", "2"), ("final", "1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text(text)
    commit_folder(tmp_path / "new", tmp_path / "final")
    assert [p.name for p in tmp_path.iterdir()] == ["final"]
    assert (tmp_path / "final" / "x").read_text() == "2"
