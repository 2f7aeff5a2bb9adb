"""Stacks in which only some layers train: splitting, merging, names, on a mesh, and with a reference."""

import jax
import numpy as np
import pytest
from accumulations import accumulation_of

from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.steps import Steps
from jax_engine.distributed.tree import flatten, merge, unflatten
from jax_engine.optim import build, step_scalars
from jax_engine.tasks.reference import Reference
from lmmods.core.errors import UserError
from lmmods.core.settings import Optimizer
from tests.closeness import assert_as_close

TRAINED = {"model.layers.0.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight",
           *(f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(3)), "model.embed_tokens.weight"}
UP = "layers", "mlp", "up", "weight"
SETTINGS = Optimizer(lr=1e-2, weight_decay=0.1, layer_decay=0.7)


@pytest.fixture
def ref(make_ref):
    ref = make_ref("llama", "causal")
    ref.net.train_only(TRAINED)
    yield ref
    ref.net._trained = None


def assert_same(actual, expected):
    assert flatten(actual).keys() == flatten(expected).keys()
    for path, leaf in flatten(actual).items():
        assert np.array_equal(leaf, flatten(expected)[path]), path


@pytest.mark.parametrize("kind", ["arrays", "lazy", "shapes"])
def test_merging_undoes_a_split(ref, kind):
    params = {"arrays": jax.tree.map(np.asarray, ref.params), "lazy": ref.net.initial_values(0),
              "shapes": ref.net.shapes}[kind]
    trainable, frozen = ref.net.split(params)
    assert flatten(trainable)[UP].shape[0] == 2 and flatten(frozen)["layers@1", *UP[1:]].shape[0] == 1
    if kind == "shapes":
        assert flatten(merge(trainable, frozen)) == flatten(params)
        return
    trainable, frozen = jax.tree.map(np.asarray, trainable), jax.tree.map(np.asarray, frozen)
    assert_same(merge(trainable, frozen), jax.tree.map(np.asarray, params))
    named = ref.net.to_torch(trainable)
    assert set(named) == TRAINED
    assert_same(ref.net.from_torch(named), trainable)
    with pytest.raises(UserError, match="model.layers.2.mlp.up_proj.weight"):
        ref.net.from_torch({name: value for name, value in named.items() if "layers.2" not in name})


def test_a_mesh_takes_the_steps_of_one_device(ref):
    trainable, frozen = ref.net.split(jax.tree.map(np.asarray, ref.params))
    sums = {"total": np.float32(1), "weight": np.float32(1), "num_tokens": np.int32(4), "num_rows": np.int32(2)}
    random = np.random.default_rng(0)
    gradients = jax.tree.map(lambda p: random.normal(size=p.shape).astype(np.float32), trainable)
    results = []
    for sizes in ((1, 1), (2, 2)):
        parallel = ShardedMesh(*sizes, devices=jax.devices()[:sizes[0] * sizes[1]])
        optimizer = build(SETTINGS, ref.net.decays(trainable), ref.net.depths(trainable))
        steps = Steps(parallel, None, optimizer)
        state = steps.new_state(parallel.put_state(trainable))
        state, _ = steps.update(state, accumulation_of(steps, state, gradients, sums),
                                parallel.put_scalars(step_scalars(SETTINGS, 0, 9, ref.net.num_named_layers)))
        joined = parallel.compile(lambda first, second: (merge(first, second),), ("state", "state"), ("state",))
        results.append(parallel.fetch_state(joined(state["trainable"], parallel.put_state(frozen))[0]))
    assert_as_close(results[1], results[0], results[0])
    assert np.array_equal(flatten(results[1])[UP][1], flatten(ref.params)[UP][1])


@pytest.mark.slow
def test_gradients_equal_those_of_full_finetuning(ref):
    trainable, frozen = ref.net.split(jax.tree.map(np.asarray, ref.params))
    batch = ref.batch()

    def total(params):
        return (ref.net.scores(params, batch) ** 2).sum()

    actual = jax.jit(jax.grad(lambda part: total(merge(part, frozen))))(trainable)
    full = jax.jit(jax.grad(total))(ref.params)
    expected, _ = ref.net.split(jax.tree.map(np.asarray, full))
    assert_as_close(actual, expected, expected)


def test_a_copied_reference_has_whole_stacks(ref):
    params = jax.tree.map(np.asarray, ref.params)
    trainable, frozen = ref.net.split(params)
    reference = Reference(ref.net, "copy")
    whole = unflatten({path: leaf for path, leaf in flatten(params).items() if ref.net.trains(path)})
    moved = merge(merge(jax.tree.map(lambda leaf: leaf + 1, trainable), frozen), reference.copies(whole, {}))
    hidden = reference.hidden(moved, ref.batch())
    assert np.array_equal(hidden, ref.net.hidden(params, ref.batch()))
