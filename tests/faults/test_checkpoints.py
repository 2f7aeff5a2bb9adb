"""Checkpoints under stress: tensors with shared memory, a full disk, a kill between any two file operations."""

import concurrent.futures
import errno
import json
import math
import os
import resource
import shutil
import signal
import subprocess
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.core.settings import Optimizer, OptimizerName
from lmmods.runs.checkpoint import BackgroundWriter, read_checkpoint, write_checkpoint
from lmmods.runs.checkpoint_policy import CheckpointPolicy
from lmmods.runs.folder import RunFolder, checkpoint_name
from lmmods.torch_engine.callbacks.checkpoint import TORCH, FolderCheckpointIO
from lmmods.torch_engine.nn.optim import build_optimizer
from tests.finished_runs import assert_same_checkpoint

OPTIMIZERS = get_args(OptimizerName)


# Optimisers -------------------------------------------------------------------------------------------------------


def make_settings(name: str) -> Optimizer:
    return Optimizer(name=name, lr=1e-2, weight_decay=0.1, momentum=0.9)


class BareOptimizer:
    """An optimiser of two matrices, whose state bitsandbytes keeps in 8 bits, and a vector, whose state it does not."""

    def __init__(self, name: str, dtype: torch.dtype):
        random = torch.Generator().manual_seed(0)
        self.named = [(key, torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)))
                      for key, shape in (("a", (64, 64)), ("b", (96, 64)), ("c", (64,)))]
        self.optimizer = build_optimizer(self.named, make_settings(name))

    def step(self, index: int) -> None:
        random = torch.Generator().manual_seed(index)
        for _, param in self.named:
            param.grad = torch.randn(param.shape, generator=random).to(param.dtype)
        self.optimizer.step()

    def content(self) -> dict:
        return {"state_dict": {name: param.detach() for name, param in self.named},
                "optimizer_states": [self.optimizer.state_dict()]}

    def restore(self, content: dict) -> None:
        for name, param in self.named:
            param.data.copy_(content["state_dict"][name])
        self.optimizer.load_state_dict(content["optimizer_states"][0])


