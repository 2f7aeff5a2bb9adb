"""Checkpoint folders: arrays and shards survive a round trip, background writes and kills."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lmmods.core.errors import UserError
from lmmods.runs import checkpoint
from lmmods.runs.checkpoint import (
    BackgroundWriter,
    Shards,
    WriterRank,
    check_manifest,
    open_checkpoint,
    read_checkpoint,
    write_checkpoint,
    write_manifest,
)
from lmmods.torch_engine.callbacks.checkpoint import TORCH, copy_to_cpu
from tests.forks import Fork
from tests.runs.test_checkpoint_format import are_equal


def test_both_engines_read_shards_of_older_checkpoints(tmp_path):
    """Two processes' files of rows without offsets; the first also contains the scalars."""
    whole = {"w": torch.arange(12.0).view(4, 3), "b": torch.arange(2.0)}
    step = torch.tensor(7.0)
    write_checkpoint(tmp_path / "c", {
        "state_dict": whole, "optimizer_states": [{"state": {0: {"step": step, "m": whole["w"].clone()}}}],
        "sums": torch.ones(4), "global_step": 3}, TORCH)
    for group in ("model", "optimizer"):
        tensors = TORCH.load(tmp_path / "c" / f"{group}.safetensors")
        for rank in range(2):
            shard = {name: tensor.chunk(2)[rank] if tensor.ndim else tensor for name, tensor in tensors.items()
                     if tensor.ndim or rank == 0}
            TORCH.save(shard, tmp_path / "c" / f"{group}-{rank:05d}-of-00002.safetensors", {})
        (tmp_path / "c" / f"{group}.safetensors").unlink()
    (tmp_path / "c" / "manifest.json").unlink()
    write_manifest(tmp_path / "c")
    on_torch, on_jax = read_checkpoint(tmp_path / "c", TORCH), read_checkpoint(tmp_path / "c")
    by_parts = open_checkpoint(tmp_path / "c")
    for name, tensor in whole.items():
        assert torch.equal(on_torch["state_dict"][name], tensor)
        assert np.array_equal(on_jax["state_dict"][name], tensor.numpy())
        assert np.array_equal(by_parts["state_dict"][name], tensor.numpy())
    for content in (on_torch, on_jax, by_parts):
        (optimizer,) = content["optimizer_states"]
        assert optimizer["state"][0]["step"] == 7 and optimizer["state"][0]["m"].shape == (4, 3)
        assert content["sums"].shape == (4,) and content["global_step"] == 3


def build_shards(rank: int) -> dict:
    """Return one rank's part: of a matrix split by columns, of a vector on rank 0, and of replicated arrays."""
    matrix, step = np.arange(12.0, dtype=np.float32).reshape(4, 3), np.array(7.0)
    columns = (slice(0, 2), slice(2, 3))[rank]
    return {"state_dict": {"w": Shards((4, 3), (((0, columns.start), matrix[:, columns]),)),
                           "b": Shards((2,), (((0,), np.ones(2)),) if rank == 0 else ())},
            "optimizer_states": [{"state": {0: {"step": step, "m": Shards((4, 3), (((2 * rank, 0),
                                                                                 matrix[2 * rank:2 * rank + 2]),))}}}],
            "sums": np.ones(4), "global_step": 3}


def test_both_engines_read_shards_of_several_processes(tmp_path):
    """The first process writes in the background and commits once the second has written its shards."""
    first, second, events = BackgroundWriter(), BackgroundWriter(), []
    first.save(tmp_path / "c", build_shards(0), lambda: events.append("committed"), WriterRank(0, 2),
               lambda: events.append("barrier"))
    while not (tmp_path / ".c" / "state-00000-of-00002.safetensors").exists():
        time.sleep(0.01)
    assert events == ["barrier"] and not (tmp_path / "c").exists()
    second.save(tmp_path / "c", build_shards(1), lambda: events.append("never called"), WriterRank(1, 2))
    second.wait()
    first.wait()
    assert events == ["barrier", "committed"] and not (tmp_path / ".c").exists()
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "manifest.json", *(f"{name}-{rank:05d}-of-00002.safetensors" for name in ("model", "optimizer", "state")
                           for rank in range(2)), "state.json"]
    whole = np.arange(12.0).reshape(4, 3)
    for content in (read_checkpoint(tmp_path / "c", TORCH), read_checkpoint(tmp_path / "c"),
                    open_checkpoint(tmp_path / "c")):
        state = content["optimizer_states"][0]["state"][0]
        assert np.array_equal(content["state_dict"]["w"], whole) and np.array_equal(state["m"], whole)
        assert np.array_equal(content["state_dict"]["b"], np.ones(2)) and state["step"] == 7
        assert content["sums"].shape == (4,) and content["global_step"] == 3
    assert np.array_equal(state["m"][1:3, 0:2], whole[1:3, 0:2])  # across shards


