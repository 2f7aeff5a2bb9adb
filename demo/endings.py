"""Writes demo/endings.jsonl and demo/endings_heldout.jsonl: which of four endings fits the beginning of a sentence.

The sentences are those of the invented villages. The held-out ones are about villages found nowhere else, so that the
names in them help nobody.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from generate import json_lines, random_stream, write_text
from villages import DETAILS, Detail, draw_new_village

TRAIN_ROWS, HELD_OUT_ROWS, CHOICES = 2_000, 240, 4


def parted(detail: Detail, village: dict[str, str], rng: Random) -> tuple[str, str]:
    """A sentence about a village, parted where the value begins."""
    beginning, ending = rng.choice(detail.sentences).split("{value}")
    return beginning.format(**village).strip(), village[detail.name] + ending.format(**village)


def question(rng: Random, taken: set[str]) -> dict:
    """A row in the layout of HellaSwag; the wrong endings are those of other sentences about the same village."""
    village = draw_new_village(rng, taken)
    sentences = [parted(detail, village, rng) for detail in rng.sample(DETAILS, CHOICES)]
    label = rng.randrange(CHOICES)
    return {"ctx": sentences[label][0], "endings": [ending for _, ending in sentences], "label": label}


if __name__ == "__main__":
    taken: set[str] = set()
    for name, count in (("endings", TRAIN_ROWS), ("endings_heldout", HELD_OUT_ROWS)):
        rng = random_stream(name)
        rows = [question(rng, taken) for _ in range(count)]
        write_text(Path(__file__).parent / f"{name}.jsonl", json_lines(rows))
