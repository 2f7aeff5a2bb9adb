"""Policy losses against the formulas of their papers, token by token in numpy with float64."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lmmods.core.errors import UserError
from lmmods.core.policy_losses import LOSSES, PolicyLoss

TORCH = SimpleNamespace(exp=torch.exp, where=torch.where, stop_gradient=torch.Tensor.detach)
JAX = SimpleNamespace(exp=jnp.exp, where=jnp.where, stop_gradient=jax.lax.stop_gradient)
N, T = 8, 7
RNG = np.random.default_rng(0)
LOGPS = RNG.uniform(-4, -0.1, (N, T))
MOVED = np.array([0.6, -0.6, -0.6, 0.6, 0.0, 0.0, 0.6, 0.0])  # log-ratio per row; the first two are clipped
OLD = LOGPS - MOVED[:, None] + RNG.normal(0, 0.2, (N, T))
REFERENCE = LOGPS + RNG.normal(0, 0.5, (N, T))
SAMPLER_WEIGHTS = RNG.uniform(0.5, 2, (N, T))
ADVANTAGES = np.array([1.5, -0.7, 0.4, -1.2, 0.9, -2.0, 0.0, 1.0])
MASK = np.zeros((N, T))
for row, sampled in enumerate(([2, 3, 4], [0, 1, 2, 3, 4, 5, 6], [6], [1, 2, 5, 6], [3, 4, 5], [2, 3], [1, 2, 3], [])):
    MASK[row, sampled] = 1  # row 3 has a gap between its tokens, the last row has no tokens

SETTINGS = [dict(loss=loss, ratio=ratio, beta=beta, use_bias_correction_kl=corrected, epsilon_high=high,
                 max_new_tokens=20)
            for loss, ratio, (beta, corrected), high in itertools.product(
                LOSSES, ("token", "sequence"), ((0.0, True), (0.3, True), (0.3, False)), (None, 0.35))]
FLAGS = list(itertools.product((True, False), (True, False)))  # has old log-probabilities, has sampler weights


def settings_id(settings: dict) -> str:
    return "-".join(map(str, settings.values()))


def make_arguments(settings: dict, has_old: bool = True, weighted: bool = True) -> dict[str, np.ndarray | None]:
    return {"mask": MASK, "advantages": ADVANTAGES, "old": OLD if has_old else None,
            "reference": REFERENCE if settings["beta"] else None,
            "sampler_weights": SAMPLER_WEIGHTS if weighted else None}


def compute_in_torch(settings: dict, arguments: dict, logps: torch.Tensor, rows=slice(None)):
    arguments = {key: None if value is None else torch.tensor(value[rows], dtype=logps.dtype)
                 for key, value in arguments.items()}
    return PolicyLoss(**settings).of_rows(TORCH, logps, **arguments)


def compute_by_token(settings: dict, arguments: dict, logps: np.ndarray = LOGPS) -> tuple:
    """Return loss, weight and metrics of each row, computed token by token."""
    s = PolicyLoss(**settings)
    totals, weights = np.zeros(N), np.zeros(N)
    metrics = {name: np.zeros((N, 2)) for name in s.metric_names}
    for n in range(N):
        at = np.flatnonzero(arguments["mask"][n])
        if not len(at):
            continue
        a = arguments["advantages"][n]
        change = logps[n] - arguments["old"][n] if arguments["old"] is not None else np.zeros(T)
        of_row = np.exp(change[at].mean())
        for t in at:
            r = of_row if s.ratio == "sequence" else np.exp(change[t])
            low = 1 - s.epsilon
            if s.loss == "cispo":
                high = 5.0 if s.epsilon_high is None else s.epsilon_high
                value = -min(r, high) * a * logps[n, t]
            else:
                high = 1 + (s.epsilon if s.epsilon_high is None else s.epsilon_high)
                value = -min(r * a, np.clip(r, low, high) * a)
            if arguments["sampler_weights"] is not None:
                value *= arguments["sampler_weights"][n, t]
            fraction = 1 / len(at) if s.ratio == "sequence" else 1
            metrics["ratio"][n] += fraction * r, fraction
            metrics["clip_ratio/high"][n] += fraction * (r > high and a > 0), fraction
            if s.loss != "cispo":
                metrics["clip_ratio/low"][n] += fraction * (r < low and a < 0), fraction
            if s.beta:
                d = arguments["reference"][n, t] - logps[n, t]
                kl = (np.exp(d) - d - 1) * (r if s.use_bias_correction_kl else 1)
                value += s.beta * kl
                metrics["kl"][n] += kl, 1
            totals[n] += value
        weights[n] = len(at) if s.loss in ("dapo", "cispo") else 1
        totals[n] /= {"grpo": len(at), "dr_grpo": s.max_new_tokens}.get(s.loss, 1)
    return totals, weights, metrics


@pytest.mark.parametrize("settings", SETTINGS, ids=settings_id)
def test_a_policy_loss_equals_its_formula(settings):
    for has_old, weighted in FLAGS:
        arguments = make_arguments(settings, has_old, weighted)
        total, weight, metrics = compute_in_torch(settings, arguments, torch.tensor(LOGPS))
        expected = compute_by_token(settings, arguments)
        np.testing.assert_allclose(total, expected[0], rtol=1e-12, atol=1e-14)
        np.testing.assert_array_equal(weight, expected[1])
        assert tuple(metrics) == PolicyLoss(**settings).metric_names
        for name, values in expected[2].items():
            np.testing.assert_allclose(torch.stack(metrics[name], dim=1), values, rtol=1e-12, atol=1e-14, err_msg=name)


def test_the_test_rows_reach_both_clip_bounds():
    """Otherwise the formulas would agree without clipping."""
    for ratio in ("token", "sequence"):
        for loss in ("dapo", "cispo"):
            settings = {"loss": loss, "ratio": ratio, "beta": 0.0, "epsilon_high": 0.35 if loss == "dapo" else 1.1}
            metrics = compute_by_token(settings, make_arguments(settings))[2]
            for name in metrics.keys() - {"ratio"}:
                total, weight = metrics[name].sum(0)
                assert 0 < total < weight, (ratio, loss, name)


@pytest.mark.parametrize("settings", SETTINGS, ids=settings_id)
def test_policy_gradients_are_equal_on_both_engines(settings):
    arguments = make_arguments(settings)
    logps = torch.tensor(LOGPS, dtype=torch.float32, requires_grad=True)
    total, *_ = compute_in_torch(settings, arguments, logps)
    total.sum().backward()

    def sum_losses(logps):
        jax_arguments = {key: None if value is None else jnp.asarray(value, jnp.float32)
                         for key, value in arguments.items()}
        return PolicyLoss(**settings).of_rows(JAX, logps, **jax_arguments)[0].sum()

    gradient = jax.jit(jax.grad(sum_losses))(jnp.asarray(LOGPS, jnp.float32))
    np.testing.assert_allclose(gradient, logps.grad, rtol=2e-6, atol=2e-7)
    assert (logps.grad[MASK == 0] == 0).all() and logps.grad.abs().sum() > 0


@pytest.mark.parametrize("settings", [case for case in SETTINGS if case["loss"] != "cispo"], ids=settings_id)
def test_policy_gradients_equal_finite_differences(settings):
    """Except cispo, whose ratio has no gradient; see below."""
    logps = torch.tensor(LOGPS, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: compute_in_torch(settings, make_arguments(settings), x)[0], (logps,))


@pytest.mark.parametrize("settings", [case for case in SETTINGS if case["loss"] == "cispo"], ids=settings_id)
def test_the_ratio_of_cispo_is_a_constant_weight(settings):
    logps = torch.tensor(LOGPS, requires_grad=True)
    arguments = make_arguments(settings | {"beta": 0.0})
    compute_in_torch(settings | {"beta": 0.0, "use_bias_correction_kl": True}, arguments, logps)[0].sum().backward()
    change = LOGPS - OLD
    if settings["ratio"] == "sequence":
        change = np.broadcast_to((change * MASK).sum(1, keepdims=True) / np.maximum(MASK.sum(1, keepdims=True), 1),
                                 (N, T))
    max_ratio = settings["epsilon_high"] or 5.0
    expected = -np.minimum(np.exp(change), max_ratio) * ADVANTAGES[:, None] * SAMPLER_WEIGHTS * MASK
    np.testing.assert_allclose(logps.grad, expected, rtol=1e-12)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_the_gradient_is_the_policy_gradient_with_a_baseline(loss, ratio):
    """Williams 1992: every ratio is 1, and the gradient equals that of -A log p."""
    settings = {"loss": loss, "ratio": ratio, "beta": 0.0, "max_new_tokens": 20}
    logps = torch.tensor(LOGPS, requires_grad=True)
    total, weight, metrics = compute_in_torch(settings, make_arguments(settings, has_old=False, weighted=False), logps)
    total.sum().backward()
    lengths = np.maximum(MASK.sum(1, keepdims=True), 1)
    weights = MASK / {"grpo": lengths, "dr_grpo": 20}.get(loss, 1)
    np.testing.assert_allclose(logps.grad, -ADVANTAGES[:, None] * weights, rtol=1e-14)
    values = {name: (value.sum() / count.sum()).item() for name, (value, count) in metrics.items()}
    assert values == {"ratio": 1.0, "clip_ratio/high": 0.0, **({} if loss == "cispo" else {"clip_ratio/low": 0.0})}


@pytest.mark.parametrize("bound", [0.0, 1.0])
def test_a_ratio_at_its_bound_keeps_its_full_gradient(bound):
    """With epsilon 0, every ratio of 1 is at both bounds, where minimum and maximum could halve the gradient."""
    logps = torch.tensor(LOGPS, requires_grad=True)
    settings = {"loss": "dapo", "beta": 0.0, "epsilon": bound}
    compute_in_torch(settings, make_arguments(settings, has_old=False, weighted=False), logps)[0].sum().backward()
    np.testing.assert_array_equal(logps.grad, -ADVANTAGES[:, None] * MASK)


@pytest.mark.parametrize("settings", SETTINGS, ids=settings_id)
def test_with_zero_advantages_only_the_kl_divergence_remains(settings):
    arguments = make_arguments(settings) | {"advantages": np.zeros(N)}
    logps = torch.tensor(LOGPS, requires_grad=True)
    total, *_ = compute_in_torch(settings, arguments, logps)
    total.sum().backward()
    assert (logps.grad.abs().sum() > 0) == (total.abs().sum() > 0) == (settings["beta"] > 0)


@pytest.mark.parametrize("settings", SETTINGS, ids=settings_id)
def test_the_sums_do_not_depend_on_the_batch_split(settings):
    arguments = make_arguments(settings)

    def sums(size):
        rows = [slice(start, start + size) for start in range(0, N, size)]
        results = [compute_in_torch(settings, arguments, torch.tensor(LOGPS[part]), part) for part in rows]
        columns = [*zip(*((total, weight, *itertools.chain(*metrics.values())) for total, weight, metrics in results),
                        strict=True)]
        return [torch.cat(column) for column in columns]

    for size in (4, 1):
        for split, whole in zip(sums(size), sums(N), strict=True):
            np.testing.assert_allclose(split, whole, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("settings", SETTINGS, ids=settings_id)
def test_rows_split_across_processes_add_up(settings):
    """As with context parallelism: each process has a part of the tokens, and sums over all of them."""
    arguments, sums = make_arguments(settings), []

    def of_part(part, row_sums):
        part_arguments = {key: None if value is None else torch.tensor(value if value.ndim == 1 else value[:, part])
                          for key, value in arguments.items()}
        return PolicyLoss(**settings).of_rows(TORCH, torch.tensor(LOGPS[:, part]), **part_arguments, row_sums=row_sums)

    parts = slice(0, 4), slice(4, T)
    for part in parts:  # no sum over processes depends on another one
        sums.append([])
        of_part(part, lambda x: sums[-1].append(x.sum(-1)) or x.sum(-1))
    results = []
    for part in parts:
        received = iter([first + second for first, second in zip(*sums, strict=True)])
        results.append(of_part(part, lambda x, received=received: next(received)))
    total, weight, metrics = compute_in_torch(settings, arguments, torch.tensor(LOGPS))
    for whole, first, second in ((total, results[0][0], results[1][0]), (weight, results[0][1], results[1][1]),
                                 *((metrics[name][i], results[0][2][name][i], results[1][2][name][i])
                                   for name in metrics for i in (0, 1))):
        np.testing.assert_allclose(first + second, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("settings", SETTINGS, ids=settings_id)
@pytest.mark.parametrize("filler", [np.nan, np.inf, -np.inf, -1e4])
def test_tokens_that_were_not_sampled_have_no_effect(settings, filler):
    """Neither padding in a row nor a padding row, whatever its values; gradients stay finite."""
    arguments = make_arguments(settings)

    def fill(values):
        return None if values is None else np.where(MASK > 0, values, filler)

    logps, plain = (torch.tensor(x, requires_grad=True) for x in (fill(LOGPS), LOGPS))
    filled_arguments = arguments | {key: fill(arguments[key]) for key in ("old", "reference", "sampler_weights")}
    actual, expected = compute_in_torch(settings, filled_arguments, logps), compute_in_torch(settings, arguments, plain)
    actual[0].sum().backward()
    expected[0].sum().backward()
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    assert torch.equal(logps.grad, plain.grad) and torch.isfinite(logps.grad).all()
    for name, (value, count) in expected[2].items():
        assert torch.equal(actual[2][name][0], value) and torch.equal(actual[2][name][1], count), name
        assert value[-1] == count[-1] == 0  # the row without tokens
    assert actual[0][-1] == actual[1][-1] == 0


def test_a_nan_token_gives_a_nan_policy_loss():
    """A run stops on a NaN loss, so clipping may not hide it."""
    for settings in SETTINGS:
        logps = torch.tensor(LOGPS)
        logps[0, 2] = torch.nan
        assert torch.isnan(compute_in_torch(settings, make_arguments(settings), logps)[0][0])


@pytest.mark.parametrize(("settings", "message"), [
    ({"loss": "bnpo"}, "model.loss is bnpo, but must be one of dapo, grpo, dr_grpo, cispo"),
    ({"ratio": "geometric"}, "model.ratio is geometric, but must be one of token, sequence"),
    ({"epsilon": -0.1}, "model.epsilon is -0.1, but must be from 0 to 1"), ({"epsilon": 1.5}, "from 0 to 1"),
    ({"epsilon_high": -1.0}, "model.epsilon_high is -1.0, but must be null, or 0 or more"),
    ({"loss": "cispo", "epsilon_high": 0.0}, "maximum ratio"), ({"loss": "cispo", "epsilon": 0.1}, "does not use it"),
    ({"beta": -0.1}, "model.beta is -0.1, but must be 0 or more"),
    ({"beta": float("nan")}, "model.beta is nan"), ({"use_bias_correction_kl": False}, "true with model.beta 0"),
    ({"max_new_tokens": 0}, "model.max_new_tokens is 0, but must be 1 or more")])
def test_invalid_policy_loss_settings_are_rejected(settings, message):
    with pytest.raises(UserError, match=message):
        PolicyLoss(**settings)
