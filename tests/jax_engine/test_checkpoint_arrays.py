"""Checkpoints: exact round trips, on other devices, to and from the torch engine."""

import jax
import numpy as np
import pytest
import torch
from accumulations import accumulation_of

from jax_engine.checkpoint import pack, unpack
from jax_engine.distributed.devices import Replicas
from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.steps import Steps
from jax_engine.optim import build, step_scalars
from lmmods.core import lazy_array
from lmmods.core.errors import UserError
from lmmods.core.lazy_array import LazyArray, lazy_file
from lmmods.core.settings import Optimizer
from lmmods.runs.checkpoint import (
    Shards,
    WriterRank,
    create_folder,
    open_checkpoint,
    read_checkpoint,
    write_checkpoint,
    write_shards,
)
from lmmods.torch_engine.callbacks.checkpoint import TORCH
from lmmods.torch_engine.nn.optim import build_optimizer

RULES = [Optimizer(name="adamw", lr=1e-2, weight_decay=0.1), Optimizer(name="adafactor", lr=1e-2),
         Optimizer(name="sgd", lr=1e-2), Optimizer(name="sgd", lr=1e-2, momentum=0.9, weight_decay=0.1),
         Optimizer(name="lion", lr=1e-3, weight_decay=0.1), Optimizer(name="muon", lr=1e-2, weight_decay=0.1)]


def train_steps(toy, parallel, settings, num_steps=2):
    """Return steps, and a state after some updates with random gradients."""
    params = toy.init(jax.random.key(0))
    steps = Steps(parallel, None, build(settings, toy.decays(params)))
    state = steps.new_state(parallel.put_state(params))
    for step in range(num_steps):
        accumulation = accumulation_of(steps, state, **gradients_of(params, step))
        state, _ = steps.update(state, accumulation, parallel.put_scalars(step_scalars(settings, step, 9)))
    return steps, state


def gradients_of(params, step):
    random = np.random.default_rng(step)
    sums = {"total": np.float32(1.1), "weight": np.float32(3), "num_tokens": np.int32(4), "num_rows": np.int32(2)}
    return {"gradients": jax.tree.map(lambda p: random.normal(size=p.shape).astype(np.float32), params), "sums": sums}


def is_equal(first, second):
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs)


def save(toy, parallel, state, settings, folder, step=2):
    packed = pack(parallel.fetch_state(state), settings, step, 9, toy.to_torch)
    write_checkpoint(folder, {**packed, "global_step": step})


@pytest.mark.parametrize("settings", RULES, ids=lambda s: f"{s.name}-{s.momentum}")
def test_a_checkpoint_restores_the_same_bits_on_other_devices(toy, tmp_path, settings):
    before, after = ShardedMesh(data=2, fsdp=4), Replicas(jax.devices()[:2])
    _, state = train_steps(toy, before, settings)
    save(toy, before, state, settings, tmp_path / "step=2")
    _, fresh = train_steps(toy, after, settings, 0)
    content = open_checkpoint(tmp_path / "step=2")
    restored = unpack(content, after.shapes(fresh), settings, toy.to_torch, toy.from_torch)
    assert is_equal(restored, before.fetch_state(state)) and content["global_step"] == 2
    assert is_equal(after.fetch_state(after.put_state(restored)), restored)
    _, fresh = train_steps(toy, before, settings, 0)
    placed = before.put_state(unpack(content, before.shapes(fresh), settings, toy.to_torch, toy.from_torch))
    assert jax.tree.map(lambda x: x.sharding, placed) == jax.tree.map(lambda x: x.sharding, state)


