"""Truncated, edited or replaced files of a run folder are repaired with a message, or rejected by name."""

import contextlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from lmmods.cli import main
from lmmods.commands.exported_model import FinishedRun
from lmmods.core.errors import UserError
from lmmods.evaluation.samples import SampleWriter
from lmmods.extras.report.command import render
from lmmods.extras.report.reading import read_runs
from lmmods.runs.checkpoint import write_manifest
from lmmods.runs.csv_logger import MetricsCSV
from lmmods.runs.folder import RunFolder, write_text
from lmmods.runs.repair import repair_samples

# Repaired --------------------------------------------------------------------------------------------------------

TABLE = "step,train/loss,val/loss\n1,2.5,\n2,2.0,1.5\n3,nan,\n"


def rewind(path: Path, content: bytes, step: int = 3) -> str:
    """Write metrics.csv, rewind it to a step as a resume does, and return its content."""
    path.write_bytes(content)
    MetricsCSV(path).rewind(step)
    return path.read_text()


def test_a_valid_metrics_csv_is_unchanged(tmp_path, capsys):
    assert rewind(tmp_path / "metrics.csv", TABLE.encode()) == TABLE
    assert rewind(tmp_path / "metrics.csv", TABLE.encode(), step=2) == TABLE.replace("3,nan,\n", "")
    assert capsys.readouterr().out == "" and os.listdir(tmp_path) == ["metrics.csv"]


BROKEN_LINES = {
    "too few values": b"2,2.0\n", "too many values": b"2,2.0,1.5,9\n", "a step that is not a number": b"two,2.0,1.5\n",
    "a fractional step": b"2.5,2.0,1.5\n", "a step of 5000 digits": b"2" * 5000 + b",2.0,1.5\n",
    "a word": b"2,high,1.5\n",
    "an open quote": b'2,"2.0,1.5\n', "binary": b"\x00\xff\xfe,\x80,\x01\n", "no step": b",2.0,1.5\n",
    "an empty line": b"\n", "a field without end": b"2," + b"9" * 200_000 + b"x,1.5\n",
}


@pytest.mark.parametrize("broken", BROKEN_LINES)
def test_unreadable_lines_of_metrics_csv_are_skipped_and_reported(tmp_path, capsys, broken):
    path, content = tmp_path / "metrics.csv", TABLE.encode().replace(b"2,2.0,1.5\n", BROKEN_LINES[broken])
    assert rewind(path, content) == TABLE.replace("2,2.0,1.5\n", "")
    output = capsys.readouterr().out
    assert "metrics.csv is damaged: line 3 is skipped" in output and "metrics.csv.damaged" in output
    assert (tmp_path / "metrics.csv.damaged").read_bytes() == content
    MetricsCSV(path).rewind(3)
    assert capsys.readouterr().out == ""  # already repaired


@pytest.mark.parametrize("header", [b"stop,train/loss,val/loss\n", b"\x00\x01\n", b"step,step,val/loss\n", b"[]\n",
                                    b"\n"])
def test_a_metrics_csv_without_a_header_is_started_again(tmp_path, capsys, header):
    path = tmp_path / "metrics.csv"
    logger = MetricsCSV(path)
    path.write_bytes(header + TABLE.encode().split(b"\n", 1)[1])
    logger.rewind(3)
    logger.log_metrics({"train/loss": 1.0}, step=4)
    assert path.read_text() == "step,train/loss\n4,1.0\n"
    assert "is damaged: 4 lines from line 1 on are skipped" in capsys.readouterr().out


def test_a_truncated_metrics_csv_loses_only_its_last_line(tmp_path, capsys):
    assert rewind(tmp_path / "metrics.csv", TABLE[:-4].encode()) == TABLE.replace("3,nan,\n", "")
    assert "line 4 is skipped" in capsys.readouterr().out
    assert rewind(tmp_path / "metrics.csv", b"step,train/l") == "step\n"
    assert rewind(tmp_path / "metrics.csv", b"") == "step\n"


