"""Write demo/mmlu.jsonl: multiple-choice questions about facts of the demo corpus, in MMLU's layout."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from world import FACTS

# Subject -> fact tables and their number of questions.
SUBJECTS = {
    "geography": {"capital": 14},
    "animals": {"sound": 6, "young": 7},
    "calendar": {"next_day": 7, "next_month": 6},
}
LETTERS = "ABCD"


def make_question(subject: str, ask: str, answer: str, others: list[str], letter: str) -> dict[str, str]:
    """Return a row with the right answer at `letter`, among three of the `others`."""
    index = LETTERS.index(letter)
    choices = others[:index] + [answer] + others[index : len(LETTERS) - 1]
    options = "\n".join(f"{name}. {choice}" for name, choice in zip(LETTERS, choices))
    head = f"The following are multiple choice questions (with answers) about {subject}."
    return {"subject": subject, "input": f"{head}\n\n{ask}\n{options}\nAnswer:", "output": letter}


def make_questions() -> list[dict[str, str]]:
    """Return all rows; each letter is right equally often."""
    rng, tables, rows = Random(7), {table.name: table for table in FACTS}, []
    for subject, counts in SUBJECTS.items():
        for name, count in counts.items():
            table = tables[name]
            values = sorted({value for _, value in table.rows})
            for key, value in rng.sample(table.rows, count):
                others = rng.sample([other for other in values if other not in (key, value)], len(LETTERS) - 1)
                rows.append(make_question(subject, table.asks[0].format(key=key), value, others,
                                          LETTERS[len(rows) % len(LETTERS)]))
    return rows


if __name__ == "__main__":
    text = "".join(json.dumps(row) + "\n" for row in make_questions())
    (Path(__file__).parent / "mmlu.jsonl").write_text(text, encoding="utf-8")
