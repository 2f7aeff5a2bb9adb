"""Losses compared with the torch engine: values, gradients, memory, compilations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

from jax_engine.distributed import loss
from jax_engine.distributed.interface import DATA_AXES
from jax_engine.distributed.loss import IGNORED, span_loss, token_log_probs, token_loss
from jax_engine.distributed.mesh import ShardedMesh
from lmmods.core.settings import TokenLoss
from lmmods.torch_engine.nn import loss as torch_loss
from lmmods.torch_engine.tasks import qa
from tests.closeness import Float64, assert_as_close

B, T, D, V = 8, 9, 12, 50


def make_inputs(labelled, seed=0):
    random = np.random.default_rng(seed)
    targets = np.where(random.random((B, T)) < labelled, random.integers(0, V, (B, T)), IGNORED)
    return (random.normal(size=(B, T, D)).astype(np.float32), targets,
            {"weight": random.normal(size=(V, D)).astype(np.float32), "bias": random.normal(size=V).astype(np.float32)})


def run_jax(hidden, targets, params, count=True, vocab_size=V, plain=False, weights=None):
    sums = token_loss(hidden, targets, lambda h: h @ params["weight"].T + params["bias"], vocab_size, count, plain,
                      weights)
    return sums.total, sums


def run_torch_loss(hidden, targets, params):
    hidden, weight, bias = (torch.tensor(x, dtype=torch.float32, requires_grad=True)
                            for x in (hidden, params["weight"], params["bias"]))
    sums = torch_loss.token_loss(hidden, torch.tensor(targets), lambda h: h @ weight.T + bias, [weight, bias], V, True)
    sums.total.backward()
    return sums, (hidden.grad, {"weight": weight.grad, "bias": bias.grad})


def check_close(actual, expected):
    """Compare sums of the same numbers in different order; neither is more exact."""
    for pair in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert_as_close(*pair, pair[1], magnitude=1)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * V * 5)
    monkeypatch.setattr(loss, "MIN_CHUNK", 1)


@pytest.mark.parametrize("labelled", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("form", ["chunks", "one chunk", "plain"])
def test_the_token_loss_equals_torchs(labelled, form, monkeypatch):
    if form == "chunks":
        monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * V * 5)
        monkeypatch.setattr(loss, "MIN_CHUNK", 1)
    hidden, targets, params = make_inputs(labelled)
    expected, expected_gradients = run_torch_loss(hidden, targets, params)
    with Float64():
        exact, exact_gradients = run_torch_loss(hidden, targets, params)
    compute = partial(run_jax, plain=form == "plain")
    differentiate = jax.jit(jax.value_and_grad(compute, argnums=(0, 2), has_aux=True))
    (total, sums), gradients = differentiate(hidden, targets, params)
    assert_as_close(total, expected.total, exact.total)
    assert_as_close(gradients, expected_gradients, exact_gradients)
    assert (sums.weight, sums.correct) == (expected.weight.item(), expected.correct.item())
    without_gradient = jax.jit(compute)(hidden, targets, params)[1]
    assert_as_close(without_gradient.total, expected.total, exact.total)
    assert without_gradient.correct == sums.correct


@pytest.mark.parametrize("form", [TokenLoss(0.1), TokenLoss(0.0, 0.01), TokenLoss(0.2, 0.01), TokenLoss(dft=True),
                                  TokenLoss(z_loss=0.01, dft=True)], ids=str)
@pytest.mark.parametrize("plain", [False, True])
def test_variants_of_the_token_loss_equal_torchs(form, plain, small_chunks):
    hidden, targets, params = make_inputs(0.4)
    weights = np.random.default_rng(1).choice([0.25, 1, 3], (B, T)).astype(np.float32)

    def compute(hidden, params):
        return token_loss(hidden, targets, lambda h: h @ params["weight"].T + params["bias"], V, plain=plain,
                          weights=weights, form=form).total

    def run_torch():
        leaves = [torch.tensor(x, dtype=torch.float32, requires_grad=True)
                  for x in (hidden, params["weight"], params["bias"])]
        x, weight, bias = leaves
        total = torch_loss.token_loss(x, torch.tensor(targets), lambda h: h @ weight.T + bias, [weight, bias], V,
                                      weights=torch.tensor(weights, dtype=torch.float32), form=form).total
        return total, torch.autograd.grad(total, leaves)

    expected = run_torch()
    with Float64():
        exact = run_torch()
    total, (by_hidden, by_params) = jax.jit(jax.value_and_grad(compute, argnums=(0, 1)))(hidden, params)
    assert_as_close((total, (by_hidden, by_params["weight"], by_params["bias"])), expected, exact)
    assert_as_close(jax.jit(compute)(hidden, params), expected[0], exact[0])


@pytest.mark.parametrize("plain", [False, True])
def test_each_position_counts_by_its_weight(plain, small_chunks):
    hidden, targets, params = make_inputs(0.4)
    weights = np.random.default_rng(1).choice([0.25, 1, 3], (B, T)).astype(np.float32)

    def compute_full(hidden, params):
        log_probs = jax.nn.log_softmax(hidden @ params["weight"].T + params["bias"])
        picked = jnp.take_along_axis(log_probs, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        return -jnp.where(targets == IGNORED, 0, picked * weights).sum()

    differentiate = jax.value_and_grad(partial(run_jax, plain=plain, weights=weights), argnums=(0, 2), has_aux=True)
    (total, sums), gradients = differentiate(hidden, targets, params)
    expected, expected_gradients = jax.value_and_grad(compute_full, argnums=(0, 1))(hidden, params)
    hits = (hidden @ params["weight"].T + params["bias"]).argmax(-1) == targets
    check_close((total, sums.weight, sums.correct), (expected, weights[targets != IGNORED].sum(), weights[hits].sum()))
    check_close(gradients, expected_gradients)


def test_cotangent_scales_the_gradient(small_chunks):
    hidden, targets, params = make_inputs(0.4)
    once = jax.grad(lambda h: run_jax(h, targets, params)[0])(hidden)
    check_close(jax.grad(lambda h: -3 * run_jax(h, targets, params)[0])(hidden), -3 * once)


def test_any_head_is_differentiated(small_chunks):
    """A head with soft-cap, adapter and a tied table that is also used elsewhere, compared with full logits."""
    hidden, targets, params = make_inputs(0.5)
    params["lora"] = np.full((V, D), 0.1, np.float32)

    def head(params, h):
        return 5 * jnp.tanh(h @ (params["weight"] + params["lora"]).T / 5 + params["bias"])

    def compute_chunked(params):
        return token_loss(hidden * params["weight"][:1], targets, lambda h: head(params, h), V).total

    def compute_full(params):
        log_probs = jax.nn.log_softmax(head(params, hidden * params["weight"][:1]))
        picked = jnp.take_along_axis(log_probs, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        return -jnp.where(targets == IGNORED, 0, picked).sum()

    check_close(*(jax.grad(f)(params) for f in (compute_chunked, compute_full)))


def test_any_number_of_labels_uses_the_same_program(small_chunks):
    step = jax.jit(jax.grad(run_jax, has_aux=True))
    for labelled in (0.0, 0.1, 0.9, 1.0):
        step(*make_inputs(labelled))
    assert step._cache_size() == 1


def test_bfloat16_hidden_states_give_a_float32_loss(small_chunks):
    hidden, targets, params = make_inputs(1.0)
    total = run_jax(jnp.asarray(hidden, jnp.bfloat16), targets, params)[0]
    exact = run_jax(np.asarray(jnp.asarray(hidden, jnp.bfloat16), np.float32), targets, params)[0]
    assert total.dtype == jnp.float32 and abs(total - exact) / (B * T) < 2e-3


@pytest.mark.parametrize("trains_head", [True, False])
@pytest.mark.parametrize("form", ["loss", "log-probs"])
def test_a_wide_vocabulary_needs_memory_for_one_chunk_of_logits(trains_head, form):
    """At V = 128k: one chunk of logits and its gradient, never [B, T, V]."""
    wide, rows, length, size = 128_000, 4, 512, 16
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in
              (((rows, length, size), jnp.float32), ((rows, length), jnp.int32), ((wide, size), jnp.float32))]

    def total(hidden, targets, weight):
        if form == "loss":
            return token_loss(hidden, targets, lambda h: h @ weight.T, wide).total
        return jnp.square(token_log_probs(hidden, targets, lambda h: h @ weight.T, wide).sum(1)).sum()

    compiled = jax.jit(jax.grad(total, argnums=(0, 2) if trains_head else (0,))).lower(*shapes).compile()
    chunk = 4 * loss.MIN_CHUNK * wide
    assert compiled.memory_analysis().temp_size_in_bytes < 2.1 * chunk < 4 * rows * length * wide / 7


def test_a_frozen_head_gets_no_gradient():
    hidden, targets, params = make_inputs(0.5)
    text = str(jax.make_jaxpr(jax.grad(lambda h: run_jax(h, targets, params, False)[0]))(hidden))
    assert f"f32[1,{V},{D}]" not in text
    text = str(jax.make_jaxpr(jax.grad(lambda p: run_jax(hidden, targets, p, False)[0]))(params))
    assert f"f32[1,{V},{D}]" in text


def test_the_token_loss_is_the_same_on_a_mesh(small_chunks):
    hidden, targets, params = make_inputs(0.3)
    mesh = ShardedMesh(data=2, fsdp=2, tensor=2).mesh
    differentiate = jax.value_and_grad(lambda h, t, p: run_jax(h, t, p)[0], argnums=(0, 2))
    expected_total, expected = differentiate(hidden, targets, params)
    rows = NamedSharding(mesh, PartitionSpec(DATA_AXES))
    args = (jax.device_put(hidden, rows), jax.device_put(targets, rows),
            {"weight": jax.device_put(params["weight"], NamedSharding(mesh, PartitionSpec("fsdp"))),
             "bias": jax.device_put(params["bias"], NamedSharding(mesh, PartitionSpec()))})
    with jax.set_mesh(mesh):
        (total, sums), gradients = jax.jit(jax.value_and_grad(run_jax, argnums=(0, 2), has_aux=True))(*args)
    check_close((total, gradients), (expected_total, expected))
    assert sums.weight == (targets != IGNORED).sum()


def softplus_loss_of(targets, plain=False, dense=False):
    """Return a loss whose cotangents depend on the summed log-probabilities of the rows."""
    def loss(hidden, params):
        def head(h):
            return 5 * jnp.tanh(h @ params["weight"].T / 5 + params["bias"])

        if dense:
            picked = jnp.take_along_axis(jax.nn.log_softmax(head(hidden)), jnp.maximum(targets, 0)[..., None], axis=-1)
            log_probs = jnp.where(targets == IGNORED, 0, picked[..., 0])
        else:
            log_probs = token_log_probs(hidden, targets, head, V, plain)
        rows = log_probs.sum(1)
        return jax.nn.softplus(0.1 * (rows[1::2] - rows[::2])).sum(), log_probs

    return loss


@pytest.mark.parametrize("labelled", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("plain", [False, True])
def test_log_probs_of_tokens_equal_a_full_log_softmax(labelled, plain, small_chunks):
    hidden, targets, params = make_inputs(labelled)
    differentiate = [jax.jit(jax.value_and_grad(softplus_loss_of(targets, plain, dense), argnums=(0, 1), has_aux=True))
                     for dense in (False, True)]
    check_close(*(function(hidden, params) for function in differentiate))


def test_log_probs_are_the_same_on_a_mesh(small_chunks):
    hidden, targets, params = make_inputs(0.3)
    expected = jax.value_and_grad(softplus_loss_of(targets, dense=True), argnums=(0, 1), has_aux=True)(hidden, params)
    mesh = ShardedMesh(fsdp=2, sequence=3, devices=jax.devices()[:6]).mesh
    rows = NamedSharding(mesh, PartitionSpec(DATA_AXES))
    placed = {"weight": jax.device_put(params["weight"], NamedSharding(mesh, PartitionSpec("fsdp"))),
              "bias": jax.device_put(params["bias"], NamedSharding(mesh, PartitionSpec()))}
    with jax.set_mesh(mesh):
        loss_on_mesh = softplus_loss_of(jax.device_put(targets, rows))
        actual = jax.jit(jax.value_and_grad(loss_on_mesh, argnums=(0, 1), has_aux=True))(
            jax.device_put(hidden, rows), placed)
    check_close(actual, expected)


def test_log_probs_compute_no_gradient_of_a_frozen_head():
    hidden, targets, params = make_inputs(0.5)
    text = str(jax.make_jaxpr(jax.grad(lambda h: softplus_loss_of(targets)(h, params)[0]))(hidden))
    assert f"f32[1,{V},{D}]" not in text
    assert f"f32[1,{V},{D}]" in str(jax.make_jaxpr(jax.grad(lambda p: softplus_loss_of(targets)(hidden, p)[0]))(params))


def test_labels_are_shifted_as_on_torch():
    labels = np.array([[5, 6, IGNORED, 7]])
    assert np.array_equal(loss.shift_labels(labels), torch_loss.shift_labels(torch.tensor(labels)))


@pytest.mark.parametrize("added", [0, 4])
def test_the_span_loss_equals_torchs_with_any_padding(added):
    random = np.random.default_rng(0)
    logits = random.normal(size=(5, 7, 2)).astype(np.float32)
    batch = {"start_positions": np.array([0, 3, IGNORED, 6, 2]), "end_positions": np.array([1, 3, IGNORED, 6, 5]),
             "attention_mask": np.ones((5, 7), np.int64)}
    batch["attention_mask"][4, 6:] = 0

    def run_torch():
        tensor = torch.tensor(logits, dtype=torch.float32, requires_grad=True)
        sums = qa.span_loss(tensor[..., 0], tensor[..., 1], {name: torch.tensor(x) for name, x in batch.items()})
        sums.total.backward()
        return sums, tensor.grad

    expected, expected_gradient = run_torch()
    with Float64():
        exact, exact_gradient = run_torch()
    padded = np.pad(logits, ((0, 0), (0, added), (0, 0)), constant_values=9.0)
    batch["attention_mask"] = np.pad(batch["attention_mask"], ((0, 0), (0, added)))

    def total(logits):
        sums = span_loss(logits, batch)
        return sums.total, sums.weight

    (value, weight), gradient = jax.value_and_grad(total, has_aux=True)(padded)
    assert_as_close(value, expected.total, exact.total)
    assert_as_close(gradient[:, :7], expected_gradient, exact_gradient)
    assert weight == expected.weight.item() == 4 and not gradient[:, 7:].any()
