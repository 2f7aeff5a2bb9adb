"""Write demo/endings.jsonl and demo/endings_heldout.jsonl: which of four endings fits the start of a sentence.

The sentences are about invented villages. The villages of held-out sentences occur nowhere else, so that their names do
not help.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from generate import make_random, to_json_lines, write_text
from villages import DETAILS, Detail, sample_new_village

TRAIN_ROWS, HELD_OUT_ROWS, CHOICES = 2_000, 240, 4


def split_sentence(detail: Detail, village: dict[str, str], rng: Random) -> tuple[str, str]:
    """Return a sentence about a village, split where the value starts."""
    start, ending = rng.choice(detail.sentences).split("{value}")
    return start.format(**village).strip(), village[detail.name] + ending.format(**village)


def make_question(rng: Random, used_names: set[str]) -> dict:
    """Return a row in HellaSwag's layout; the wrong endings are from other sentences about the same village."""
    village = sample_new_village(rng, used_names)
    sentences = [split_sentence(detail, village, rng) for detail in rng.sample(DETAILS, CHOICES)]
    label = rng.randrange(CHOICES)
    return {"ctx": sentences[label][0], "endings": [ending for _, ending in sentences], "label": label}


if __name__ == "__main__":
    used_names: set[str] = set()
    for name, count in (("endings", TRAIN_ROWS), ("endings_heldout", HELD_OUT_ROWS)):
        rng = make_random(name)
        rows = [make_question(rng, used_names) for _ in range(count)]
        write_text(Path(__file__).parent / f"{name}.jsonl", to_json_lines(rows))
