"""Advantages: how much better an answer is than the others to its prompt."""

from typing import Literal

import numpy as np

EPSILON = 1e-4  # added to standard deviations, so that none is 0


def compute_advantages(rewards: np.ndarray, scale: Literal["group", "batch", "none"]) -> np.ndarray:
    """Return the advantages [P, G] float32 of G answers to each of P prompts.

    An advantage is the reward minus the mean of the prompt's known rewards. `scale` divides it by the standard
    deviation of the prompt's rewards (group; GRPO, Shao et al. 2024) or of all rewards (batch), or not at all (none;
    Dr. GRPO, Liu et al. 2025). It is exactly 0 if the reward is missing or the prompt's rewards are all equal.

    Args:
        rewards: [P, G], NaN where a reward is missing.
    """
    rewards = np.asarray(rewards, np.float64)
    centred = np.zeros_like(rewards)
    is_uneven = has_spread(rewards)
    if is_uneven.any():
        centred[is_uneven] = rewards[is_uneven] - np.nanmean(rewards[is_uneven], axis=1, keepdims=True)
        if scale == "group":
            centred[is_uneven] /= np.nanstd(rewards[is_uneven], axis=1, ddof=1, keepdims=True) + EPSILON
        elif scale == "batch":
            centred[is_uneven] /= np.nanstd(rewards, ddof=1) + EPSILON
    return np.where(np.isnan(rewards), 0, centred).astype(np.float32)


def has_spread(rewards: np.ndarray) -> np.ndarray:
    """Return [P] bool: whether two known rewards [P, G] of a prompt differ."""
    lowest, highest = np.fmin.reduce(rewards, axis=1), np.fmax.reduce(rewards, axis=1)
    return lowest < highest  # False for NaN, which is a prompt without a known reward