SAMPLES = [{"step": step, "prompt": "1 + 1", "base": None, "output": str(step)} for step in (0, 2, 4)]
BROKEN_SAMPLES = ['{"step": 2, "prompt": "1', "[]", "null", '{"step": "2", "prompt": "1 + 1", "output": "2"}',
                  "\x00\x01", '{"step": 2, "output": "2"}', '{"step": true, "prompt": "1 + 1", "output": "2"}',
                  "[" * 100_000,
                  '{"step": 2, "prompt": 7, "output": "2"}', '{"step": 2, "prompt": "1 + 1", "output": null}']


@pytest.mark.parametrize("broken", BROKEN_SAMPLES, ids=range(len(BROKEN_SAMPLES)))
@pytest.mark.parametrize("position", ["middle", "end"])
def test_unreadable_samples_are_skipped_and_reported(tmp_path, capsys, broken, position):
    folder, lines = RunFolder(tmp_path), [json.dumps(row) + "\n" for row in SAMPLES]
    if position == "middle":
        content = lines[0] + broken + "\n" + lines[1] + lines[2]
    else:  # half a line without a newline
        content = "".join(lines) + broken
    folder.files.claim(folder.samples.name)
    write_text(folder.samples, content)
    writer = SampleWriter(["1 + 1"])
    writer.begin(folder, 2)
    assert repair_samples(folder.samples) == SAMPLES[:2]
    output = capsys.readouterr().out
    assert f"samples.jsonl is damaged: line {2 if position == 'middle' else 4} is skipped" in output
    assert (tmp_path / "samples.jsonl.damaged").read_text() == content
    writer.write(4, ["5"], [])
    assert [row["output"] for row in repair_samples(folder.samples)] == ["0", "2", "5"]


@pytest.mark.parametrize("content", [b"", b"[]", b"7", b'{"val/loss": 1.0', b"\xff\x00", b"null", b"[" * 100_000])
def test_a_damaged_metrics_json_is_started_again(tmp_path, capsys, content):
    folder = RunFolder(tmp_path)
    folder.files.claim(folder.metrics_json.name)
    folder.metrics_json.write_bytes(content)
    folder.merge_metrics({"val/loss": 2.0})
    assert json.loads(folder.metrics_json.read_text()) == {"val/loss": 2.0}
    assert (tmp_path / "metrics.json.damaged").read_bytes() == content
    assert "metrics.json is not a JSON object and is ignored" in capsys.readouterr().out
    folder.merge_metrics({"val/f1": 3.0})
    assert json.loads(folder.metrics_json.read_text()) == {"val/loss": 2.0, "val/f1": 3.0}


# Rejected --------------------------------------------------------------------------------------------------------


def change_state(change) -> Callable[[RunFolder], None]:
    """Return a damage that edits state.json and updates its manifest."""
    def damage(run: RunFolder) -> None:
        path = run.resolve("last") / "state.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
        (path.parent / "manifest.json").unlink()
        write_manifest(path.parent)
    return damage


def write_in_checkpoint(name: str, content: str) -> Callable[[RunFolder], None]:
    return lambda run: (run.resolve("last") / name).write_text(content)


def replace_manifest_by_pipe(run: RunFolder) -> None:
    path = run.resolve("last") / "manifest.json"
    path.unlink()
    os.mkfifo(path)


def make_in_checkpoints(name: str, make) -> Callable[[RunFolder], None]:
    return lambda run: make(run.checkpoints / name)


def replace_link_by_copy(run: RunFolder) -> None:
    target = run.resolve("last")
    (run.checkpoints / "last").unlink()
    shutil.copytree(target, run.checkpoints / "last")


