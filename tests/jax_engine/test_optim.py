"""Update rules compared with torch.optim, transformers and bitsandbytes; stacks of layers with single layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from transformers import LlamaConfig

from jax_engine.distributed.tree import flatten
from jax_engine.models import hub
from jax_engine.optim import build, orthogonalize, step_scalars
from lmmods.core.errors import UserError
from lmmods.core.settings import Optimizer
from lmmods.torch_engine.nn import optim as torch_optim
from lmmods.torch_engine.nn.optim import build_optimizer, build_schedule
from tests.closeness import Float64, assert_as_close

NUM_STEPS = 50
SHAPES = {"matrix": (6, 10), "vector": (7,), "stack_matrix": (3, 5, 8), "stack_vector": (3, 9)}
DECAYS = {name: "matrix" in name for name in SHAPES}
RULES = {
    "adamw": Optimizer(name="adamw", lr=1e-2, weight_decay=0.1, schedule="cosine", warmup=5),
    "adamw_betas": Optimizer(name="adamw", lr=1e-2, betas=[0.8, 0.95], eps=1e-6, schedule="linear", warmup=0.1),
    "adafactor": Optimizer(name="adafactor", lr=1e-2, weight_decay=0.1),
    "sgd": Optimizer(name="sgd", lr=1e-2, weight_decay=0.1, schedule="wsd"),
    "sgd_momentum": Optimizer(name="sgd", lr=1e-2, momentum=0.9, weight_decay=0.1),
    "lion": Optimizer(name="lion", lr=1e-3, betas=[0.9, 0.99], weight_decay=0.1, schedule="linear", warmup=3),
}


def split_layers(name, array):
    """Return torch's parameters of a parameter on JAX."""
    return list(array) if name.startswith("stack") or name == "layers" else [array]


def run_torch(settings, params, gradients):
    """Return the parameters after all steps, and the learning rate of each step."""
    named = [(f"layers.{i}.weight" if name == "layers" else f"{name}_{i}",
              torch.nn.Parameter(torch.tensor(part, dtype=torch.float32)))
             for name, p in params.items() for i, part in enumerate(split_layers(name, p))]
    optimizer = build_optimizer(named, settings)
    schedule = build_schedule(optimizer, settings, NUM_STEPS)
    rates = []
    for step in range(NUM_STEPS):
        parts = [part for name in params for part in split_layers(name, gradients[step][name])]
        for (_, p), part in zip(named, parts, strict=True):
            p.grad = torch.tensor(part, dtype=torch.float32)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    values = iter(p.detach().numpy() for _, p in named)
    moved = {name: np.stack([next(values) for _ in split_layers(name, p)]).reshape(p.shape)
             for name, p in params.items()}
    return moved, rates


def make_params_and_gradients():
    random = np.random.default_rng(0)
    params = {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    # Layers have very different gradients, to reveal shared statistics.
    scale = {name: 10.0 ** np.arange(-1, 2).reshape(3, *[1] * (len(s) - 1)) if name.startswith("stack") else 1.0
             for name, s in SHAPES.items()}
    gradients = [{name: (scale[name] * random.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}
                 for _ in range(NUM_STEPS)]
    return params, gradients


@pytest.mark.parametrize("rule", RULES)
def test_fifty_steps_equal_the_torch_engines(rule):
    check_steps(RULES[rule], *make_params_and_gradients(), DECAYS)


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "adjust_lr": "original", "ns_steps": 3}], ids=str)
@pytest.mark.parametrize("shape", [(3, 6, 4), (2, 4, 9)], ids=str)
def test_fifty_steps_of_muon_equal_the_torch_engines(shape, options):
    """Matrices are well-conditioned: each iteration scales the rounding of small singular values by up to 3.4."""
    settings = Optimizer(name="muon", lr=1e-2, weight_decay=0.1, schedule="cosine", warmup=5, **options)
    random = np.random.default_rng(0)
    arrays = [{"layers": random.normal(size=shape).astype(np.float32), "embed": random.normal(size=(5, 6)).astype(
        np.float32), "bias": random.normal(size=7).astype(np.float32)} for _ in range(NUM_STEPS + 1)]
    check_steps(settings, arrays[0], arrays[1:], {"layers": True, "embed": True, "bias": False})


