"""What each process reads where parameters are sharded (FSDP2): its rows, and no more."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lmmods.core import lazy_array
from lmmods.core.errors import UserError
from lmmods.core.lazy_array import LazyArray
from lmmods.runs.checkpoint_io import open_checkpoint, write_checkpoint
from lmmods.runs.checkpoint_pieces import Shares
from lmmods.torch_engine.checkpoint_io import TORCH, FolderCheckpointIO
from lmmods.torch_engine.compat.torch import imagined_processes
from lmmods.torch_engine.nn.sharding import load_into, local, placed_like


@pytest.fixture
def asked(monkeypatch):
    """Numbers of values that are read from files, in order."""
    sizes, of_file = [], lazy_array.of_file

    def counting(*args):
        return {name: LazyArray(array.shape, array.dtype, lambda part, array=array: sizes.append(array[part].numel())
                                or array[part], array.empty) for name, array in of_file(*args).items()}

    monkeypatch.setattr(lazy_array, "of_file", counting)
    return sizes


def test_rows_of_a_checkpoint(tmp_path, asked):
    """The first process of three, with three of seven rows; optimiser state and gradients of a step under way too."""
    weight = torch.arange(28).reshape(7, 4).bfloat16()
    write_checkpoint(tmp_path / "c", {
        "state_dict": {"w": weight},
        "optimizer_states": [{"state": {0: {"exp_avg": weight + 1, "step": torch.ones(())}}}],
        "window": {"gradients": {"w": weight.float()}, "sums": torch.ones(4)}}, TORCH)
    content = open_checkpoint(tmp_path / "c", TORCH)
    assert torch.equal(content["window"]["sums"], torch.ones(4))
    state = content["optimizer_states"][0]["state"][0]
    assert state["step"] == 1
    asked.clear()
    with imagined_processes(3):
        param = distribute_tensor(torch.zeros(7, 4, dtype=torch.bfloat16), init_device_mesh("cpu", (3,)), [Shard(0)],
                                  src_data_rank=None)
        load_into(param, content["state_dict"]["w"])
        assert torch.equal(local(param), weight[:3])
        average = placed_like(state["exp_avg"], param)
        assert torch.equal(local(average), weight[:3] + 1) and average.placements == param.placements
        gradient = placed_like(content["window"]["gradients"]["w"].scaled(0.5), param)
        assert torch.equal(local(gradient), weight[:3].float() / 2) and gradient.shape == (7, 4)
    assert asked == [12, 12, 12]
    assert torch.equal(placed_like(content["state_dict"]["w"], torch.zeros(7, 4)), weight)


def test_damage_that_another_process_has_found(tmp_path):
    write_checkpoint(tmp_path / "c", {"state_dict": {"w": torch.ones(3)}}, TORCH)
    reader = FolderCheckpointIO()
    with pytest.raises(UserError, match="optimizer.safetensors is not"):
        reader.open_checkpoint(tmp_path / "c", lambda own: own | {1: "optimizer.safetensors is not ..."}, Shares(0, 2))
    damaged = tmp_path / "c" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="model.safetensors is not as it was written"):
        reader.open_checkpoint(tmp_path / "c", lambda own: own, Shares(0, 1))
