"""A kill matrix: SIGKILL at each moment of a run that leaves something on disk; the run goes on and ends the same.

Killed runs are forks of a server that has the libraries loaded, so a case costs its training only.
"""

import multiprocessing
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from lmmods.cli import main
from lmmods.runs.folder import RunFolder
from tests.runs import assert_same_run

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["lmmods.torch_engine.trainer", "lmmods.commands.engine_cli", "jax_engine.trainer",
                                "peft", "bitsandbytes"])

# A moment is a call and what its arguments look like: the process is killed right before it, or right after.
MOMENTS = {
    "training": ("before", "train_batch", "5"),
    "inside a step": ("before", "train_batch", "6"),
    "validating": ("before", "evaluate", "1"),
    "a checkpoint's files are written": ("before", "replace", r"state\.json$"),
    "a checkpoint is about to stand": ("before", "replace", r"checkpoints/step=4$"),
    "a checkpoint stands, last does not point to it": ("after", "replace", r"checkpoints/step=4$"),
    "last points to it, best does not": ("after", "replace", r"checkpoints/last$"),
    "an old checkpoint is about to go": ("before", "rmtree", r"checkpoints/\.?\w*step=2"),
    "the last checkpoint stands, nothing is exported": ("after", "replace", r"checkpoints/step=6$"),
    "the model is about to stand": ("before", "replace", r"run/model$"),
    "the model stands, the run is not marked": ("after", "replace", r"run/model$"),
    "the run is about to be marked": ("before", "touch", r"completed$"),
}


def killed_run(arguments: list[str], when: str, call: str, pattern: str) -> None:
    """Run a command in this process until the moment comes, and die of SIGKILL."""
    left = [int(pattern) if pattern.isdigit() else 1]

    def watched(function, path_of):
        def wrapper(*args, **kwargs):
            hit = pattern.isdigit() or re.search(pattern, str(path_of(*args, **kwargs)))
            left[0] -= bool(hit)
            if hit and left[0] == 0 and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if hit and left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        return wrapper

    if call in ("train_batch", "evaluate"):
        from jax_engine.evaluation import Evaluation
        from jax_engine.loop import Loop
        from lmmods.torch_engine.callbacks.startup_report import StartReport
        from lmmods.torch_engine.tasks.base import TaskModule

        batch = (StartReport, "on_train_batch_start"), (Loop, "train_batch")
        evaluation = (TaskModule, "on_validation_batch_start"), (Evaluation, "evaluate")
        for owner, name in batch if call == "train_batch" else evaluation:
            setattr(owner, name, watched(getattr(owner, name, lambda *_: None), lambda *_, **__: ""))
    elif call == "replace":
        os.replace = watched(os.replace, lambda _, target, **__: target)
    elif call == "rmtree":
        shutil.rmtree = watched(shutil.rmtree, lambda path, *_, **__: path)
    else:
        Path.touch = watched(Path.touch, lambda path, *_, **__: path)
    main(arguments)


@pytest.fixture(scope="module")
def straight(request, tmp_path_factory):
    """Engine -> a run that nobody disturbed; made once."""
    made: dict[str, RunFolder] = {}

    def run(engine: str, arguments: list[str], root: Path) -> RunFolder:
        if engine not in made:
            assert main(["fit", *arguments]) == 0
            kept = tmp_path_factory.mktemp("straight") / "run"
            shutil.move(root, kept)
            made[engine] = RunFolder(kept)
        return made[engine]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_killed_and_gone_on(engine, moment, recipe, straight, tmp_path, capfd):
    root = tmp_path / "run"
    arguments = recipe(engine=engine, trainer__accumulate_grad_batches=2, trainer__default_root_dir=str(root),
                       checkpoint={"every_n_steps": 2, "keep_last": 1}, trainer__val_check_interval=8)
    whole = straight(engine, arguments, root)
    process = CONTEXT.Process(target=killed_run, args=(["fit", *arguments], *MOMENTS[moment]))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL, capfd.readouterr().err
    run = RunFolder(root)
    assert not run.completed.exists()
    goes_on = ["--ckpt_path", "last"] if run.names() else ["--overwrite", "true"]
    assert main(["fit", *arguments, *goes_on]) == 0, capfd.readouterr().err
    assert_same_run(whole, run)
    assert not [path for path in root.rglob(".*") if path.name.startswith((".step", ".model", ".last", ".best"))]