def check_steps(settings, params, gradients, decays):
    expected, rates = run_torch(settings, params, gradients)
    with Float64():
        exact, _ = run_torch(settings, params, gradients)
    optimizer = build(settings, decays)

    @jax.jit
    def step(params, state, gradients, scalars):
        updates, state = optimizer.update(gradients, state, params, **scalars)
        return optax.apply_updates(params, updates), state

    params_on_jax, state = jax.tree.map(jnp.asarray, params), optimizer.init(params)
    for index in range(NUM_STEPS):
        scalars = step_scalars(settings, index, NUM_STEPS)
        assert scalars["lr"] == np.float32(rates[index])
        params_on_jax, state = step(params_on_jax, state, gradients[index], scalars)
    assert step._cache_size() == 1
    assert_as_close(params_on_jax, expected, exact)
    assert all(np.abs(expected[name] - params[name]).max() > 1e-3 for name in params)


def test_only_matrices_decay():
    settings = Optimizer(name="adamw", lr=0.1, weight_decay=0.5)
    params = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    optimizer = build(settings, DECAYS)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params,
                                  **step_scalars(settings, 0, 1))
    assert {name: bool((u != 0).all()) for name, u in updates.items()} == DECAYS


def test_adafactor_stores_row_and_column_statistics_of_each_layer():
    state = build(RULES["adafactor"], DECAYS).init({name: jnp.ones(shape) for name, shape in SHAPES.items()})
    assert {".".join(path): leaf.shape for path, leaf in flatten(state).items()} == {
        "exp_avg_sq_row.matrix": (6,), "exp_avg_sq_col.matrix": (10,), "exp_avg_sq.vector": (7,),
        "exp_avg_sq_row.stack_matrix": (3, 5), "exp_avg_sq_col.stack_matrix": (3, 8), "exp_avg_sq.stack_vector": (3, 9)}


def test_plain_sgd_has_no_state():
    assert build(Optimizer(name="sgd"), DECAYS).init({name: jnp.ones(s) for name, s in SHAPES.items()}) == {}


