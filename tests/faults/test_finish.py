"""The end of a run: an interrupted export is repeated, a finished run is reported, a run without checkpoints stops."""

import json
import signal

import pytest

from lmmods.cli import main
from lmmods.runs.folder import RunFolder
from lmmods.runs.run_files import files_in

ENGINES = pytest.mark.parametrize("engine", ["torch", "jax"])
SLOW_ON_JAX = pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
PLAIN = {"model__init_args__quantize": None, "model__init_args__lora": {"rank": 2}, "trainer__max_steps": 4}
BY_EPOCHS = {**PLAIN, "trainer__max_steps": -1, "trainer__max_epochs": 1}
TIMED = "train/tokens_per_second"


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def read_contents(run: RunFolder) -> dict[str, object]:
    """Return the contents of a run's files, without times, paths and the list of its own files."""
    contents: dict[str, object] = {}
    names = {path for path in files_in(run.root) if not (run.root / path).is_symlink()}
    for name in names - {"config.yaml", "metrics.csv", "model/loss.png", "loss.png", ".run-files.json",
                         "resumes.jsonl"}:
        data = (run.root / name).read_bytes()
        if name in ("metrics.json",) or name.endswith("state.json"):
            data = json.loads(data)
            (data if name == "metrics.json" else data["callbacks"]["Metrics"]["latest"]).pop(TIMED)
        if not name.endswith(("manifest.json", "README.md")):  # derived from files that are compared
            contents[name] = data
    return contents


@SLOW_ON_JAX
@pytest.mark.parametrize("changes", [PLAIN, pytest.param(BY_EPOCHS, marks=pytest.mark.slow)], ids=["steps", "epochs"])
def test_a_run_killed_during_export_resumes_to_the_same_files(recipe, tmp_path, monkeypatch, engine, changes):
    changes = {**changes, "engine": engine, "samples": {"prompts": ["Add 1 and 2."], "every_n_steps": 3,
                                                        "max_new_tokens": 3}}
    uninterrupted, killed = RunFolder(tmp_path / "straight"), RunFolder(tmp_path / "broken")
    assert main(["fit", *recipe(**changes, trainer__default_root_dir=str(uninterrupted.root))]) == 0
    arguments = recipe(**changes, trainer__default_root_dir=str(killed.root))
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "replace_model", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            main(["fit", *arguments])
    assert not killed.completed.exists() and not killed.model.exists()
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert killed.completed.exists()
    expected, actual = read_contents(uninterrupted), read_contents(killed)
    assert expected.keys() == actual.keys() and {name for name in expected if expected[name] != actual[name]} == set()


@ENGINES
def test_a_finished_run_is_unchanged_unless_max_steps_is_raised(recipe, tmp_path, engine, capfd):
    run = RunFolder(tmp_path / "run")
    assert main(["fit", *recipe(engine=engine, **PLAIN)]) == 0
    before = {name: (run.root / name).stat().st_mtime_ns for name in files_in(run.root)}
    capfd.readouterr()
    assert main(["fit", *recipe(engine=engine, **PLAIN), "--ckpt_path", "last"]) == 0
    output = capfd.readouterr().out
    assert (f"{run.root} already contains a run that finished at step 4. Nothing was changed: trainer.max_steps is 4. "
            "Raise it to train longer.") in output
    assert {name: (run.root / name).stat().st_mtime_ns for name in files_in(run.root)} == before
    assert main(["fit", *recipe(engine=engine, **{**PLAIN, "trainer__max_steps": 5}), "--ckpt_path", "last"]) == 0
    assert run.names()[-1] == "step=5" and run.completed.exists()


@ENGINES
def test_an_unfinished_run_beyond_max_steps_is_exported_as_it_is(recipe, tmp_path, monkeypatch, engine, capfd):
    run = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "replace_model", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            main(["fit", *recipe(engine=engine, **PLAIN)])
    assert main(["fit", *recipe(engine=engine, **{**PLAIN, "trainer__max_steps": 2}), "--ckpt_path", "last"]) == 0
    assert "contains a run that stopped at step 4, before its end. Writing its results now" in capfd.readouterr().out
    assert run.completed.exists() and run.model.is_dir()


@ENGINES
def test_a_full_disk_during_export_is_one_message_and_the_run_resumes(recipe, tmp_path, monkeypatch, engine, capfd):
    run = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        full = OSError(28, "No space left on device", "model")
        patch.setattr(RunFolder, "replace_model", lambda *_: (_ for _ in ()).throw(full))
        assert main(["fit", *recipe(engine=engine, **PLAIN)]) == 2
    error = capfd.readouterr().err
    assert "No space left on device" in error and "--ckpt_path last" in error and "Traceback" not in error
    assert main(["fit", *recipe(engine=engine, **PLAIN), "--ckpt_path", "last"]) == 0
    assert run.completed.exists()


@SLOW_ON_JAX
def test_without_checkpoints_the_first_signal_ends_the_run(recipe, tmp_path, engine, capfd, monkeypatch):
    """The signal comes inside a step of two micro-batches, which is abandoned."""
    from lmmods.core.signals import Interruption

    arguments = recipe(engine=engine, **{**PLAIN, "trainer__max_steps": 9}, trainer__enable_checkpointing=False,
                       trainer__accumulate_grad_batches=2, trainer__limit_val_batches=0)
    listen = Interruption.listen

    def listen_and_hear(interruption: Interruption) -> None:
        listen(interruption)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Interruption, "listen", listen_and_hear)
    assert main(["fit", *arguments]) == 130
    output = capfd.readouterr()
    assert "Interrupted at step 0. Nothing was saved: trainer.enable_checkpointing is false." in output.err
    assert "saving" not in output.out and "ckpt_path" not in output.out + output.err
    assert not any(tmp_path.joinpath("run").glob("checkpoints/*"))
