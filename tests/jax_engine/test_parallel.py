"""Replicas and meshes of eight CPU devices compared with one device; layouts, compilations, errors."""

import json
import os
import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from accumulations import accumulation_of
from toy import Toy

from jax_engine.distributed.devices import Replicas
from jax_engine.distributed.loss import IGNORED, shift_labels, token_loss
from jax_engine.distributed.mesh import ShardedMesh, arrange_devices
from jax_engine.distributed.prefetch import Prefetcher
from jax_engine.distributed.steps import Clipping, Steps, fetch_step_metrics
from jax_engine.optim import build, step_scalars
from lmmods.core.errors import UserError
from lmmods.core.settings import Optimizer
from lmmods.runs import checkpoint
from tests.closeness import assert_as_close
from tests.forks import together

FLAG = "--xla_force_host_platform_device_count"
B, NUM_STEPS = 2, 8
SETTINGS = Optimizer(lr=1e-2, weight_decay=0.1, schedule="cosine", warmup=3)
LAYOUTS = {
    "replicas": lambda: Replicas(),
    "fsdp": lambda: ShardedMesh(),
    "data_fsdp": lambda: ShardedMesh(data=2, fsdp=4),
    "all_three": lambda: ShardedMesh(data=2, fsdp=2, tensor=2),
    "one_device_mesh": lambda: ShardedMesh(devices=jax.devices()[:1]),
}