def test_bfloat16_parameters_are_updated_as_on_torch():
    settings = Optimizer(name="adamw", lr=1e-2, weight_decay=0.1)
    random = np.random.default_rng(0)
    start, gradients = random.normal(size=(8, 8)), random.normal(size=(5, 8, 8))
    param = torch.nn.Parameter(torch.tensor(start, dtype=torch.bfloat16))
    torch_optimizer, optimizer = build_optimizer([("p", param)], settings), build(settings, {"p": True})
    params = {"p": jnp.asarray(start, jnp.bfloat16)}
    state = optimizer.init(params)
    for index, gradient in enumerate(gradients):
        param.grad = torch.tensor(gradient, dtype=torch.bfloat16)
        torch_optimizer.step()
        updates, state = optimizer.update({"p": jnp.asarray(gradient, jnp.bfloat16)}, state, params,
                                          **step_scalars(settings, index, 5))
        params = optax.apply_updates(params, updates)
    assert params["p"].dtype == state["exp_avg"]["p"].dtype == jnp.bfloat16
    assert np.abs(np.float32(params["p"]) - param.detach().float().numpy()).max() <= 2**-8 * np.abs(start).max()


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_32bit", "lion_8bit"])
def test_bitsandbytes_optimisers_are_rejected_by_name(name):
    with pytest.raises(UserError, match=f"{name}, which the JAX engine does not support. Use one of adamw.*torch"):
        build(Optimizer(name=name), DECAYS)


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_b_matrices_have_their_own_learning_rate(name):
    """As in the torch engine, and as in a run of B alone with that rate."""
    settings = Optimizer(name=name, lr=1e-2, b_lr_ratio=8.0, weight_decay=0.1, schedule="cosine", warmup=5)
    random = np.random.default_rng(0)
    arrays = [{"layers": {"q": {side: random.normal(size=(2, 4, 6)).astype(np.float32) for side in ("lora_A", "lora_B")}
                          }} for _ in range(NUM_STEPS + 1)]
    decays = {"layers": {"q": {"lora_A": True, "lora_B": True}}}

    def run_jax(settings):
        optimizer, params = build(settings, decays), arrays[0]
        state = optimizer.init(params)
        for index, gradients in enumerate(arrays[1:]):
            updates, state = optimizer.update(gradients, state, params, **step_scalars(settings, index, NUM_STEPS))
            params = optax.apply_updates(params, updates)
        return params["layers"]["q"]

    def run_torch_adapter():
        named = {f"layers.{i}.q.{side}.default.weight": torch.nn.Parameter(torch.tensor(part, dtype=torch.float32))
                 for side, leaf in arrays[0]["layers"]["q"].items() for i, part in enumerate(leaf)}
        optimizer = build_optimizer(named.items(), settings)
        schedule = build_schedule(optimizer, settings, NUM_STEPS)
        for gradients in arrays[1:]:
            for side, leaf in gradients["layers"]["q"].items():
                for i, part in enumerate(leaf):
                    named[f"layers.{i}.q.{side}.default.weight"].grad = torch.tensor(part, dtype=torch.float32)
            optimizer.step()
            schedule.step()
        return {side: torch.stack([named[f"layers.{i}.q.{side}.default.weight"].detach() for i in range(2)])
                for side in ("lora_A", "lora_B")}

    actual, expected = run_jax(settings), run_torch_adapter()
    with Float64():
        exact = run_torch_adapter()
    assert_as_close(actual, expected, exact)
    for side, ratio in (("lora_A", 1), ("lora_B", 8)):
        same = run_jax(Optimizer(name=name, lr=1e-2 * ratio, weight_decay=0.1, schedule="cosine", warmup=5))
        assert_as_close(actual[side], same[side], same[side])


# Muon ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
def test_muon_equals_optax(adjust_lr):
    """Without Nesterov, where both differ. Normalising hides that optax divides the average by 1 - 0.95^step."""
    settings = Optimizer(name="muon", lr=1e-2, weight_decay=0.1, nesterov=False, adjust_lr=adjust_lr)
    random = np.random.default_rng(0)
    params, *gradients = ({"layers": {"weight": jnp.asarray(random.normal(size=(9, 6)), jnp.float32)}}
                          for _ in range(6))
    # Matrices of optax are [in, out].
    outputs = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    optax_optimizer = optax.contrib.muon(1e-2, weight_decay=0.1, nesterov=False, eps=1e-12,
                                         consistent_rms=None if adjust_lr == "original" else 0.2,
                                         muon_weight_dimension_numbers={"layers": {"weight": outputs}})
    # The rule alone: a leaf of one layer.
    optimizer = build(settings, {"layers": {"weight": True}})
    actual = expected = params
    state, optax_state = optimizer.init(params), optax_optimizer.init(params)
    for index, gradient in enumerate(gradients):
        updates, state = optimizer.update(gradient, state, actual, **step_scalars(settings, index, 9))
        actual = optax.apply_updates(actual, updates)
        updates, optax_state = optax_optimizer.update(gradient, optax_state, expected)
        expected = optax.apply_updates(expected, updates)
    assert_as_close(actual, expected, expected)
    assert np.abs(actual["layers"]["weight"] - params["layers"]["weight"]).max() > 1e-2


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (3, 16, 12)], ids=str)
def test_muon_iterations_in_bfloat16_round_as_on_torch(shape):
    """Sums in another order may round differently, by a unit of the last of 8 bits, which grows in each iteration."""
    matrix = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    actual = np.float32(orthogonalize(jnp.asarray(matrix), 5, jnp.bfloat16))
    expected = torch_optim.orthogonalize(torch.tensor(matrix), 5, torch.bfloat16).float().numpy()
    with Float64():
        exact = torch_optim.orthogonalize(torch.tensor(matrix, dtype=torch.float64), 5, torch.float32).numpy()
    rounding = np.abs(expected - exact).max()
    assert np.abs(actual - expected).max() <= rounding / 2 and np.abs(actual - exact).max() <= 1.5 * rounding


