"""Accumulation, updates and their metrics, compared with plain gradients and torch's optimiser."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jax_engine.distributed.devices import Replicas
from jax_engine.distributed.loss import IGNORED, shift_labels, token_loss
from jax_engine.distributed.steps import Clipping, Steps, fetch_step_metrics
from jax_engine.distributed.tree import flatten, merge, unflatten
from jax_engine.optim import build, step_scalars
from lmmods.core.dropout import token_seeds
from lmmods.core.errors import UserError
from lmmods.core.settings import Optimizer
from lmmods.runs.step_metrics import check_finite
from lmmods.torch_engine.nn.optim import build_optimizer
from tests.closeness import assert_as_close

SETTINGS = Optimizer(lr=1e-2, weight_decay=0.1)
B, T = 4, 10


def make_loss(toy):
    def loss(params, batch, training, count_correct):
        hidden = toy.hidden(params, batch, training)
        return token_loss(hidden, shift_labels(batch["labels"]), lambda h: toy.logits(params, h), toy.vocab_size,
                          count_correct)

    return loss


def make_rows(seed, num_rows=B, length=T):
    random = np.random.default_rng(seed)
    ids = random.integers(1, 64, (num_rows, length)).astype(np.int32)
    lengths = random.integers(3, length + 1, num_rows)
    mask = (np.arange(length) < lengths[:, None]).astype(np.int32)
    seeds = token_seeds(seed, 0, np.arange(num_rows)[:, None], np.arange(length))
    return {"input_ids": ids, "attention_mask": mask, "token_seeds": seeds,
            "labels": np.where(mask == 1, ids, IGNORED).astype(np.int32)}


def batch_of(parallel, rows):
    return parallel.put_batch({name: x[None] for name, x in rows.items()})


@pytest.fixture
def single():
    return Replicas(jax.devices()[:1])


def make_steps(toy, parallel, settings=SETTINGS, clipping=Clipping(), **kwargs):
    params = toy.init(jax.random.key(0))
    optimizer = build(settings, toy.decays(params))
    steps = Steps(parallel, make_loss(toy), optimizer, clipping, **kwargs)
    return steps, steps.new_state(parallel.put_state(params)), params


def is_close(first, second, tolerance):
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.abs(np.asarray(a) - np.asarray(b)).max() <= tolerance * max(np.abs(b).max(), 1e-3) for a, b in pairs)


def put_scalars(parallel, step=0, settings=SETTINGS):
    return parallel.put_scalars(step_scalars(settings, step, 20))


CLIPPINGS = [Clipping(), Clipping(0.05), Clipping(1e6), Clipping(0.003, "value"), Clipping(0)]


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=str)
def test_an_update_divides_once_then_clips_and_steps_like_torch(toy, single, clipping):
    toy.rate = 0.0
    steps, state, params = make_steps(toy, single, clipping=clipping)
    accumulation = steps.new_accumulation(state)
    micro_batches = [make_rows(seed, length=length) for seed, length in ((0, 10), (1, 7), (2, 5))]
    for micro_batch in micro_batches:
        accumulation = steps.accumulate(state, {}, accumulation, batch_of(single, micro_batch))
    state, figures = steps.update(state, accumulation, put_scalars(single))

    def total(params):
        sums = [make_loss(toy)(params, micro_batch, None, False) for micro_batch in micro_batches]
        return sum(s.total for s in sums) / sum(s.weight for s in sums)

    value, gradient = jax.value_and_grad(total)(params)
    named = [(name, torch.nn.Parameter(torch.tensor(p))) for name, p in toy.to_torch(params).items()]
    for (_, p), g in zip(named, toy.to_torch(gradient).values(), strict=True):
        p.grad = torch.tensor(g)
    tensors = [p for _, p in named]
    norm = torch.nn.utils.get_total_norm([p.grad for p in tensors])
    if clipping.algorithm == "value":
        torch.nn.utils.clip_grad_value_(tensors, clipping.value)
    elif clipping.value:
        torch.nn.utils.clip_grad_norm_(tensors, clipping.value)
    build_optimizer(named, SETTINGS).step()

    plain = fetch_step_metrics(figures)
    assert_as_close(plain["loss"], value, value)  # a sum in another order
    assert plain["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert plain["num_tokens"] == sum(micro_batch["attention_mask"].sum() for micro_batch in micro_batches)
    assert plain["num_rows"] == 12
    moved = toy.to_torch(single.fetch_state(state["trainable"]))
    moments = toy.to_torch(single.fetch_state(state["optimizer"]["exp_avg"]))
    for name, p in named:
        assert np.abs(moved[name] - p.detach().numpy()).max() <= 2e-5
        # Clipping by value keeps a gradient's rounding error.
        scale = toy.to_torch(gradient)[name] if clipping.algorithm == "value" else p.grad.numpy()
        assert_as_close(moments[name] / (1 - SETTINGS.betas[0]), p.grad, p.grad, magnitude=np.abs(scale).max())


@pytest.mark.slow
def test_any_batch_split_gives_the_same_step(toy, single):
    """8 rows at once = 2 x 4 = 4 x 2, with dropout and micro-batches of different lengths."""
    settings = Optimizer(name="sgd", lr=0.1)
    all_rows, results = make_rows(5, 8), []
    for size in (8, 4, 2):
        steps, state, _ = make_steps(toy, single, settings)
        accumulation = steps.new_accumulation(state)
        for index in range(8 // size):
            micro_batch = {name: x[index * size : (index + 1) * size] for name, x in all_rows.items()}
            length = micro_batch["attention_mask"].sum(1).max()
            micro_batch = {name: x[:, :length] for name, x in micro_batch.items()}
            accumulation = steps.accumulate(state, {}, accumulation, batch_of(single, micro_batch))
        state, figures = steps.update(state, accumulation, put_scalars(single, settings=settings))
        results.append((single.fetch_state(state["trainable"]), fetch_step_metrics(figures)))
    steps, state, _ = make_steps(toy, single, settings)
    state, figures = steps.full_step(state, {}, batch_of(single, all_rows), put_scalars(single, settings=settings))
    results.append((single.fetch_state(state["trainable"]), fetch_step_metrics(figures)))
    for params, figures in results[1:]:
        assert_as_close(params, results[0][0], results[0][0])
        assert figures == pytest.approx(results[0][1], rel=1e-5)


@pytest.mark.parametrize("chunk_tokens", [1, 2 * T, 3 * T, 100 * T], ids=str)
def test_chunks_of_a_micro_batch_give_the_same_step(toy, single, chunk_tokens):
    """5 rows at once, one by one, in 2 + 2 + 1 and in 3 + 2, with dropout, also accumulated."""
    settings, all_rows = Optimizer(name="sgd", lr=0.1), make_rows(6, 5)
    results = []
    for size in (0, chunk_tokens):
        for accumulates in (False, True):
            steps, state, _ = make_steps(toy, single, settings, chunk_tokens=size)
            batch, step_values = batch_of(single, all_rows), put_scalars(single, settings=settings)
            if accumulates:
                accumulation = steps.accumulate(state, {}, steps.new_accumulation(state), batch)
                state, figures = steps.update(state, accumulation, step_values)
            else:
                state, figures = steps.full_step(state, {}, batch, step_values)
            results.append((single.fetch_state(state["trainable"]), fetch_step_metrics(figures)))
    for params, figures in results[1:]:
        assert_as_close(params, results[0][0], results[0][0])
        assert figures == pytest.approx(results[0][1], rel=1e-5)


def test_a_micro_batch_without_labels_changes_nothing(toy, single):
    steps, state, params = make_steps(toy, single, Optimizer(name="sgd", lr=0.1))
    empty = make_rows(0)
    empty["labels"][:] = IGNORED
    accumulation = steps.accumulate(state, {}, steps.new_accumulation(state), batch_of(single, empty))
    state, figures = steps.update(state, accumulation, put_scalars(single, settings=Optimizer(name="sgd")))
    assert set(fetch_step_metrics(figures).values()) == {0}
    assert is_close(single.fetch_state(state["trainable"]), params, 0.0)


def test_frozen_parameters_do_not_change_and_have_no_state(toy, single):
    params = toy.init(jax.random.key(0))
    leaves = flatten(params)
    path = ("layers", "mlp", "up", "weight")
    trainable, frozen = unflatten({path: leaves.pop(path)}), unflatten(leaves)
    assert jax.tree.structure(merge(trainable, frozen)) == jax.tree.structure(params)
    steps = Steps(single, make_loss(toy), build(SETTINGS, toy.decays(trainable)))
    state, base = steps.new_state(single.put_state(trainable)), single.put_state(frozen)
    state, _ = steps.full_step(state, base, batch_of(single, make_rows(0)), put_scalars(single))
    assert len(flatten(state["optimizer"])) == 2 and len(flatten(state["trainable"])) == 1
    assert is_close(single.fetch_state(base), frozen, 0.0)
    assert not is_close(single.fetch_state(state["trainable"]), trainable, 1e-4)


def test_dropout_depends_only_on_token_seeds(toy, single):
    steps, state, _ = make_steps(toy, single)

    def total(**changed):
        batch = batch_of(single, make_rows(0) | changed)
        accumulation = steps.accumulate(state, {}, steps.new_accumulation(state), batch)
        return single.fetch_state(accumulation)["sums"]["total"].item()

    other = make_rows(0)["token_seeds"] + np.int32(1)
    assert total() == total() != total(token_seeds=other)
    without = make_rows(0)
    del without["token_seeds"]
    with pytest.raises(UserError, match="token_seeds"):
        steps.accumulate(state, {}, steps.new_accumulation(state), batch_of(single, without))


def test_evaluation_and_prediction_do_not_change_the_state(toy, single):
    def predict(params, batch):
        return {"best": toy.logits(params, toy.hidden(params, batch)).argmax(-1)}

    steps, state, params = make_steps(toy, single, predict=predict)
    batch = batch_of(single, make_rows(0))
    first = jax.device_get(steps.eval_step(state["trainable"], {}, batch))
    second = jax.device_get(steps.eval_step(state["trainable"], {}, batch))
    assert first == second and set(first) == {"total", "weight", "correct"}
    expected = make_loss(toy)(params, make_rows(0), None, True)
    assert first["total"] == pytest.approx(expected.total.item(), rel=1e-6) and first["correct"] == expected.correct
    best = single.fetch_rows(steps.predict_step(state["trainable"], {}, batch))["best"]
    assert np.array_equal(best, predict(params, make_rows(0))["best"][None])


def test_each_shape_is_compiled_once_without_transfers(toy, single):
    steps, state, _ = make_steps(toy, single)
    accumulation = steps.new_accumulation(state)
    batches = [batch_of(single, make_rows(seed, length=length)) for seed, length in enumerate((10, 6, 10, 6))]
    step_values = [put_scalars(single, step) for step in range(3)]
    after_first = None
    with jax.transfer_guard("disallow"):
        for step in range(3):
            accumulation = steps.new_accumulation(state)
            for batch in batches:
                accumulation = steps.accumulate(state, {}, accumulation, batch)
            state, _ = steps.update(state, accumulation, step_values[step])
            after_first = after_first or toy.num_traces
    assert toy.num_traces == after_first <= 4  # scan bodies are traced up to twice for a shape


def test_state_and_accumulation_are_donated(toy, single):
    steps, state, _ = make_steps(toy, single)
    accumulation = steps.new_accumulation(state)
    new = steps.accumulate(state, {}, accumulation, batch_of(single, make_rows(0)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(accumulation["gradients"]))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    steps.update(state, new, put_scalars(single))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_bfloat16_gradients_are_summed_in_float32(toy, single):
    steps, state, params = make_steps(toy, single)
    small = single.put_state(jax.tree.map(lambda p: p.astype(jnp.bfloat16), params))
    state = steps.new_state(small)
    accumulation = steps.new_accumulation(state)
    assert {leaf.dtype for leaf in jax.tree.leaves(accumulation["gradients"])} == {jnp.dtype("float32")}
    state, _ = steps.update(state, accumulation, put_scalars(single))
    assert {leaf.dtype for leaf in jax.tree.leaves(state["trainable"])} == {jnp.dtype("bfloat16")}


def test_a_value_that_is_not_finite_is_reported(toy, single):
    steps, state, params = make_steps(toy, single)
    params["head"]["bias"] = params["head"]["bias"].at[0].set(jnp.nan)
    state = steps.new_state(single.put_state(params))
    _, figures = steps.full_step(state, {}, batch_of(single, make_rows(0)), put_scalars(single))
    with pytest.raises(UserError, match="Step 4 .epoch 2.: loss is nan"):
        check_finite(fetch_step_metrics(figures), 4, 2)
    check_finite({"loss": 1.0, "grad_norm": 2.0}, 4, 2)
    with pytest.raises(UserError, match="gradient norm inf"):
        check_finite({"loss": 1.0, "grad_norm": float("inf")}, 4, 2)


def test_the_global_norm_equals_torchs():
    tree = {"a": np.arange(5.0), "b": {"c": -np.ones((2, 3))}}
    norm = torch.nn.utils.get_total_norm([torch.tensor(x) for x in jax.tree.leaves(tree)])
    assert optax.global_norm(tree) == pytest.approx(norm.item())
