"""Compare advantages with numbers computed by hand, and with TRL's rule."""

import numpy as np
import pytest
import torch

from lmmods.rollouts.advantages import compute_advantages, has_spread

NAN = np.nan


@pytest.mark.parametrize(("scale", "variances"), [("group", [1 / 3, 20 / 3]), ("batch", [61.5 / 7] * 2),
                                                  ("none", None)])
def test_advantages_equal_values_computed_by_hand(scale, variances):
    """The means are 0.5 and 5, the sums of squares 1 and 20; over both prompts, mean 2.75 and sum of squares 61.5."""
    rewards = np.array([[0, 1, 1, 0], [2, 4, 6, 8]], float)
    expected = np.array([[-0.5, 0.5, 0.5, -0.5], [-3, -1, 1, 3]])
    if variances:
        expected /= np.sqrt(variances)[:, None] + 1e-4
    advantages = compute_advantages(rewards, scale)
    assert advantages.dtype == np.float32
    np.testing.assert_array_equal(advantages, np.float32(expected))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_missing_reward_is_ignored_and_has_no_advantage(scale):
    rewards = np.array([[1, NAN, 3, NAN], [0, 2, NAN, 4], [NAN, NAN, NAN, NAN], [7, NAN, NAN, NAN]])
    std = {"group": [2**0.5 + 1e-4, 2 + 1e-4], "none": [1, 1],
           "batch": [np.std([1, 3, 0, 2, 4, 7], ddof=1) + 1e-4] * 2}[scale]
    expected = np.zeros((4, 4))
    expected[0, [0, 2]] = np.array([-1, 1]) / std[0]
    expected[1, [0, 1, 3]] = np.array([-2, 0, 2]) / std[1]
    np.testing.assert_array_equal(compute_advantages(rewards, scale), np.float32(expected))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_have_an_advantage_of_exactly_zero(scale):
    """Not even from rounding: the mean of three times 0.1 is not 0.1."""
    assert np.mean([0.1] * 3) != 0.1
    rewards = np.array([[0.1, 0.1, 0.1, NAN], [0, 1, 2, 3]])
    assert (compute_advantages(rewards, scale)[0] == 0).all() and (compute_advantages(rewards, scale)[1] != 0).all()
    np.testing.assert_array_equal(compute_advantages(rewards[:1], scale), np.zeros((1, 4)))


@pytest.mark.filterwarnings("error")
def test_missing_rewards_raise_no_warning():
    for scale in ("group", "batch", "none"):
        for rewards in (np.full((2, 3), NAN), np.zeros((0, 3))):
            np.testing.assert_array_equal(compute_advantages(rewards, scale), np.zeros_like(rewards))


def test_prompts_with_different_rewards_have_spread():
    rewards = np.array([[1, 1, 1], [1, 1, 2], [NAN, 1, 1], [NAN, 1, 2], [NAN, NAN, 2], [NAN] * 3, [-1, 0, 1]])
    np.testing.assert_array_equal(has_spread(rewards), [False, True, False, True, False, False, True])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_trl(scale):
    """Compare in float64, with some rewards missing."""
    trl = pytest.importorskip("trl.trainer.utils", reason="an extra of developers (dev)")
    rng = np.random.default_rng(1)
    rewards = rng.normal(0, 2, (40, 6))
    rewards[rng.random((40, 6)) < 0.3] = NAN
    rewards[:2] = NAN
    rewards[1, 4] = 2.0
    tensor = torch.tensor(rewards)
    std = trl.nanstd(tensor) if scale == "batch" else trl.nanstd(tensor, dim=1, keepdim=True)
    centred = tensor - tensor.nanmean(dim=1, keepdim=True)
    expected = (centred if scale == "none" else centred / (std + 1e-4)).nan_to_num(nan=0.0)
    np.testing.assert_allclose(compute_advantages(rewards, scale), expected, rtol=1e-6, atol=1e-12)