def is_same(first, second) -> bool:
    """Return whether two trees have the same types and bits."""
    if torch.is_tensor(first):
        return torch.is_tensor(second) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(is_same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and len(first) == len(second) and all(map(is_same, first, second))
    return type(first) is type(second) and first == second


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_every_optimiser_resumes_from_a_checkpoint(tmp_path, name, dtype):
    uninterrupted, interrupted, resumed = (BareOptimizer(name, dtype) for _ in range(3))
    for step in range(3):
        uninterrupted.step(step)
        interrupted.step(step)
    write_checkpoint(tmp_path / "step=3", interrupted.content(), TORCH)
    resumed.restore(read_checkpoint(tmp_path / "step=3", TORCH))
    assert is_same(resumed.content(), uninterrupted.content())
    for step in range(3, 6):
        uninterrupted.step(step)
        resumed.step(step)
    assert is_same(resumed.content(), uninterrupted.content())
    stored = load_file(tmp_path / "step=3" / "optimizer.safetensors") if name != "sgd" else {}
    num_8bit = sum(tensor.numel() for tensor in stored.values() if tensor.dtype == torch.uint8)
    assert num_8bit == ("8bit" in name) * (64 * 64 + 96 * 64) * (2 if "adamw" in name else 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_jax_reads_the_state_of_every_optimiser(tmp_path, name):
    bare = BareOptimizer(name, torch.float32)
    bare.step(0)
    write_checkpoint(tmp_path / "c", bare.content(), TORCH)
    from_torch, from_numpy = read_checkpoint(tmp_path / "c", TORCH), read_checkpoint(tmp_path / "c")

    def as_torch(node):
        if isinstance(node, dict):
            return {key: as_torch(value) for key, value in node.items()}
        if isinstance(node, (list, tuple)):
            return type(node)(map(as_torch, node))
        return torch.from_numpy(node) if isinstance(node, np.ndarray) else node

    assert is_same(as_torch(from_numpy["optimizer_states"]), from_torch["optimizer_states"])


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_lion_8bit", "sgd_8bit"])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_a_run_with_an_8_bit_optimiser_resumes_with_the_same_bits(recipe, tmp_path, stop_at, name):
    changes = {"model__init_args__quantize": None, "model__init_args__lora": None, "trainer__max_steps": 4,
               "model__init_args__optimizer": {"name": name, "lr": 0.01, "momentum": 0.9},
               "data__init_args__val_size": 0, "trainer__limit_val_batches": 0}
    uninterrupted, interrupted = RunFolder(tmp_path / "straight"), RunFolder(tmp_path / "broken")
    assert main(["fit", *recipe(**changes, trainer__default_root_dir=str(uninterrupted.root))]) == 0
    arguments = recipe(**changes, trainer__default_root_dir=str(interrupted.root))
    stop_at(2)
    assert main(["fit", *arguments]) == 130
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert_same_checkpoint(uninterrupted, interrupted)
    stored = load_file(interrupted.resolve("last") / "optimizer.safetensors")
    assert any(tensor.dtype == torch.uint8 for tensor in stored.values())


def test_shared_memory_is_written_once_and_shared_after_reading(tmp_path):
    memory = torch.arange(8.0)
    content = {"optimizer_states": [{"book": memory, "again": memory, "other name": memory.view(8)}],
               "part": memory[2:6], "overlaps": memory[4:], "every second": memory[::2],
               "nothing": torch.empty(0), "nothing either": torch.empty(0, 3)}
    write_checkpoint(tmp_path / "c", content, TORCH)
    restored = read_checkpoint(tmp_path / "c", TORCH)
    assert is_same(restored, content)
    (entry,) = restored["optimizer_states"]
    assert entry["book"].data_ptr() == entry["again"].data_ptr() == entry["other name"].data_ptr()
    assert list(load_file(tmp_path / "c" / "optimizer.safetensors")) == ["0/book"]


# Retention -------------------------------------------------------------------------------------------------------

WRITERS = {"torch": lambda path, content: FolderCheckpointIO().save_checkpoint(content, path), "jax": write_checkpoint}
LOSSES = [3.0, math.nan, 2.0, 1.0, 4.0]


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def save_all(folder: RunFolder, policy: CheckpointPolicy, writer) -> None:
    for step, loss in enumerate(LOSSES):
        name = checkpoint_name(step)
        policy.rank({"val/loss": loss}, name)
        writer(folder.checkpoint(name), {"callbacks": {"Checkpoint": policy.state_dict()}, "global_step": step})
        policy.decide(name).apply(folder)


@pytest.fixture
def dies_at(monkeypatch):
    """Return a function that lets the process die before its n-th rename, link or deletion, and returns the counter."""
    count = {"left": -1, "done": 0}

    def count_calls(function):
        def call(*args, **kwargs):
            if count["left"] == count["done"]:
                raise Killed
            count["done"] += 1
            return function(*args, **kwargs)
        return call

    for module, name in ((os, "replace"), (os, "symlink"), (os, "unlink"), (os, "rmdir"), (shutil, "rmtree")):
        monkeypatch.setattr(module, name, count_calls(getattr(module, name)))

    def die_at(limit: int) -> dict:
        count.update(left=limit, done=0)
        return count

    return die_at


@pytest.mark.parametrize("engine", WRITERS)
def test_a_kill_between_any_two_file_operations_leaves_last_and_best(tmp_path, dies_at, engine):
    writer, rules = WRITERS[engine], {"keep_last": 1, "keep_best": 1}
    counter = dies_at(-1)
    save_all(RunFolder(tmp_path / "whole"), CheckpointPolicy(**rules), writer)
    total = counter["done"]
    assert total > 30
    for limit in range(total):
        folder = RunFolder(tmp_path / str(limit))
        dies_at(limit)
        with pytest.raises(Killed):
            save_all(folder, CheckpointPolicy(**rules), writer)
        dies_at(-1)
        for name in folder.names():
            read_checkpoint(folder.checkpoint(name))  # whole
        if not folder.names():
            continue
        last = folder.resolve("last")
        folder.check_can_resume(last, overwrite=False)
        if folder.checkpoints.joinpath("best").is_symlink():
            read_checkpoint(folder.resolve("best"))
        folder.begin(last)
        policy = CheckpointPolicy(**rules)
        policy.load_state_dict(read_checkpoint(last)["callbacks"]["Checkpoint"])
        policy.resume(folder, last)
        losses = [loss for loss in LOSSES[: read_checkpoint(last)["global_step"] + 1] if math.isfinite(loss)]
        assert [value for value, _ in policy.best] == [min(losses)]
        assert folder.resolve("best").name == policy.best[0][1]
        assert set(folder.names()) == {last.name, folder.resolve("best").name}
        assert sorted(path.name for path in folder.checkpoints.iterdir()) == sorted({*folder.names(), "last", "best"})


def test_retention_is_decided_when_a_checkpoint_is_written(tmp_path):
    """The background thread deletes old checkpoints after the next one was ranked; the best written one must stay."""
    folder, policy = RunFolder(tmp_path), CheckpointPolicy(keep_last=1)
    for step, loss in enumerate([1.0, 5.0]):
        policy.rank({"val/loss": loss}, f"step={step}")
        write_checkpoint(folder.checkpoint(f"step={step}"), policy.state_dict())
        decision = policy.decide(f"step={step}")
    policy.rank({"val/loss": 0.5}, "step=2")  # not yet written
    decision.apply(folder)
    assert folder.names() == ["step=0", "step=1"] and folder.resolve("best").name == "step=0"


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_non_finite_value_is_never_the_best(mode):
    policy = CheckpointPolicy(keep_best=2, mode=mode)
    for step, value in enumerate([math.nan, math.inf, 2.0, -math.inf, 1.0, 3.0, math.nan]):
        policy.rank({"val/loss": value}, f"step={step}")
    assert [value for value, _ in policy.best] == ([1.0, 2.0] if mode == "min" else [3.0, 2.0])
    old_state = json.loads('{"best": [[NaN, "step=0"], [Infinity, "step=1"], [2.0, "step=2"]]}')
    policy.load_state_dict(old_state)
    assert policy.best == [(2.0, "step=2")]
    policy.rank({"val/loss": 1.5}, "step=3")
    assert policy.best[0][1] == ("step=3" if mode == "min" else "step=2")


def test_values_of_another_metric_are_dropped():
    before, after = CheckpointPolicy(monitor="val/loss"), CheckpointPolicy(monitor="val/f1", mode="max")
    before.rank({"val/loss": 0.5}, "step=1")
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.best == []


# A full disk ------------------------------------------------------------------------------------------------------


def assert_reported_and_complete(folder: RunFolder, failed: str, error: str) -> None:
    assert "error: " in error and f"{failed} could not be saved" in error and "--ckpt_path last" in error
    assert "Traceback" not in error
    assert {path.name for path in folder.checkpoints.iterdir()} <= {*folder.names(), "last", "best"}
    for name in folder.names():
        read_checkpoint(folder.checkpoint(name))


@pytest.mark.slow
@pytest.mark.parametrize("engine, code", [("torch", errno.ENOSPC), ("torch", errno.EDQUOT), ("torch", errno.EIO),
                                          ("jax", errno.ENOSPC)],
                         ids=["torch-full", "torch-quota", "torch-io", "jax-full"])
def test_a_disk_that_fails_while_saving_is_reported(recipe, tmp_path, monkeypatch, capfd, engine, code):
    """The second checkpoint fails once; with free space again, the run resumes."""
    from lmmods.runs import checkpoint

    folder = RunFolder(tmp_path / "run")
    arguments = recipe(engine=engine, model__init_args__quantize=None, trainer__limit_val_batches=0,
                       model__init_args__lora={"rank": 2, "alpha": 4})
    write_manifest = checkpoint.write_manifest

    def fail(path: Path) -> None:
        if "step=4" in path.name:
            raise OSError(code, os.strerror(code))
        write_manifest(path)

    monkeypatch.setattr(checkpoint, "write_manifest", fail)
    assert main(["fit", *arguments]) == 2
    error = capfd.readouterr().err
    assert_reported_and_complete(folder, "step=4", error)
    assert os.strerror(code) in error and folder.resolve("last").name == "step=2"
    monkeypatch.undo()
    monkeypatch.setenv("LMMODS_CACHE", str(tmp_path / "cache"))
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert folder.names()[-1] == "step=6"


@pytest.fixture
def small_files():
    """Return a function that limits the size of all files of this process in bytes, as a full disk does."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("engine", WRITERS)
def test_a_file_size_limit_is_reported_and_leaves_no_partial_checkpoint(tmp_path, small_files, engine):
    folder, writer = RunFolder(tmp_path), WRITERS[engine]
    tensor = torch.zeros(100_000) if engine == "torch" else np.zeros(100_000, np.float32)
    writer(folder.checkpoint("step=1"), {"state_dict": {"x": tensor}})
    small_files(200_000)
    with pytest.raises(UserError, match="step=2 could not be saved: File too large. It takes 0.4 MiB, and .* MiB are "
                                        "free there. .* resume from the checkpoint before it, step=1"):
        writer(folder.checkpoint("step=2"), {"state_dict": {"x": tensor}})
    small_files(resource.RLIM_INFINITY)
    assert os.listdir(folder.checkpoints) == ["step=1"]
    read_checkpoint(folder.checkpoint("step=1"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting a small disk requires root")
@pytest.mark.parametrize("engine", WRITERS)
def test_a_full_disk_is_reported_and_leaves_no_partial_checkpoint(tmp_path, engine):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mount is not permitted")
    try:
        folder, writer = RunFolder(tmp_path / "run"), WRITERS[engine]
        tensor = torch.zeros(150_000) if engine == "torch" else np.zeros(150_000, np.float32)
        writer(folder.checkpoint("step=1"), {"state_dict": {"x": tensor}})
        with pytest.raises(UserError, match="step=2 could not be saved: No space left on device"):
            writer(folder.checkpoint("step=2"), {"state_dict": {"x": tensor}})
        assert os.listdir(folder.checkpoints) == ["step=1"]
        read_checkpoint(folder.checkpoint("step=1"))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_the_background_writer_reports_a_full_disk_at_the_next_step(tmp_path, small_files):
    writer = BackgroundWriter()
    small_files(1000)
    writer.save(tmp_path / "checkpoints" / "step=1", {"x": np.zeros(1000)})
    concurrent.futures.wait([writer._writing], timeout=60)
    small_files(resource.RLIM_INFINITY)
    with pytest.raises(UserError, match="There is no earlier checkpoint"):
        writer.check()
    writer.check()  # reported once


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_full_disk_while_writing_metrics_is_reported(recipe, monkeypatch, capfd, engine):
    from lmmods.runs.csv_logger import MetricsCSV

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(MetricsCSV, "_rewrite", fail)
    arguments = recipe(engine=engine, model__init_args__quantize=None, model__init_args__lora={"rank": 2, "alpha": 4})
    assert main(["fit", *arguments]) == 2
    assert "The disk cannot be written: No space left on device" in capfd.readouterr().err
