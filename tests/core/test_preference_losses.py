"""Preference losses against the formulas of their papers, in numpy with float64."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lmmods.core.errors import UserError
from lmmods.core.preference_losses import METHODS, UNSUPPORTED, PreferenceLoss

TORCH = SimpleNamespace(log_sigmoid=F.logsigmoid, sigmoid=torch.sigmoid, relu=torch.relu, log=torch.log,
                        expm1=torch.expm1, where=torch.where)
# Log-probabilities of (w, l) for policy and reference, and lengths: normal, equal and certain pairs.
LOGPS = np.array([[-9.0, -11.0], [-30.0, -22.5], [-4.0, -4.0], [-0.5, -60.0], [-70.0, -2.0]])
REFERENCE = np.array([[-10.0, -10.5], [-28.0, -23.0], [-4.0, -4.0], [-0.75, -50.0], [-69.0, -3.0]])
LENGTHS = np.array([[6, 7], [12, 9], [3, 3], [4, 20], [30, 2]])
B, E, G = 0.3, 0.1, 0.7


def sigma(x):
    return 1 / (1 + np.exp(-x))


def log_odds(p):
    return np.log(p / (1 - p))


R_W, R_L = (LOGPS - REFERENCE).T
D = R_W - R_L
N_W, N_L = LENGTHS.T
L_W, L_L = LOGPS.T
NLL = -L_W / N_W
FORMULAS = {
    "sigmoid": -(1 - E) * np.log(sigma(B * D)) - E * np.log(sigma(-B * D)),
    "robust": (-(1 - E) * np.log(sigma(B * D)) + E * np.log(sigma(-B * D))) / (1 - 2 * E),
    "hinge": np.maximum(0, 1 - B * D),
    "ipo": (R_W / N_W - R_L / N_L - 1 / (2 * B)) ** 2,
    "sigmoid_norm": -(1 - E) * np.log(sigma(B * (R_W / N_W - R_L / N_L)))
                    - E * np.log(sigma(-B * (R_W / N_W - R_L / N_L))),
    "nca_pair": -np.log(sigma(B * R_W)) - 0.5 * np.log(sigma(-B * R_W)) - 0.5 * np.log(sigma(-B * R_L)),
    "bco_pair": -np.log(sigma(B * R_W)) - np.log(sigma(-B * R_L)),
    "sppo_hard": (R_W - 0.5 / B) ** 2 + (R_L + 0.5 / B) ** 2,
    "apo_zero": 1 - sigma(B * R_W) + sigma(B * R_L),
    "apo_down": sigma(B * R_W) + 1 - sigma(B * D),
    "exo_pair": sigma(B * D) * np.log(sigma(B * D) / (1 - E)) + sigma(-B * D) * np.log(sigma(-B * D) / E),
    "simpo": -(1 - E) * np.log(sigma(B * (L_W / N_W - L_L / N_L) - G))
             - E * np.log(sigma(-B * (L_W / N_W - L_L / N_L) + G)),
    "orpo": NLL - B * np.log(sigma(log_odds(np.exp(L_W / N_W)) - log_odds(np.exp(L_L / N_L)))),
    "cpo": NLL - (1 - E) * np.log(sigma(B * (L_W - L_L))) - E * np.log(sigma(-B * (L_W - L_L))),
}
PAIRED = [name for name, method in METHODS.items() if method.is_paired]


def make_loss(name: str, **settings) -> PreferenceLoss:
    smoothing = {"label_smoothing": E} if METHODS[name].smooths else {}
    return PreferenceLoss(loss=name, beta=B, **smoothing, **({"gamma": G} if name == "simpo" else {}), **settings)


def compute_pairs(loss: PreferenceLoss, logps: torch.Tensor, reference=REFERENCE):
    reference_logps = torch.tensor(reference) if loss.method.has_reference else None
    return loss.of_pairs(TORCH, logps, torch.tensor(LENGTHS), reference_logps)


def test_every_method_has_its_formula():
    assert list(FORMULAS) == PAIRED


@pytest.mark.parametrize("name", PAIRED)
def test_a_preference_loss_equals_its_formula(name):
    losses, _ = compute_pairs(make_loss(name), torch.tensor(LOGPS))
    np.testing.assert_allclose(losses, FORMULAS[name], rtol=1e-12)


@pytest.mark.parametrize("name", PAIRED)
def test_sft_weight_adds_the_likelihood_of_each_chosen_answer(name):
    plain, added = (compute_pairs(make_loss(name, sft_weight=weight), torch.tensor(LOGPS))[0] for weight in (0.0, 0.25))
    np.testing.assert_allclose(added - plain, 0.25 * NLL, atol=1e-9)


@pytest.mark.parametrize("name", PAIRED)
def test_preference_gradients_equal_finite_differences(name):
    logps = torch.tensor(LOGPS, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: compute_pairs(make_loss(name), x)[0], (logps,))


@pytest.mark.parametrize("name", PAIRED)
def test_a_padding_pair_has_finite_gradients(name):
    logps = torch.zeros(1, 2, requires_grad=True)
    reference = torch.zeros(1, 2) if METHODS[name].has_reference else None
    losses, _ = make_loss(name).of_pairs(TORCH, logps, torch.zeros(1, 2, dtype=torch.int64), reference)
    losses.sum().backward()
    assert torch.isfinite(losses).all() and torch.isfinite(logps.grad).all()


def test_nan_log_probabilities_give_a_nan_preference_loss():
    """A run stops on a NaN loss, so no clamp may hide it."""
    losses, _ = compute_pairs(make_loss("orpo", sft_weight=0.0), torch.full(LENGTHS.shape, torch.nan))
    assert torch.isnan(losses).all()


@pytest.mark.parametrize(("name", "start"), [
    ("sigmoid", np.log(2)), ("robust", np.log(2)), ("sigmoid_norm", np.log(2)), ("hinge", 1), ("ipo", 25),
    ("nca_pair", 2 * np.log(2)), ("bco_pair", 2 * np.log(2)), ("sppo_hard", 50), ("apo_zero", 1), ("apo_down", 1),
    ("cpo", np.log(2)), ("simpo", np.log(1 + np.exp(0.5))), ("orpo", 0.1 * np.log(2))])
def test_the_loss_is_known_if_the_policy_is_the_reference(name, start):
    logps = torch.full((1, 2), -3.0)
    loss = PreferenceLoss(loss=name, sft_weight=0.0)
    losses, metrics = loss.of_pairs(TORCH, logps, torch.full((1, 2), 5), logps if loss.method.has_reference else None)
    assert losses.item() == pytest.approx(start, rel=1e-6)
    assert metrics["rewards/margin"][0].item() == 0 and metrics["rewards/accuracy"][0].item() == 0.5


def test_metrics_of_pairs_equal_their_formulas():
    _, metrics = compute_pairs(make_loss("sigmoid"), torch.tensor(LOGPS))
    assert tuple(metrics) == make_loss("sigmoid").metric_names
    for name, expected in {"rewards/chosen": B * R_W, "rewards/rejected": B * R_L, "rewards/margin": B * D,
                           "rewards/accuracy": [1, 0, 0.5, 1, 0], "logps/chosen": L_W, "logps/rejected": L_L}.items():
        value, count = metrics[name]
        np.testing.assert_allclose(value, expected, atol=1e-12)
        assert (count == 1).all()


@pytest.mark.parametrize("name", PAIRED)
def test_a_margin_within_rounding_is_a_tie_and_counts_one_half(name):
    """float32 log-probabilities are exact to about 1e-5; a margin ten times as large is not a tie."""
    loss, lengths = make_loss(name), torch.tensor([[5, 5]])
    for size in (1.0, 100.0, 3000.0):
        equal_logps = torch.full((1, 2), -size)
        reference = equal_logps if loss.method.has_reference else None
        for relative, expected in ((0, 0.5), (4e-6, 0.5), (-4e-6, 0.5), (4e-5, 1), (-4e-5, 0)):
            logps = equal_logps + torch.tensor([[relative * size, 0]])
            _, metrics = loss.of_pairs(TORCH, logps, lengths, reference)
            assert metrics["rewards/accuracy"][0].item() == expected, (size, relative)


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_losses_and_metrics_of_single_answers_equal_their_formulas(name):
    kl = 0.4 if name == "kto" else 0.0
    desirable = np.array([True, False, True, True, False])
    loss = PreferenceLoss(loss=name, beta=B, desirable_weight=1.5, undesirable_weight=0.5)
    losses, metrics = loss.of_answers(TORCH, torch.tensor(L_W), torch.tensor(desirable), torch.tensor(REFERENCE[:, 0]),
                                      kl)
    expected = np.where(desirable, 1.5 * (1 - sigma(B * (R_W - kl))), 0.5 * (1 - sigma(B * (kl - R_W))))
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    assert tuple(metrics) == loss.metric_names
    means = {name: ((value * count).sum() / count.sum()).item() for name, (value, count) in metrics.items()}
    assert means["rewards/chosen"] == pytest.approx(B * R_W[desirable].mean())
    assert means["logps/rejected"] == pytest.approx(L_W[~desirable].mean())
    assert means.get("kl", 0.0) == pytest.approx(kl)


@pytest.mark.parametrize(("settings", "message"), [
    ({"loss": "aot"}, "sorts the scores of a micro-batch"), ({"loss": "dpo"}, "its name here is sigmoid"),
    ({"loss": "ppo"}, "must be one of sigmoid, robust"), ({"beta": 0.0}, "model.beta is 0.0, but must be more than 0"),
    ({"loss": "ipo", "label_smoothing": 0.1}, "0 with the loss ipo"),
    ({"loss": "robust", "label_smoothing": 0.5}, "below 0.5"), ({"loss": "exo_pair"}, "more than 0"),
    ({"gamma": 1.0}, "unless the loss is simpo"), ({"sft_weight": -1.0}, "0 or more"),
    ({"loss": "kto", "sft_weight": 1.0}, "not pairs"), ({"desirable_weight": 2.0}, "whose rows are pairs"),
    ({"loss": "kto", "undesirable_weight": -1.0}, "0 or more")])
def test_invalid_preference_settings_are_rejected(settings, message):
    with pytest.raises(UserError, match=message):
        PreferenceLoss(**settings)


def test_no_loss_is_both_supported_and_rejected():
    assert not set(UNSUPPORTED) & set(METHODS)
