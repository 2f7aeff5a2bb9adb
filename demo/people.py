"""Sentences about invented people, places and ages, as words with IOB2 tags."""

from __future__ import annotations

import re
from random import Random

from villages import invent_place_name
from world import MONTHS, NAMES, WORDS

# Names in braces are tagged, names in angle brackets are not, so that not every capital starts a name and not every
# number is an age.
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


def invent_name(rng: Random, used_names: set[str]) -> str:
    """Return a new name, and add it to `used_names`."""
    while (name := invent_place_name(rng)) in used_names:
        pass
    used_names.add(name)
    return name


def make_words(entity: str, rng: Random, used_names: set[str]) -> list[str]:
    """Return the words that replace a placeholder."""
    if entity == "person":  # a family name is invented
        first = [rng.choice(NAMES)] if rng.random() < 0.8 else []
        return [*first, invent_name(rng, used_names)]
    if entity == "place":
        prefix = [rng.choice(("Upper", "Lower", "Old"))] if rng.random() < 0.2 else []
        return [*prefix, invent_name(rng, used_names)]
    values = {"age": str(rng.randint(5, 99)), "number": str(rng.randint(2, 400)), "month": rng.choice(MONTHS),
              "word": rng.choice(WORDS)}
    return [values[entity]]


def make_sentence(rng: Random, used_names: set[str]) -> dict[str, list[str]]:
    """Return a row of words with their tags: B-PER, I-PER, B-LOC, I-LOC, B-AGE, O."""
    tokens, tags = [], []
    for part in rng.choice(SENTENCES).split():
        match = PARTS.fullmatch(part)
        if match is None:
            words, names = [part], ["O"]
        elif match[1]:
            words = make_words(match[1], rng, used_names)
            name = {"person": "PER", "place": "LOC", "age": "AGE"}[match[1]]
            names = [f"B-{name}", *[f"I-{name}"] * (len(words) - 1)]
        else:
            words = [word + match[3] for word in make_words(match[2], rng, used_names)]
            names = ["O"]
        tokens += words
        tags += names
    return {"tokens": tokens, "tags": tags}


def make_sentences(count: int, rng: Random, used_names: set[str]) -> list[dict[str, list[str]]]:
    """Return distinct rows with new invented names, which are added to `used_names`."""
    rows: dict[str, dict[str, list[str]]] = {}
    while len(rows) < count:
        row = make_sentence(rng, used_names)
        rows.setdefault(" ".join(row["tokens"]), row)
    return list(rows.values())