def yield_batches(num_batches):
    """Yield micro-batches like a torch loader, of different lengths; the last one has too few rows."""
    random = np.random.default_rng(0)
    for index in range(num_batches):
        length, size = [6, 8][index % 8 // 4], B if index + 1 < num_batches else 1
        ids = random.integers(1, 64, (size, length))
        mask = np.arange(length) < random.integers(3, length + 1, (size, 1))
        columns = {"input_ids": ids, "attention_mask": mask.astype(int), "labels": np.where(mask, ids, IGNORED),
                   "token_seeds": random.integers(-(2**31), 2**31, ids.shape)}
        yield {name: torch.tensor(column) for name, column in columns.items()}


def train(toy, parallel, accumulate, num_steps=NUM_STEPS, per_step=8):
    """Return the losses of all steps and the final state; a device step has `per_step` micro-batches in total."""
    def loss(params, batch, training, count_correct):
        return token_loss(toy.hidden(params, batch, training), shift_labels(batch["labels"]),
                          lambda h: toy.logits(params, h), toy.vocab_size, count_correct)

    params = toy.init(jax.random.key(0))
    steps = Steps(parallel, loss, build(SETTINGS, toy.decays(params)), Clipping(1.0))
    state, accumulation, losses = steps.new_state(parallel.put_state(params)), None, []
    groups = per_step // parallel.data_parallel_size * accumulate
    prefetcher = Prefetcher(list(yield_batches(num_steps * per_step * accumulate)), parallel, B, pad_id=0)
    for count, group in enumerate(prefetcher, start=1):
        scalars = parallel.put_scalars(step_scalars(SETTINGS, len(losses), num_steps))
        if groups == 1:
            state, figures = steps.full_step(state, {}, group.arrays, scalars)
        else:
            accumulation = steps.accumulate(state, {}, accumulation or steps.new_accumulation(state), group.arrays)
            if count % groups:
                continue
            (state, figures), accumulation = steps.update(state, accumulation, scalars), None
        losses.append(fetch_step_metrics(figures))
    return losses, parallel.fetch_state(state)


def test_muon_orthogonalises_whole_matrices_on_a_mesh():
    settings, toy = Optimizer(name="muon", lr=1e-2, weight_decay=0.1), Toy()
    random, params = np.random.default_rng(0), toy.init(jax.random.key(0))
    gradients = jax.tree.map(lambda p: random.normal(size=p.shape).astype(np.float32), params)
    sums = {"total": np.float32(1), "weight": np.float32(1), "num_tokens": np.int32(4), "num_rows": np.int32(2)}
    states = {}
    for name in ("one_device_mesh", "data_fsdp", "all_three"):
        parallel = LAYOUTS[name]()
        steps = Steps(parallel, None, build(settings, toy.decays(params)))
        state = steps.new_state(parallel.put_state(params))
        state, _ = steps.update(state, accumulation_of(steps, state, gradients, sums),
                                parallel.put_scalars(step_scalars(settings, 0, 9)))
        states[name] = parallel.fetch_state(state)
    for other in ("data_fsdp", "all_three"):
        assert_as_close(states[other], states["one_device_mesh"], states["one_device_mesh"])


@pytest.fixture(scope="module")
def single_device_runs():
    """Return the losses and states of runs on one device, by the number of micro-batches per step."""
    return {count: train(Toy(), Replicas(jax.devices()[:1]), count // 8) for count in (8, 32)}


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "accumulate"), [*((layout, 4) for layout in LAYOUTS), ("replicas", 1),
                                                    ("all_three", 1)])
def test_eight_devices_take_the_steps_of_one(toy, single_device_runs, layout, accumulate):
    parallel = LAYOUTS[layout]()
    expected_losses, expected = single_device_runs[8 * accumulate]
    losses, state = train(toy, parallel, accumulate)
    assert len(losses) == NUM_STEPS
    for actual, reference in zip(losses, expected_losses, strict=True):
        assert actual == pytest.approx(reference, rel=1e-4)
        assert [actual[name] for name in ("weight", "num_tokens", "num_rows")] == [
            reference[name] for name in ("weight", "num_tokens", "num_rows")]
    for actual, reference in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert np.abs(actual - reference).max() <= 1e-4 * max(np.abs(reference).max(), 1)


@pytest.mark.parametrize("layout", ["replicas", "data_fsdp"])
def test_each_length_compiles_one_program(toy, layout):
    traces = []
    for num_steps in (2, 6):
        toy.num_traces = 0
        train(toy, LAYOUTS[layout](), 4, num_steps)
        traces.append(toy.num_traces)
    assert traces[0] == traces[1]


def test_state_is_created_sharded_and_stays_sharded(toy):
    parallel = ShardedMesh(data=2, fsdp=4)
    (params,) = parallel.compile(lambda key: (toy.init(key),), ("scalar",), ("state",))(jax.random.key(0))
    steps = Steps(parallel, None, build(SETTINGS, toy.decays(params)))
    state = steps.new_state(params)
    for _ in range(2):
        table = state["trainable"]["embed"]["tokens"]["weight"]
        moment = state["optimizer"]["exp_avg"]["layers"]["mlp"]["up"]["weight"]
        assert table.addressable_shards[0].data.shape == (16, 16)  # [64, 16] by rows
        assert moment.addressable_shards[0].data.shape == (3, 4, 16)  # never across the stack of layers
        assert state["trainable"]["layers"]["attn_norm"]["weight"].sharding.is_fully_replicated
        accumulation = steps.new_accumulation(state)
        assert accumulation["gradients"]["embed"]["tokens"]["weight"].sharding == table.sharding
        state, _ = steps.update(state, accumulation, parallel.put_scalars(step_scalars(SETTINGS, 0, 1)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_host_arrays_come_back_bit_for_bit(toy, layout):
    parallel = LAYOUTS[layout]()
    params = jax.tree.map(np.asarray, toy.init(jax.random.key(1)))
    placed = parallel.put_state(params)
    assert jax.tree.map(lambda s: (s.shape, s.dtype), parallel.shapes(placed)) == jax.tree.map(
        lambda p: (p.shape, p.dtype), params)
    fetched = parallel.fetch_state(placed)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(fetched), jax.tree.leaves(params), strict=True))
    rows = np.arange(3 * parallel.data_parallel_size).reshape(-1, 3)
    assert np.array_equal(parallel.fetch_rows(parallel.put_batch({"x": rows}))["x"], rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_a_checkpoint_cover_each_array_once(layout, monkeypatch):
    """Also where replicas divide a shard among themselves, and for single layers of a stack."""
    monkeypatch.setattr(checkpoint, "SMALL", 1)
    state = {"layers": {"a": {"weight": np.arange(96.0).reshape(3, 8, 4)}, "norm": {"weight": np.ones((3, 5))}},
             "count": np.array(3)}
    placed = LAYOUTS[layout]().put_state(state)
    shards = LAYOUTS[layout]().shards(placed)

    def assemble(shards: checkpoint.Shards) -> np.ndarray:
        array, times = np.zeros(shards.shape), np.zeros(shards.shape)
        for offsets, part in shards.parts:
            index = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape))
            array[index], times[index] = part, times[index] + 1
        assert (times == 1).all()
        return array

    assert jax.tree.all(jax.tree.map(lambda shard, array: np.array_equal(assemble(shard), array), shards, state))
    assert np.array_equal(assemble(shards["layers"]["a"]["weight"][1]), state["layers"]["a"]["weight"][1])
    assert shards["layers"]["a"]["weight"].nbytes == state["layers"]["a"]["weight"].nbytes / 2  # float32 here


def test_a_fetched_state_outlives_the_donated_one():
    parallel = ShardedMesh()
    state = parallel.put_state({"weight": np.arange(16.0, dtype=np.float32).reshape(8, 2)})
    step = parallel.compile(lambda s: (jax.tree.map(lambda x: x * 0 - 1, s),), ("state",), ("state",), donate=(0,))
    before = parallel.fetch_state(state)
    state = step(state)[0]
    assert np.array_equal(before["weight"], np.arange(16.0).reshape(8, 2))


