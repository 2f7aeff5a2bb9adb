"""A reward that takes no time, as TRL calls its functions; ours calls them alike."""


def vowels(completions: list[str], **_: object) -> list[float]:
    """The share of vowels in each answer, which is hardly ever the same in two of them."""
    return [sum(map(text.count, "aeiou")) / max(len(text), 1) for text in completions]