def test_muon_stores_one_moment_for_matrices_inside_layers():
    params = {"embed": {"weight": jnp.ones((5, 6))}, "layers": {
        "up": {"weight": jnp.ones((3, 6, 4)), "bias": jnp.ones((3, 6)), "lora_A": jnp.ones((3, 2, 4))},
        "experts": {"gate_up_proj": jnp.ones((3, 2, 6, 4)), "lora_A": jnp.ones((3, 2, 4))}}}
    decays = jax.tree.map(lambda leaf: leaf.shape != (3, 6), params)
    state = build(Optimizer(name="muon"), decays).init(params)
    others = {"embed.weight", "layers.up.bias", "layers.experts.lora_A"}
    assert {name: {".".join(path) for path in flatten(tree)} for name, tree in state.items()} == {
        "momentum_buffer": {"layers.up.weight", "layers.up.lora_A", "layers.experts.gate_up_proj"},
        "exp_avg": others, "exp_avg_sq": others}


@pytest.mark.parametrize("rule", ["adamw", "adafactor", "sgd_momentum", "muon"])
@pytest.mark.parametrize("names", [None, {"model.layers.2.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"}])
def test_layer_decay_and_weight_averages_equal_torchs(rule, names):
    """For stacks of all layers or some, embeddings and the final norm."""
    config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=3, num_attention_heads=2)
    network = hub.network(config, "causal")
    if names:
        network.train_only(names)
    base = Optimizer(name="muon", lr=1e-2, weight_decay=0.1) if rule == "muon" else RULES[rule]
    settings = dataclasses.replace(base, layer_decay=0.6, ema_decay=0.8, schedule="linear", warmup=2)
    start, _ = network.split(network.init(0))
    random, layers = np.random.default_rng(0), network.num_named_layers
    gradients = [jax.tree.map(lambda p: random.normal(size=p.shape).astype(np.float32), start) for _ in range(4)]

    def run_torch_network():
        values = network.to_torch(start)
        named = {name: torch.nn.Parameter(torch.tensor(values.get(name, np.zeros(network.shape(path))),
                                                       dtype=torch.float32), requires_grad=name in values)
                 for name, path, _ in network.names()}
        optimizer = build_optimizer(named.items(), settings)
        schedule = build_schedule(optimizer, settings, 4)
        for gradient in gradients:
            for name, value in network.to_torch(gradient).items():
                named[name].grad = torch.tensor(value, dtype=torch.float32)
            optimizer.step()
            schedule.step()
        return [{name: named[name].detach() for name in values},
                {name: optimizer.state[named[name]]["ema"] for name in values}]

    optimizer, params = build(settings, network.decays(start), network.depths(start)), start
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step, gradient in enumerate(gradients):
        updates, state = update(gradient, state, params, **step_scalars(settings, step, 4, layers))
        params = optax.apply_updates(params, updates)
    actual, expected = [network.to_torch(params), network.to_torch(state["ema"])], run_torch_network()
    with Float64():
        exact = run_torch_network()
    assert set(actual[0]) == set(actual[1]) == (names or {name for name, *_ in network.names()})
    assert_as_close(actual, expected, exact)
