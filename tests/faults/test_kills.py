"""A kill matrix: SIGKILL around each write of a run to disk; the run resumes and ends with the same bits."""

import os
import re
import shutil
import signal

import pytest

from lmmods.cli import main
from lmmods.runs.folder import RunFolder
from tests.finished_runs import assert_same_run
from tests.forks import Fork

# Where one run is killed, time after time: right before or after the call whose arguments match, or before the n-th
# call of the process. Both engines write by the same code; the moments of `LOOP` also depend on the engine's loop.
MOMENTS = {
    "during training": {
        "between steps": ("before", "train_batch", "5"),
        "inside a step": ("before", "train_batch", "2"),
        "validating": ("before", "evaluate", "1"),
        "before state.json is renamed": ("before", "replace", r"state\.json$"),
        "before a checkpoint is renamed": ("before", "replace", r"checkpoints/step=4$"),
        "after a checkpoint is renamed, before last points to it": ("after", "replace", r"checkpoints/step=4$"),
        "after last points to it, before best does": ("after", "replace", r"checkpoints/last$"),
        "before an old checkpoint is deleted": ("before", "rmtree", r"checkpoints/\.dropped-step=2$"),
    },
    "at the end": {
        "after the last checkpoint, before the export": ("after", "replace", r"checkpoints/step=6$"),
        "before the model is renamed": ("before", "replace", r"run/model$"),
        "after the model is renamed, before the run is marked": ("after", "replace", r"run/model$"),
        "before the run is marked": ("before", "replace", r"run/completed$"),
    },
}
LOOP = ("between steps", "inside a step", "validating", "before a checkpoint is renamed",
        "after the last checkpoint, before the export", "before the run is marked")


def killed_run(arguments: list[str], when: str, call: str, pattern: str) -> None:
    """Run a command in this process and kill it with SIGKILL at the given moment."""
    num_left = [int(pattern) if pattern.isdigit() else 1]

    def kill_around(function, path_of):
        def wrapper(*args, **kwargs):
            is_match = pattern.isdigit() or re.search(pattern, str(path_of(*args, **kwargs)))
            num_left[0] -= bool(is_match)
            if is_match and num_left[0] == 0 and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if is_match and num_left[0] == 0:
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
            setattr(owner, name, kill_around(getattr(owner, name, lambda *_: None), lambda *_, **__: ""))
    elif call == "replace":
        os.replace = kill_around(os.replace, lambda _, target, **__: target)
    else:
        shutil.rmtree = kill_around(shutil.rmtree, lambda path, *_, **__: path)
    main(arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "phases"), [
    ("torch", ["during training"]), ("torch", ["at the end"]), ("jax", [*MOMENTS])],
    ids=["torch-training", "torch-end", "jax"])
def test_a_run_killed_time_after_time_ends_with_the_same_bits(engine, phases, recipe, finished, tmp_path, capfd):
    root = tmp_path / "run"
    changes = {"engine": engine, "trainer__accumulate_grad_batches": 2, "trainer__val_check_interval": 4,
               "checkpoint": {"every_n_steps": 2, "keep_last": 1}}
    uninterrupted, arguments = finished(**changes), recipe(**changes, trainer__default_root_dir=str(root))
    run = RunFolder(root)
    for name, moment in (item for phase in phases for item in MOMENTS[phase].items()):
        if engine == "torch" or name in LOOP:
            process = Fork(killed_run, ["fit", *arguments, *resume_if_saved(run)], *moment)
            output = process.communicate()
            assert process.returncode == -signal.SIGKILL, f"{name}: {output}"
            assert not run.completed.exists(), name
    assert main(["fit", *arguments, *resume_if_saved(run)]) == 0, capfd.readouterr().err
    assert_same_run(uninterrupted, run)
    assert not [path for path in root.rglob(".*") if path.name.startswith((".step", ".model", ".last", ".best"))]


def resume_if_saved(run: RunFolder) -> list[str]:
    """Return the options that continue a killed run, from the start if it has no checkpoint yet."""
    return ["--ckpt_path", "last"] if run.names() else ["--overwrite", "true"] if run.root.exists() else []
