"""One of two processes is killed while they train; the other one ends with a message, and any number goes on."""

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
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_process_is_killed_and_one_goes_on(engine, recipe, finished, tmp_path, capfd):
    """Before the fourth of six steps; `--ckpt_path auto` begins the run and goes on with it."""
    common = {"engine": engine, "model__init_args__optimizer": {"lr": 0.003}, "data__init_args__val_size": 0,
              "checkpoint": {"every_n_steps": 2}}
    alone = {"trainer__accumulate_grad_batches": 2}
    whole = finished(**common, **alone)
    root = str(tmp_path / "run")
    both = recipe("both.yaml", **common, trainer__default_root_dir=root, trainer__strategy="ddp",
                  trainer__devices=2 if engine == "torch" else 1)
    begun, joined = ["fit", *both, "--ckpt_path", "auto"], environments(2)
    first = Fork(train, *begun, **joined[0], LOCAL_RANK="0", NODE_RANK="0")
    second = Fork(killed_run, begun, "before", "train_batch", "4", **joined[1], LOCAL_RANK="1", NODE_RANK="0")
    said = second.communicate()
    killed = time.perf_counter()
    assert second.returncode == -signal.SIGKILL, said
    said = first.communicate()
    assert time.perf_counter() - killed < 15
    assert first.returncode == 75 and "error: Lost process 1 on " in said and "Traceback" not in said, said

    one = recipe("one.yaml", **common, **alone, trainer__default_root_dir=root)
    assert main(["fit", *one, "--ckpt_path", "auto"]) == 0
    assert "Resumed at step 2 from" in capfd.readouterr().out
    run = type(whole)(root)
    for row, wanted in zip(rows(run, TIMED | {"train/epoch"}), rows(whole, TIMED | {"train/epoch"}), strict=True):
        assert row == pytest.approx(wanted, rel=1e-4)
    weights, expected = (read_checkpoint(each.resolve("last"))["state_dict"] for each in (run, whole))
    assert all(np.abs(weights[name] - array).max() < 1e-4 for name, array in expected.items())
    assert json.loads(run.resumes.read_text())["step"] == 2
