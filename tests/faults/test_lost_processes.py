"""A killed or failed process ends the others with a message; the run resumes with another number of processes."""

import contextlib
import json
import os
import random
import re
import resource
import signal
import socket
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from lmmods.cli import main
from lmmods.runs.checkpoint import read_checkpoint
from lmmods.runs.folder import RunFolder
from tests.faults.test_kills import killed_run
from tests.finished_runs import TIMED, rows
from tests.forks import Fork, environments, train


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "processes", "lost"), [("torch", 2, 1), ("jax", 4, 2)])
def test_lost_processes_end_the_others_and_one_process_resumes_the_run(
        engine, processes, lost, recipe, finished, tmp_path, capfd):
    """The last ones, before the fourth of six steps; `--ckpt_path auto` both starts and resumes the run."""
    common = {"engine": engine, "model__init_args__optimizer": {"lr": 0.003}, "data__init_args__val_size": 0,
              "checkpoint": {"every_n_steps": 2}, "data__init_args__batch_size": 8 // processes}
    alone_changes = {"trainer__accumulate_grad_batches": processes}
    uninterrupted = finished(**common, **alone_changes)
    root = str(tmp_path / "run")
    arguments = recipe("all.yaml", **common, trainer__default_root_dir=root,
                       trainer__strategy="ddp" if engine == "torch" else "fsdp",
                       trainer__devices=processes if engine == "torch" else 1)
    command, forks = ["fit", *arguments, "--ckpt_path", "auto"], []
    for rank, environment in enumerate(environments(processes)):
        environment |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
        forks.append(Fork(train, *command, **environment) if rank < processes - lost else
                     Fork(killed_run, command, "before", "train_batch", "4", **environment))
    for fork in forks[-lost:]:
        output = fork.communicate()
        assert fork.returncode == -signal.SIGKILL, output
    killed = time.perf_counter()
    outputs = [fork.communicate() for fork in forks[:-lost]]
    assert time.perf_counter() - killed < 15
    assert {fork.returncode for fork in forks[:-lost]} == {75} and "Traceback" not in "".join(outputs), outputs
    assert all(f"{rank} on " in outputs[0].partition("error: Lost process ")[2]
               for rank in range(processes - lost, processes)), outputs

    one_arguments = recipe("one.yaml", **common, **alone_changes, trainer__default_root_dir=root)
    assert main(["fit", *one_arguments, "--ckpt_path", "auto"]) == 0
    assert "Resumed at step 2 from" in capfd.readouterr().out
    run = type(uninterrupted)(root)
    skipped = TIMED | {"train/epoch"}
    for row, expected_row in zip(rows(run, skipped), rows(uninterrupted, skipped), strict=True):
        assert row == pytest.approx(expected_row, rel=1e-4)
    weights, expected = (read_checkpoint(folder.resolve("last"))["state_dict"] for folder in (run, uninterrupted))
    assert all(np.abs(weights[name] - array).max() < 1e-4 for name, array in expected.items())
    assert json.loads(run.resumes.read_text())["step"] == 2


def train_on_a_full_disk(*arguments: str) -> None:
    """Run a command in a process whose files cannot grow beyond 30,000 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
    jax.config.update("jax_enable_compilation_cache", False)  # its files are larger
    train(*arguments)


def wait_for_all(forks: list[Fork]) -> list[str]:
    """Return the output of processes, which must all end within ten seconds of the first."""
    while all(fork.poll() is None for fork in forks):
        time.sleep(0.05)
    start = time.monotonic()
    outputs = [fork.communicate(30) for fork in forks]
    assert time.monotonic() - start < 10, outputs
    return outputs


SHARDED = {"class_path": "lmmods.strategies.FSDP2", "init_args": {"sharded_checkpoints": True}}


@pytest.mark.slow
@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_full_disk_of_one_process_ends_all_processes(engine, full, recipe, tmp_path, capfd):
    """While it writes its shard of step 10's checkpoint, long before the next one."""
    run, common = RunFolder(tmp_path / "run"), {
        "engine": engine, "trainer__max_steps": 30, "model__init_args__quantize": None, "model__init_args__lora": None,
        "data__init_args__val_size": 0, "checkpoint": {"every_n_steps": 10, "keep_last": 9}}
    alone = recipe("alone.yaml", **common)
    assert main(["fit", *alone, "--stop_at", "2"]) == 0
    command = ["fit", *recipe("two.yaml", **common, data__init_args__batch_size=2,
                              trainer__strategy=SHARDED if engine == "torch" else "fsdp",
                              trainer__devices=2 if engine == "torch" else 1), "--ckpt_path", "last"]
    forks = [Fork(train_on_a_full_disk if rank == full else train, *command, **environment, LOCAL_RANK=str(rank),
                  NODE_RANK="0")
             for rank, environment in enumerate(environments(2))]
    outputs = wait_for_all(forks)
    assert "checkpoints/step=10 could not be saved: File too large. It takes 0." in outputs[full], outputs
    assert [len(re.findall("^error: ", text, re.M)) for text in outputs] == [1, 1], outputs
    assert not re.search("Traceback|stack trace", "".join(outputs)), outputs
    assert re.search(rf"error: (Process {full} on .* failed|.*another process failed to write)",
                     outputs[1 - full]), outputs
    assert forks[full].returncode == 2 and forks[1 - full].returncode in (1, 2), outputs
    assert run.names() == ["step=2"] and rows(run)[-1]["step"] < 20
    assert main(["fit", *alone, "--ckpt_path", "last", "--stop_at", "3"]) == 0
    assert run.names() == ["step=2", "step=3"] and not list(run.checkpoints.glob(".step=*"))


# Started by srun -------------------------------------------------------------------------------------------------


def srun_environments(processes: int) -> list[dict[str, str]]:
    """Return the environment of each srun task on one machine; the job id determines the ports."""
    while True:
        job = random.randrange(1_000, 9_900)
        with contextlib.suppress(OSError), contextlib.ExitStack() as ports:
            for port in (15_000 + job, 15_002 + job, 61_440 + job % 4096):  # of torch, of this project, of JAX
                ports.enter_context(socket.socket()).bind(("", port))
            break
    common = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(processes), "SLURM_JOB_NAME": "sft",
              "SLURM_STEP_NUM_TASKS": str(processes), "SLURM_NTASKS_PER_NODE": str(processes), "SLURM_NNODES": "1",
              "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", **dict.fromkeys(
                  ("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"), "localhost")}
    return [{**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(processes)]


def train_in_folder(folder: str, *arguments: str) -> None:
    os.chdir(folder)
    train(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_file_missing_only_for_the_first_srun_task_ends_all(engine, recipe, instructions, tmp_path):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
    (here / "rows.jsonl").write_bytes(Path(instructions).read_bytes())
    arguments = recipe(engine=engine, data__init_args__source="rows.jsonl", trainer__strategy="ddp",
                       trainer__devices=2 if engine == "torch" else 1)
    forks = [Fork(train_in_folder, str(folder), "fit", *arguments, **environment)
             for folder, environment in zip((elsewhere, here), srun_environments(2), strict=True)]
    outputs = wait_for_all(forks)
    message = f"error: rows.jsonl: no such file or folder (working directory {elsewhere})\n"
    assert forks[0].returncode == 2 and outputs[0].endswith(message) and "Traceback" not in "".join(outputs), outputs
    if engine == "torch":  # before the processes know each other
        assert forks[1].returncode == 1, outputs
        assert outputs[1] == (f"error: Process 0 on {socket.gethostname()} (PID {forks[0].pid}) failed, "
                              "so this process exits.\n")
    else:
        assert forks[1].returncode == 2 and outputs[1].endswith(message), outputs


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_run_folder_rejected_by_the_first_srun_task_ends_all(engine, recipe, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("of another run")
    arguments = recipe(engine=engine, trainer__strategy="ddp", trainer__devices=2 if engine == "torch" else 1)
    forks = [Fork(train, "fit", *arguments, **environment) for environment in srun_environments(2)]
    outputs = wait_for_all(forks)
    assert [fork.returncode for fork in forks] == [2, 2] and "Traceback" not in "".join(outputs), outputs
    assert all(text.endswith(f"error: {folder} contains config.yaml, which no run wrote, but a run needs this name. "
                             "Move it, or set another trainer.default_root_dir.\n") for text in outputs), outputs