def test_devices_read_only_their_shards_of_a_checkpoint(toy, tmp_path, monkeypatch):
    """Three processes write some rows of every array; eight shards read each value once."""
    mesh, read_sizes = ShardedMesh(fsdp=8), []
    _, state = train_steps(toy, mesh, RULES[0])
    whole, folder = mesh.fetch_state(state), tmp_path / "c"

    def shards_of(rank):
        def shard(leaf):
            if not isinstance(leaf, np.ndarray) or not leaf.ndim:
                return leaf
            first, last = (len(leaf) * index // 3 for index in (rank, rank + 1))
            return Shards(leaf.shape, (((first, *[0] * (leaf.ndim - 1)), leaf[first:last]),))
        return {**jax.tree.map(shard, pack(whole, RULES[0], 2, 9, toy.to_torch)), "global_step": 2}

    create_folder(folder)
    for rank in (2, 1, 0):
        write_shards(folder, shards_of(rank), WriterRank(rank, 3))

    def count_reads(file):
        return {key: LazyArray(array.shape, array.dtype, lambda part, array=array: read_sizes.append(array[part].size)
                               or array[part]) for key, array in lazy_file(file).items()}

    monkeypatch.setattr(lazy_array, "lazy_file", count_reads)
    content = open_checkpoint(folder)
    read_sizes.clear()
    restored = mesh.put_state(unpack(content, mesh.shapes(state), RULES[0], toy.to_torch, toy.from_torch))
    assert sum(read_sizes) == sum(leaf.size for leaf in jax.tree.leaves(whole))
    assert is_equal(mesh.fetch_state(restored), whole)


@pytest.mark.parametrize("settings", RULES, ids=lambda s: f"{s.name}-{s.momentum}")
def test_torch_resumes_where_jax_stopped_and_back(toy, tmp_path, settings):
    """JAX takes two steps, torch the third; JAX reads torch's checkpoint and takes the same third and fourth."""
    single = Replicas(jax.devices()[:1])
    steps, state = train_steps(toy, single, settings)
    save(toy, single, state, settings, tmp_path / "jax")
    content = read_checkpoint(tmp_path / "jax", TORCH)
    named = [(name, torch.nn.Parameter(tensor.clone())) for name, tensor in content["state_dict"].items()]
    optimizer = build_optimizer(named, settings)
    optimizer.load_state_dict(content["optimizer_states"][0])

    def torch_step(step):
        params = toy.init(jax.random.key(0))
        for (_, p), g in zip(named, toy.to_torch(gradients_of(params, step)["gradients"]).values(), strict=True):
            p.grad = torch.tensor(g) / 3
        optimizer.step()

    torch_step(2)
    write_checkpoint(tmp_path / "torch", {"state_dict": dict(named), "param_names": [name for name, _ in named],
                                          "optimizer_states": [optimizer.state_dict()]}, TORCH)
    restored = unpack(read_checkpoint(tmp_path / "torch"), single.shapes(state), settings, toy.to_torch, toy.from_torch)
    assert all(np.array_equal(toy.to_torch(restored["trainable"])[name.removeprefix("model.")], p.detach())
               for name, p in named)
    state = single.put_state(restored)
    accumulation = accumulation_of(steps, state, **gradients_of(toy.init(jax.random.key(0)), 3))
    state, _ = steps.update(state, accumulation, single.put_scalars(step_scalars(settings, 3, 9)))
    torch_step(3)
    for (name, p), on_jax in zip(named, toy.to_torch(single.fetch_state(state["trainable"])).values(), strict=True):
        assert np.abs(on_jax - p.detach().numpy()).max() <= 1e-6 * p.abs().max().item(), name


def test_packed_optimiser_groups_have_torchs_layout(toy):
    single = Replicas(jax.devices()[:1])
    content = pack(single.fetch_state(train_steps(toy, single, RULES[0])[1]), RULES[0], 2, 9, toy.to_torch)
    (optimizer,) = content["optimizer_states"]
    matrices, others = optimizer["param_groups"]
    assert matrices["params"] == [0, 1, 2, 3] and matrices["weight_decay"] == 0.1
    assert others["params"] == list(range(4, 11)) and others["weight_decay"] == 0.0
    assert optimizer["state"][0]["exp_avg"].shape == (64, 16) and optimizer["state"][0]["step"] == 2


def test_before_the_first_step_there_is_no_optimizer_state(toy, tmp_path):
    single = Replicas(jax.devices()[:1])
    _, state = train_steps(toy, single, RULES[0], 0)
    save(toy, single, state, RULES[0], tmp_path / "c", step=0)
    content = read_checkpoint(tmp_path / "c")
    assert content["optimizer_states"][0]["state"] == {}
    restored = unpack(content, single.shapes(state), RULES[0], toy.to_torch, toy.from_torch)
    assert is_equal(restored, single.fetch_state(state))


def test_another_model_or_optimizer_is_an_error(toy, tmp_path):
    single = Replicas(jax.devices()[:1])
    _, state = train_steps(toy, single, RULES[0])
    save(toy, single, state, RULES[0], tmp_path / "c")
    content = read_checkpoint(tmp_path / "c")
    with pytest.raises(UserError, match="exp_avg_sq_(row|col) for embed.weight: it was saved with another optimiser"):
        like = single.shapes(train_steps(toy, single, RULES[1], 0)[1])
        unpack(content, like, RULES[1], toy.to_torch, toy.from_torch)
    toy.num_layers = 4
    _, deeper = train_steps(toy, single, RULES[0], 0)
    with pytest.raises(UserError, match="another model: 3 parameters are missing in it, e.g. model.layers.3.norm"):
        unpack(content, single.shapes(deeper), RULES[0], toy.to_torch, toy.from_torch)
    toy.num_layers, toy.size = 3, 8
    _, narrower = train_steps(toy, single, RULES[0], 0)
    with pytest.raises(UserError, match="have another shape in it"):
        unpack(content, single.shapes(narrower), RULES[0], toy.to_torch, toy.from_torch)
