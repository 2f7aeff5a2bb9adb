"""Checkpoints under stress: state that tensors share, a disk that fills up, a death between any two steps."""

from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from jax_engine.checkpoint import read
from lmmods.callbacks.checkpoint import FolderCheckpointIO
from lmmods.cli import main
from lmmods.modules.optim import build_optimizer
from lmmods.runs.folder import RunFolder
from lmmods.settings import Optimizer, OptimizerName
from tests.runs import assert_same_checkpoint

OPTIMIZERS = get_args(OptimizerName)


# Optimisers -------------------------------------------------------------------------------------------------------


def settings_of(name: str) -> Optimizer:
    return Optimizer(name=name, lr=1e-2, weight_decay=0.1, momentum=0.9)


class Bare:
    """Two matrices of 4096 elements and more, which bitsandbytes keeps in 8 bits, and a vector, which it does not."""

    def __init__(self, name: str, dtype: torch.dtype):
        random = torch.Generator().manual_seed(0)
        self.named = [(key, torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)))
                      for key, shape in (("a", (64, 64)), ("b", (96, 64)), ("c", (64,)))]
        self.optimizer = build_optimizer(self.named, settings_of(name))

    def step(self, number: int) -> None:
        random = torch.Generator().manual_seed(number)
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


def same(left, right) -> bool:
    """Whether two trees hold the same bits, of the same types."""
    if torch.is_tensor(left):
        return torch.is_tensor(right) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_every_optimiser_goes_on_from_a_checkpoint(tmp_path, name, dtype):
    straight, broken, resumed = (Bare(name, dtype) for _ in range(3))
    for number in range(3):
        straight.step(number)
        broken.step(number)
    FolderCheckpointIO().save_checkpoint(broken.content(), tmp_path / "step=3")
    resumed.restore(FolderCheckpointIO().load_checkpoint(tmp_path / "step=3"))
    assert same(resumed.content(), straight.content())
    for number in range(3, 6):
        straight.step(number)
        resumed.step(number)
    assert same(resumed.content(), straight.content())
    stored = load_file(tmp_path / "step=3" / "optimizer.safetensors") if name != "sgd" else {}
    kept_in_8_bits = sum(tensor.numel() for tensor in stored.values() if tensor.dtype == torch.uint8)
    assert kept_in_8_bits == ("8bit" in name) * (64 * 64 + 96 * 64) * (2 if "adamw" in name else 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_jax_reads_the_state_of_every_optimiser(tmp_path, name):
    bare = Bare(name, torch.float32)
    bare.step(0)
    FolderCheckpointIO().save_checkpoint(bare.content(), tmp_path / "c")
    ours, theirs = FolderCheckpointIO().load_checkpoint(tmp_path / "c"), read(tmp_path / "c")

    def as_torch(node):
        if isinstance(node, dict):
            return {key: as_torch(value) for key, value in node.items()}
        if isinstance(node, (list, tuple)):
            return type(node)(map(as_torch, node))
        return torch.from_numpy(node) if isinstance(node, np.ndarray) else node

    assert same(as_torch(theirs["optimizer_states"]), ours["optimizer_states"])


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_lion_8bit", "sgd_8bit"])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_a_run_in_8_bits_goes_on(recipe, tmp_path, stop_at, name):
    changes = {"model__init_args__quantize": None, "model__init_args__lora": None, "trainer__max_steps": 4,
               "model__init_args__optimizer": {"name": name, "lr": 0.01, "momentum": 0.9},
               "data__init_args__val_size": 0, "trainer__limit_val_batches": 0}
    straight, broken = RunFolder(tmp_path / "straight"), RunFolder(tmp_path / "broken")
    assert main(["fit", *recipe(**changes, trainer__default_root_dir=str(straight.root))]) == 0
    arguments = recipe(**changes, trainer__default_root_dir=str(broken.root))
    stop_at(2)
    assert main(["fit", *arguments]) == 130
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert_same_checkpoint(straight, broken)
    stored = load_file(broken.resolve("last") / "optimizer.safetensors")
    assert any(tensor.dtype == torch.uint8 for tensor in stored.values())


def test_memory_that_entries_share_is_written_once_and_shared_again(tmp_path):
    memory = torch.arange(8.0)
    content = {"optimizer_states": [{"book": memory, "again": memory, "other name": memory.view(8)}],
               "part": memory[2:6], "overlaps": memory[4:], "every second": memory[::2],
               "nothing": torch.empty(0), "nothing either": torch.empty(0, 3)}
    FolderCheckpointIO().save_checkpoint(content, tmp_path / "c")
    found = FolderCheckpointIO().load_checkpoint(tmp_path / "c")
    del found["pytorch-lightning_version"]
    assert same(found, content)
    (entry,) = found["optimizer_states"]
    assert entry["book"].data_ptr() == entry["again"].data_ptr() == entry["other name"].data_ptr()
    assert list(load_file(tmp_path / "c" / "optimizer.safetensors")) == ["0/book"]