def test_a_background_save_on_torch_is_a_snapshot(tmp_path):
    """Training goes on meanwhile, changing step counters and lists in place."""
    import ml_dtypes

    weights, step, best = torch.arange(12.0).view(4, 3).bfloat16(), torch.tensor(7.0), [[0.5, "step=2"]]
    writers = BackgroundWriter(), BackgroundWriter()
    for rank, writer in enumerate(writers):
        shard = Shards((4, 3), (((3 * rank, 0), weights[:3] if rank == 0 else weights[3:]),))
        content = copy_to_cpu({"state_dict": {"w": shard}, "optimizer_states": [{"state": {0: {"step": step}}}],
                               "callbacks": {"Checkpoint": {"best": best}}})
        step += 1
        best.append([0.4, "step=4"])
        writer.save(tmp_path / "c", content, writer_rank=WriterRank(rank, 2), library=TORCH)
    for writer in writers:
        writer.wait()
    for dtype, read_content in ((torch.bfloat16, read_checkpoint(tmp_path / "c", TORCH)),
                                (ml_dtypes.bfloat16, read_checkpoint(tmp_path / "c"))):
        assert read_content["state_dict"]["w"].dtype == dtype
        assert read_content["state_dict"]["w"].tolist() == torch.arange(12.0).view(4, 3).tolist()
        assert read_content["optimizer_states"][0]["state"][0]["step"] == 7
        assert read_content["callbacks"]["Checkpoint"]["best"] == [[0.5, "step=2"]]


def test_shards_add_up_to_the_arrays_of_an_unsharded_checkpoint(tmp_path):
    content = build_shards(0)
    whole = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    content["state_dict"] = {"w": whole, "b": np.ones(2)}
    content["optimizer_states"][0]["state"][0]["m"] = whole.copy()
    write_checkpoint(tmp_path / "one", content)
    checkpoint.create_folder(tmp_path / "two")
    for rank in (1, 0):
        checkpoint.write_shards(tmp_path / "two", build_shards(rank), WriterRank(rank, 2))
    one, two = (checkpoint.read_arrays(tmp_path / name) for name in ("one", "two"))
    assert len(one) == 5 and one.keys() == two.keys()
    assert all(np.array_equal(array, two[name]) and array.dtype == two[name].dtype for name, array in one.items())


def test_a_missing_shard_is_an_error(tmp_path):
    checkpoint.create_folder(tmp_path / "c")
    content = build_shards(0)
    checkpoint.write_shards(tmp_path / "c", content, WriterRank(0, 1))
    for read in (read_checkpoint, open_checkpoint):
        with pytest.raises(UserError, match="parts of w are missing"):
            read(tmp_path / "c")


@pytest.mark.parametrize(("rows", "count"), [(4, 1), (4, 3), (2, 3), (0, 2)])
def test_replicated_arrays_are_written_once(rows, count, monkeypatch):
    """Split by rows where there are enough of them."""
    monkeypatch.setattr(checkpoint, "SMALL", 1)
    array = np.arange(rows * 2).reshape(rows, 2)
    parts = [part for index in range(count) for part in checkpoint.slice_for_process((5, 1), array, index, count)]
    assert np.array_equal(np.concatenate([part for _, part in parts]), array)
    assert [begin for begin, _ in parts] == [(5 + sum(len(part) for _, part in parts[:part_index]), 1)
                                             for part_index in range(len(parts))]


def test_a_changed_file_is_an_error(tmp_path):
    write_checkpoint(tmp_path / "c", {"state_dict": {"a": np.arange(3.0)}, "optimizer_states": []})
    with open(tmp_path / "c" / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    with pytest.raises(UserError, match="model.safetensors has changed since it was written"):
        read_checkpoint(tmp_path / "c")
    check_manifest(tmp_path / "c", share=(1, 2))  # of model, state
    with pytest.raises(UserError, match="model.safetensors has changed since it was written"):
        check_manifest(tmp_path / "c", share=(0, 2))


def test_arrays_of_any_layout_and_dtype_survive_a_round_trip(tmp_path):
    import ml_dtypes

    arrays = {"view": np.arange(6.0).reshape(2, 3).T, "scalar": np.array(2.5, np.float32),
              "half": np.arange(3).astype(ml_dtypes.bfloat16), "integers": np.arange(3)}
    write_checkpoint(tmp_path / "c", {"state_dict": arrays, "plain": {"list": [1, "x", None]}})
    content = read_checkpoint(tmp_path / "c")
    assert are_equal(content["state_dict"], arrays) and content["plain"] == {"list": [1, "x", None]}


def test_background_writing_raises_its_errors_on_the_next_call(tmp_path, monkeypatch):
    writer, done = BackgroundWriter(), []
    writer.save(tmp_path / "first", {"x": np.ones(3)}, lambda: done.append((tmp_path / "first").is_dir()))
    writer.wait()
    assert done == [True] and np.array_equal(read_checkpoint(tmp_path / "first")["x"], np.ones(3))

    may_fail = threading.Event()

    def fails(*_):
        assert may_fail.wait(60)
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "write_checkpoint", fails)
    writer.save(tmp_path / "second", {})
    writer.check()  # still being written
    may_fail.set()
    with pytest.raises(OSError, match="disk full"):
        writer.save(tmp_path / "third", {})
    writer.wait()


def save_until_killed(folder: Path) -> None:
    checkpoint.commit_folder = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    writer = checkpoint.BackgroundWriter()
    writer.save(folder, {"x": np.zeros(3)})
    writer.wait()


@pytest.mark.slow  # the server of the forks takes seconds to start
def test_a_kill_during_a_save_keeps_the_old_checkpoint(tmp_path):
    folder = tmp_path / "step=2"
    write_checkpoint(folder, {"x": np.ones(3)})
    assert Fork(save_until_killed, folder).wait() == -signal.SIGKILL
    assert np.array_equal(read_checkpoint(folder)["x"], np.ones(3))
    assert ".step=2" in os.listdir(tmp_path)
