"""A reward that takes no time, as TRL calls its functions; ours calls them alike."""

from typing import Any


def vowels(completions: list[Any], **_: object) -> list[float]:
    """The share of vowels in each answer, a text or a message; hardly any two answers have the same."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [sum(map(text.count, "aeiou")) / max(len(text), 1) for text in texts]