DAMAGES = {
    "manifest is a list": (write_in_checkpoint("manifest.json", "[]"), "manifest.json does not list"),
    "manifest is empty": (write_in_checkpoint("manifest.json", "{}"), "manifest.json does not list model.safetensors"),
    "manifest is a pipe": (replace_manifest_by_pipe, "manifest.json cannot be read"),
    "state is truncated": (write_in_checkpoint("state.json", "{"), "state.json has changed since"),
    "state is a list": (change_state(lambda state: []), "state.json contains a list"),
    "state without steps": (change_state(lambda state: state.pop("global_step") and state),
                            "global_step is missing or not an integer"),
    "steps are a string": (change_state(lambda state: {**state, "global_step": "2"}),
                           "global_step is missing or not an integer"),
    "callbacks are a list": (change_state(lambda state: {**state, "callbacks": []}), "callbacks.Metrics.num_tokens is"),
    "best is a number": (change_state(lambda state: state["callbacks"]["Checkpoint"].update(best=3) or state),
                         "callbacks.Checkpoint.best is missing or not a list"),
    "a missing array": (change_state(lambda state: {**state, "window": {"$array": "x"}}), "does not fit its"),
    "a step is a file": (make_in_checkpoints("step=4", Path.touch), "step=4 is not a checkpoint folder"),
    "a step is a broken link": (make_in_checkpoints("step=4", lambda path: path.symlink_to("gone")), "step=4 is not a"),
    "last is a copy": (replace_link_by_copy, "last is not a link to a checkpoint"),
    "metrics.json is a folder": (lambda run: (run.metrics_json.unlink(), run.metrics_json.mkdir()), "json is not a"),
    "metrics.csv is a pipe": (lambda run: (run.metrics_csv.unlink(), os.mkfifo(run.metrics_csv)),
                              "metrics.csv is not a"),
}
HARMLESS = {
    "folders of other names": lambda run: [(run.checkpoints / name).mkdir() for name in (
        "step=abc", "step=", "step=1e3", "step=" + "9" * 40, "step=-1", "step=1+", "steps")],
    "files of other names": lambda run: (run.checkpoints / "step=abc").write_text("mine"),
    "links of other names": lambda run: (run.checkpoints / "step=x").symlink_to("gone"),
    "last is a broken link": lambda run: run.point("last", run.checkpoint("step=9")),
    "last is gone": lambda run: (run.checkpoints / "last").unlink(),
    "metrics are damaged": lambda run: [path.write_bytes(b"\xff\x00[") for path in (run.metrics_csv, run.metrics_json)],
}


@pytest.fixture
def finished(finished, recipe, tmp_path):
    """Return a function that makes fresh copies of a run of two steps, and the arguments to resume it to step 4."""
    changes = {"model__init_args__quantize": None, "model__init_args__lora": {"rank": 2, "alpha": 4},
               "trainer__limit_val_batches": 0}

    def make_run(engine: str):
        run = finished("run", **changes, engine=engine, trainer__max_steps=2)
        shutil.copytree(run.root, tmp_path / "whole", symlinks=True)
        arguments = recipe(**changes, engine=engine, trainer__max_steps=4)

        def copy_run() -> RunFolder:
            shutil.rmtree(tmp_path / "run")
            shutil.copytree(tmp_path / "whole", tmp_path / "run", symlinks=True)
            return RunFolder(tmp_path / "run")

        return copy_run, [*arguments, "--ckpt_path", "last"]

    return make_run


def check_report(run: RunFolder) -> None:
    """Check that `report` reads the folder or raises a UserError."""
    with contextlib.suppress(UserError):
        read_runs([str(run.root)])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_damaged_file_is_rejected_by_name_and_nothing_changes(finished, capfd, engine):
    copy_run, arguments = finished(engine)
    for name, (damage, message) in DAMAGES.items():
        run = copy_run()
        damage(run)
        before = sorted(run.root.rglob("*"))
        capfd.readouterr()
        assert main(["fit", *arguments]) == 2, name
        error = capfd.readouterr().err
        assert message in error and error.startswith("error: "), (name, error)
        assert sorted(run.root.rglob("*")) == before, name
        check_report(run)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_foreign_files_in_checkpoints_do_not_stop_a_resume(finished, engine):
    copy_run, arguments = finished(engine)
    for name, damage in HARMLESS.items():
        run = copy_run()
        damage(run)
        foreign_names = {path.name for path in run.checkpoints.iterdir()} - {"last", "best", *run.names()}
        check_report(run)
        assert main(["fit", *arguments]) == 0, name
        assert run.names() == ["step=2", "step=4"] and run.resolve("last").name == "step=4", name
        assert foreign_names <= {path.name for path in run.checkpoints.iterdir()}, name
        read_runs([str(run.root)])