def test_indivisible_dimensions_are_not_sharded_and_reported_once(capsys):
    parallel = ShardedMesh()
    state = parallel.put_state({"a": {"weight": np.ones((5, 7))}, "b": {"weight": np.ones((3, 16))}, "c": np.ones(3),
                                "d": {"weight": np.ones((5, 9))}})
    assert state["a"]["weight"].sharding.is_fully_replicated
    assert state["b"]["weight"].addressable_shards[0].data.shape == (3, 2)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and "a.weight [5, 7]" in printed


@pytest.mark.parametrize("sizes", [{"data": 3}, {"data": 2, "fsdp": 2}, {"data": 16}, {"data": -1}, {"tensor": 0},
                                   {"fsdp": 16}])
def test_wrong_mesh_sizes_are_errors(sizes):
    with pytest.raises(UserError, match="mesh sizes.*(8|-1 for all)"):
        ShardedMesh(**sizes)


def train_two_meshes() -> None:
    train(Toy(), ShardedMesh(data=2, fsdp=4), 1, num_steps=1)
    train(Toy(), ShardedMesh(data=2, fsdp=2, tensor=2), 2, num_steps=1)
    print("trained")


@pytest.mark.slow
def test_no_array_is_rebuilt_in_full():
    """XLA logs 'Involuntary full rematerialization' while it compiles, if a layout forces it.

    So the process must not use cached programs. It is a separate interpreter because the log level is set at import.
    """
    script = f"import sys; sys.path[:0] = {sys.path!r}; import test_parallel; test_parallel.train_two_meshes()"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env={
        **os.environ, "TF_CPP_MIN_LOG_LEVEL": "0", "JAX_ENABLE_COMPILATION_CACHE": "0"})
    assert "trained" in process.stdout, process.stderr
    assert "rematerialization" not in process.stderr


def train_in_two_processes() -> None:
    jax.distributed.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", 2, int(os.environ["RANK"]))
    for parallel in (Replicas(), ShardedMesh(data=2, fsdp=2), ShardedMesh(tensor=4)):
        losses, state = train(Toy(), parallel, 1, num_steps=2, per_step=4)
        table = state["trainable"]["embed"]["tokens"]["weight"]
        print(json.dumps([parallel.local_ranks, losses, table[:8].tolist()]))


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(toy):
    """Two processes with two devices each compared with four devices here; they may share a micro-batch."""
    outputs = together([], 2, program=train_in_two_processes, devices=2)
    expected_losses, expected = train(toy, Replicas(jax.devices()[:4]), 1, num_steps=2, per_step=4)
    ranks = [[[0, 1], [0, 1], [0]], [[2, 3], [2, 3], [0]]]
    for text, local_ranks in zip(outputs, ranks, strict=True):
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("[[")]
        assert [line[0] for line in lines] == local_ranks, text
        for _, losses, table in lines:
            assert losses == [pytest.approx(figures, rel=1e-5) for figures in expected_losses]
            assert np.abs(np.array(table) - expected["trainable"]["embed"]["tokens"]["weight"][:8]).max() <= 1e-4


def test_a_step_makes_no_implicit_transfers(toy):
    parallel = Replicas()
    step = parallel.compile(lambda s, b, x: (jax.tree.map(lambda w: w + parallel.sum(b["x"].sum()) * x["lr"], s),),
                            ("state", "batch", "scalar"), ("state",))
    args = (parallel.put_state({"w": np.ones(3, np.float32)}), parallel.put_batch({"x": np.ones((8, 2), np.float32)}),
            parallel.put_scalars({"lr": np.float32(0.5)}))
    with jax.transfer_guard("disallow"):
        (state,) = step(*args)
    assert np.array_equal(parallel.fetch_state(state)["w"], np.full(3, 9, np.float32))
    assert jnp.float32 == state["w"].dtype


def test_a_mesh_follows_the_links_between_chips_of_a_slice():
    """On a v5p slice of 4 x 4 x 4 chips, which JAX lists host by host, 2 x 2 chips each."""
    slice_ = [SimpleNamespace(platform="tpu", device_kind="TPU v5", coords=[2 * x + i, 2 * y + j, z], core_on_chip=0)
              for z, y, x, j, i in product(range(4), range(2), range(2), range(2), range(2))]
    grid = arrange_devices(slice_, (1, 64, 1, 1, 1))
    coordinates = np.array([chip.coords for chip in grid.flat])
    assert grid.shape == (1, 64, 1, 1, 1) and len({tuple(chip_coordinates) for chip_coordinates in coordinates}) == 64
    assert (np.abs(np.diff(coordinates.reshape(16, 4, 3), axis=1)).sum(-1) == 1).all()  # fours in a line
    some = slice_[:3]  # not a box
    assert list(arrange_devices(some, (1, 3)).flat) == some
