"""Rewards that a recipe may name, and their options."""

from typing import Any


def read_rewards(rewards: list[dict[str, Any]]) -> list[Any]:
    """Return the settings of the rewards. Raises UserError for one that does not exist, or has other options."""
    return rewards
