"""Processes are killed while they train; the others end with a message, and another number goes on."""

import json
import signal
import time

import numpy as np
import pytest

from lmmods.cli import main
from lmmods.runs.checkpoint_io import read_checkpoint
from tests.faults.test_kills import killed_run
from tests.forks import Fork, environments, train
from tests.runs import TIMED, rows


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "processes", "lost"), [("torch", 2, 1), ("jax", 4, 2)])
def test_processes_are_killed_and_one_goes_on(engine, processes, lost, recipe, finished, tmp_path, capfd):
    """The last ones, before the fourth of six steps; `--ckpt_path auto` begins the run and goes on with it."""
    common = {"engine": engine, "model__init_args__optimizer": {"lr": 0.003}, "data__init_args__val_size": 0,
              "checkpoint": {"every_n_steps": 2}, "data__init_args__batch_size": 8 // processes}
    alone = {"trainer__accumulate_grad_batches": processes}
    whole = finished(**common, **alone)
    root = str(tmp_path / "run")
    all_of_them = recipe("all.yaml", **common, trainer__default_root_dir=root,
                         trainer__strategy="ddp" if engine == "torch" else "fsdp",
                         trainer__devices=processes if engine == "torch" else 1)
    begun, forks = ["fit", *all_of_them, "--ckpt_path", "auto"], []
    for rank, own in enumerate(environments(processes)):
        own |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
        forks.append(Fork(train, *begun, **own) if rank < processes - lost else
                     Fork(killed_run, begun, "before", "train_batch", "4", **own))
    for fork in forks[-lost:]:
        said = fork.communicate()
        assert fork.returncode == -signal.SIGKILL, said
    killed = time.perf_counter()
    told = [fork.communicate() for fork in forks[:-lost]]
    assert time.perf_counter() - killed < 15
    assert {fork.returncode for fork in forks[:-lost]} == {75} and "Traceback" not in "".join(told), told
    assert all(f"{rank} on " in told[0].partition("error: Lost process ")[2]
               for rank in range(processes - lost, processes)), told

    one = recipe("one.yaml", **common, **alone, trainer__default_root_dir=root)
    assert main(["fit", *one, "--ckpt_path", "auto"]) == 0
    assert "Resumed at step 2 from" in capfd.readouterr().out
    run = type(whole)(root)
    for row, wanted in zip(rows(run, TIMED | {"train/epoch"}), rows(whole, TIMED | {"train/epoch"}), strict=True):
        assert row == pytest.approx(wanted, rel=1e-4)
    weights, expected = (read_checkpoint(each.resolve("last"))["state_dict"] for each in (run, whole))
    assert all(np.abs(weights[name] - array).max() < 1e-4 for name, array in expected.items())
    assert json.loads(run.resumes.read_text())["step"] == 2
