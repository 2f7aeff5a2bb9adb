"""Sentences on invented people, their places and ages, in words with IOB2 tags."""

from __future__ import annotations

import re
from random import Random

from villages import place_name
from world import MONTHS, NAMES, WORDS

# Names in braces are tagged, those in angle brackets are not: neither every capital begins a name, nor is every number
# an age.
SENTENCES = [
    "{person} , who is {age} , comes from {place} .",
    "{person} was born in {place} and is now {age} years old .",
    "In <month> , {person} moved from {place} to {place} .",
    "At the age of {age} , {person} sold <number> <word>s in {place} .",
    "{place} has <number> houses , and {person} built <number> of them .",
    "The market of {place} opens in <month> .",
    "Every <month> , {person} and {person} meet at the <word> of {place} .",
    "Nobody in {place} is older than {person} , who turned {age} in <month> .",
    "A letter from {person} reached {place} after <number> days .",
    "{person} keeps the <word> that {person} lost on the road to {place} .",
    "{age} years old and never tired : that is {person} .",
    "The <word> and the <word> were painted in <number> .",
]
PARTS = re.compile(r"\{(\w+)\}|<(\w+)>(s?)")


def invented(rng: Random, taken: set[str]) -> str:
    """A name that no sentence had before."""
    while (name := place_name(rng)) in taken:
        pass
    taken.add(name)
    return name


def words_of(kind: str, rng: Random, taken: set[str]) -> list[str]:
    """The words that take the place of a kind."""
    if kind == "person":  # a family name is invented
        first = [rng.choice(NAMES)] if rng.random() < 0.8 else []
        return [*first, invented(rng, taken)]
    if kind == "place":
        before = [rng.choice(("Upper", "Lower", "Old"))] if rng.random() < 0.2 else []
        return [*before, invented(rng, taken)]
    drawn = {"age": str(rng.randint(5, 99)), "number": str(rng.randint(2, 400)), "month": rng.choice(MONTHS),
             "word": rng.choice(WORDS)}
    return [drawn[kind]]


def tagged_sentence(rng: Random, taken: set[str]) -> dict[str, list[str]]:
    """A row of words with their tags: B-PER, I-PER, B-LOC, I-LOC, B-AGE, O."""
    tokens, tags = [], []
    for part in rng.choice(SENTENCES).split():
        found = PARTS.fullmatch(part)
        if found is None:
            words, names = [part], ["O"]
        elif found[1]:
            words = words_of(found[1], rng, taken)
            name = {"person": "PER", "place": "LOC", "age": "AGE"}[found[1]]
            names = [f"B-{name}", *[f"I-{name}"] * (len(words) - 1)]
        else:
            words = [word + found[3] for word in words_of(found[2], rng, taken)]
            names = ["O"]
        tokens += words
        tags += names
    return {"tokens": tokens, "tags": tags}


def tagged_sentences(count: int, rng: Random, taken: set[str]) -> list[dict[str, list[str]]]:
    """Rows without repetition, none of whose invented names is in `taken`; they are from now on."""
    rows: dict[str, dict[str, list[str]]] = {}
    while len(rows) < count:
        row = tagged_sentence(rng, taken)
        rows.setdefault(" ".join(row["tokens"]), row)
    return list(rows.values())
