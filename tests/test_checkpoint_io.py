"""A checkpoint folder: arrays of any kind come back, by shards too; written beside training, and through a kill."""

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from lmmods.core.errors import UserError
from lmmods.runs import checkpoint_io
from lmmods.runs.checkpoint_io import BackgroundWriter, Writers, read_checkpoint, write_checkpoint
from lmmods.torch_engine.checkpoint_io import TORCH
from tests.forks import Fork
from tests.test_checkpoint_format import same


def test_shards_of_several_processes_are_read_by_both_engines(tmp_path):
    """Two processes; the barriers let the second write when the first has made the folder, and before it ends it."""
    whole = {"w": torch.arange(12.0).view(4, 3), "b": torch.arange(2.0)}
    step = torch.tensor(7.0)

    def content(rank: int) -> dict:
        shard = {name: tensor.chunk(2)[rank] for name, tensor in whole.items()}
        return {"state_dict": shard, "optimizer_states": [{"state": {0: {"step": step, "m": shard["w"]}}}],
                "sums": torch.ones(4), "global_step": 3}

    waits = iter([lambda: None, lambda: write_checkpoint(tmp_path / "c", content(1), TORCH, Writers(1, 2))])
    write_checkpoint(tmp_path / "c", content(0), TORCH, Writers(0, 2, lambda: next(waits)()))
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "manifest.json", "model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors",
        "optimizer-00000-of-00002.safetensors", "optimizer-00001-of-00002.safetensors", "state.json",
        "state.safetensors"]
    on_torch, on_jax = read_checkpoint(tmp_path / "c", TORCH), read_checkpoint(tmp_path / "c")
    for name, tensor in whole.items():
        assert torch.equal(on_torch["state_dict"][name], tensor)
        assert np.array_equal(on_jax["state_dict"][name], tensor.numpy())
    for found in (on_torch, on_jax):
        (optimizer,) = found["optimizer_states"]
        assert optimizer["state"][0]["step"] == 7 and optimizer["state"][0]["m"].shape == (4, 3)
        assert found["sums"].shape == (4,) and found["global_step"] == 3


def test_damage_is_found(tmp_path):
    write_checkpoint(tmp_path / "c", {"state_dict": {"a": np.arange(3.0)}, "optimizer_states": []})
    with open(tmp_path / "c" / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    with pytest.raises(UserError, match="model.safetensors is not as it was written"):
        read_checkpoint(tmp_path / "c")


def test_arrays_of_any_layout_and_dtype(tmp_path):
    import ml_dtypes

    arrays = {"view": np.arange(6.0).reshape(2, 3).T, "scalar": np.array(2.5, np.float32),
              "half": np.arange(3).astype(ml_dtypes.bfloat16), "integers": np.arange(3)}
    write_checkpoint(tmp_path / "c", {"state_dict": arrays, "plain": {"list": [1, "x", None]}})
    content = read_checkpoint(tmp_path / "c")
    assert same(content["state_dict"], arrays) and content["plain"] == {"list": [1, "x", None]}


def test_writing_happens_aside_and_its_errors_come_with_the_next_call(tmp_path, monkeypatch):
    writer, done = BackgroundWriter(), []
    writer.save(tmp_path / "first", {"x": np.ones(3)}, lambda: done.append((tmp_path / "first").is_dir()))
    writer.wait()
    assert done == [True] and np.array_equal(read_checkpoint(tmp_path / "first")["x"], np.ones(3))

    may_fail = threading.Event()

    def fails(*_):
        assert may_fail.wait(60)
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint_io, "write_checkpoint", fails)
    writer.save(tmp_path / "second", {})
    writer.check()  # still being written
    may_fail.set()
    with pytest.raises(OSError, match="disk full"):
        writer.save(tmp_path / "third", {})
    writer.wait()


def save_until_killed(folder: Path) -> None:
    checkpoint_io.commit_folder = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    writer = checkpoint_io.BackgroundWriter()
    writer.save(folder, {"x": np.zeros(3)})
    writer.wait()


@pytest.mark.slow  # the server of the forks takes seconds to start
def test_a_kill_during_the_save_leaves_the_old_one(tmp_path):
    folder = tmp_path / "step=2"
    write_checkpoint(folder, {"x": np.ones(3)})
    assert Fork(save_until_killed, folder).wait() == -signal.SIGKILL
    assert np.array_equal(read_checkpoint(folder)["x"], np.ones(3))
    assert ".step=2" in os.listdir(tmp_path)