@pytest.mark.slow
def test_a_report_on_damaged_files_is_a_page_or_a_message(tmp_path):
    """With any value of any file replaced by junk, the report is a page or a message."""
    source = {"rows": 3, "dropped": {"empty": {"rows": 1, "first": ["a:2"]}}, "notes": ["x"]}
    splits = {"train": {"rows": 2, "length": {"median": 3}}}
    files = {"data_report.json": {"sources": {"rows.jsonl": source}, "splits": splits},
             "metrics.json": {"val/loss": 1.0, "mmlu/eval/accuracy": 0.5},
             "config.yaml": {"engine": "jax", "trainer": {"max_steps": 4}, "model": {"class_path": "SFT"}}}
    (tmp_path / "metrics.csv").write_text(TABLE)
    pages = 0
    for name, content in files.items():
        for damaged in itertools.islice(variants(content), 0, None, 2):  # every second variant
            for file, valid in files.items():
                (tmp_path / file).write_text(json.dumps(damaged if file == name else valid))
            with contextlib.suppress(UserError):
                pages += bool(render(read_runs([str(tmp_path)]), datetime.now().astimezone()))
    assert pages > 60


def variants(node):
    """Yield copies of the tree with one node replaced."""
    yield from (None, -1, math.nan, "x", [], {}, [1], {"a": 1}, True)
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        for damaged in variants(node[key]):
            copy = node.copy()
            copy[key] = damaged
            yield copy


# --ckpt_path -----------------------------------------------------------------------------------------------------


@pytest.fixture
def foreign(tmp_path, llama_folder) -> dict[str, tuple[str, str]]:
    """Return paths that are not checkpoints, with the expected message."""
    (tmp_path / "epoch=1.ckpt").write_bytes(b"\x80\x02}q\x00.")
    (tmp_path / "notes.txt").write_text("step 4")
    for name, file in (("adapter", "adapter_config.json"), ("trainer", "trainer_state.json"), ("other", "x.bin")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    (tmp_path / "a run" / "checkpoints" / "step=4").mkdir(parents=True)
    (tmp_path / "loop").symlink_to("loop")
    return {str(tmp_path / name): message for name, message in {
        "epoch=1.ckpt": "a single file, as other programs write", "notes.txt": "a single file",
        "adapter": "an adapter (model.adapter starts from it)", "trainer": "a checkpoint of transformers' Trainer",
        "other": "a folder without a state.json", "a run": "a run folder", "a run/checkpoints": "a folder without",
        "loop": "does not exist", "gone": "does not exist", "x" * 5000: "does not exist",
    }.items()} | {str(llama_folder): "a model folder (model.pretrained starts from it)",
                  str(llama_folder / "model.safetensors"): "a weights file",
                  "³": "does not exist", "7" * 5000: "does not exist", "7+x": "does not exist",
                  "step=7": "does not exist", "\0": "does not exist"}


def test_a_path_that_is_not_a_checkpoint_is_described(tmp_path, foreign):
    folder = RunFolder(tmp_path / "run")
    for path, message in foreign.items():
        with pytest.raises(UserError) as caught:
            folder.resolve(path)
        assert message in str(caught.value), path


def test_a_checkpoint_is_resolved_by_step_and_by_name(tmp_path):
    folder = RunFolder(tmp_path)
    for name in ("step=5", "step=5+2"):
        folder.checkpoint(name).mkdir(parents=True)
    for requested, name in (("5", "step=5"), ("05", "step=5"), ("step=5", "step=5"), ("5+2", "step=5+2"),
                            ("last", "step=5+2")):
        assert folder.resolve(requested).name == name


@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize("command", ["fit", "validate"])
def test_a_checkpoint_file_of_another_program_is_rejected_unread(recipe, tmp_path, capfd, engine, command):
    path = tmp_path / "epoch=1.ckpt"
    path.write_bytes(b"not even a pickle")
    assert main([command, *recipe(engine=engine, model__init_args__quantize=None), "--ckpt_path", str(path)]) == 2
    assert f"--ckpt_path {path} is a single file" in capfd.readouterr().err


@pytest.mark.parametrize("content", ["[]", "model: 7", "{", "", "model: {class_path: SFT}", "model: {init_args: {}}"])
def test_commands_reject_a_config_that_no_run_wrote(tmp_path, content):
    folder = RunFolder(tmp_path)
    write_text(folder.config, content)
    write_text(folder.model / "config.json", "{}")
    with pytest.raises(UserError, match="config.yaml"):
        FinishedRun.read(str(tmp_path), "merge")
