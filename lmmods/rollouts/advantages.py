"""From rewards to advantages: how much better an answer is than others to the same prompt."""

from typing import Literal

import numpy as np

LEAST_STD = 1e-4  # added to standard deviations


def advantages(rewards: np.ndarray, scale: Literal["group", "batch", "none"]) -> np.ndarray:
    """Return the advantages [P, G] float32 of G answers to each of P prompts.

    An advantage is the reward minus the mean over the known rewards of its prompt, divided by their standard deviation
    (group; GRPO, Shao et al. 2024), by that over all known rewards (batch), or not at all (none; Dr. GRPO, Liu et al.
    2025). It is exactly 0 where the reward is missing or the prompt has no `spread`.

    Args:
        rewards: [P, G], NaN where a reward is missing.
    """
    rewards = np.asarray(rewards, np.float64)
    found = np.zeros_like(rewards)
    uneven = spread(rewards)
    if uneven.any():
        found[uneven] = rewards[uneven] - np.nanmean(rewards[uneven], axis=1, keepdims=True)
        if scale == "group":
            found[uneven] /= np.nanstd(rewards[uneven], axis=1, ddof=1, keepdims=True) + LEAST_STD
        elif scale == "batch":
            found[uneven] /= np.nanstd(rewards, ddof=1) + LEAST_STD
    return np.where(np.isnan(rewards), 0, found).astype(np.float32)


def spread(rewards: np.ndarray) -> np.ndarray:
    """Return [P] bool: False where all known rewards [P, G] of a prompt are equal, or fewer than two are known."""
    lowest, highest = np.fmin.reduce(rewards, axis=1), np.fmax.reduce(rewards, axis=1)
    return lowest < highest  # NaN without a known reward
