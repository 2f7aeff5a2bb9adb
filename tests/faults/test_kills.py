"""A kill matrix: SIGKILL at each moment of a run that leaves something on disk; the run goes on and ends the same."""

import os
import re
import shutil
import signal

import pytest

from lmmods.cli import main
from lmmods.runs.folder import RunFolder
from tests.finished_runs import assert_same_run
from tests.forks import Fork

# A moment is a call and what its arguments look like: the process is killed right before it, or right after.
MOMENTS = {
    "training": ("before", "train_batch", "5"),
    "inside a step": ("before", "train_batch", "6"),
    "validating": ("before", "evaluate", "1"),
    "a checkpoint's files are written": ("before", "replace", r"state\.json$"),
    "a checkpoint is about to stand": ("before", "replace", r"checkpoints/step=4$"),
    "a checkpoint stands, last does not point to it": ("after", "replace", r"checkpoints/step=4$"),
    "last points to it, best does not": ("after", "replace", r"checkpoints/last$"),
    "an old checkpoint is about to go": ("before", "rmtree", r"checkpoints/\.dropped-step=2$"),
    "the last checkpoint stands, nothing is exported": ("after", "replace", r"checkpoints/step=6$"),
    "the model is about to stand": ("before", "replace", r"run/model$"),
    "the model stands, the run is not marked": ("after", "replace", r"run/model$"),
    "the run is about to be marked": ("before", "replace", r"run/completed$"),
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
        from jax_engine.distributed.steps import Steps
        from jax_engine.trainer import Evaluation
        from lmmods.torch_engine.callbacks.run_events import StartReport
        from lmmods.torch_engine.tasks.base import TaskModule

        batch = (StartReport, "on_before_backward"), (Steps, "accumulate"), (Steps, "full_step")
        evaluation = (TaskModule, "on_validation_batch_start"), (Evaluation, "evaluate")
        for owner, name in batch if call == "train_batch" else evaluation:
            setattr(owner, name, watched(getattr(owner, name, lambda *_: None), lambda *_, **__: ""))
    elif call == "replace":
        os.replace = watched(os.replace, lambda _, target, **__: target)
    else:
        shutil.rmtree = watched(shutil.rmtree, lambda path, *_, **__: path)
    main(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_killed_and_gone_on(engine, moment, recipe, finished, tmp_path, capfd):
    root = tmp_path / "run"
    changes = {"engine": engine, "trainer__accumulate_grad_batches": 2, "trainer__val_check_interval": 4,
               "checkpoint": {"every_n_steps": 2, "keep_last": 1}}
    whole, arguments = finished(**changes), recipe(**changes, trainer__default_root_dir=str(root))
    process = Fork(killed_run, ["fit", *arguments], *MOMENTS[moment])
    said = process.communicate()
    assert process.returncode == -signal.SIGKILL, said
    run = RunFolder(root)
    assert not run.completed.exists()
    goes_on = ["--ckpt_path", "last"] if run.names() else ["--overwrite", "true"]
    assert main(["fit", *arguments, *goes_on]) == 0, capfd.readouterr().err
    assert_same_run(whole, run)
    assert not [path for path in root.rglob(".*") if path.name.startswith((".step", ".model", ".last", ".best"))]
