"""Reward function that takes no time, in TRL's and our common format."""

from typing import Any


def vowels(completions: list[Any], **_: object) -> list[float]:
    """Return the fraction of vowels in each answer, a string or messages; few answers share a value."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [sum(map(text.count, "aeiou")) / max(len(text), 1) for text in texts]
