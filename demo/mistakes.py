"""Plausible wrong answers, for pairs of a right answer and a wrong one: of each skill the slips that people make."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from world import FactTable

Mistake = Callable[[Random, dict], object]  # of a skill's operands, among them "answer"


def miscounted(rng: Random, values: dict) -> int:
    return values["answer"] + rng.choice((-1, 1))


def miscalculated(other_way: Callable[[dict], int]) -> Mistake:
    """Another rule of arithmetic, or a slip of the pen."""
    def mistake(rng: Random, values: dict) -> int:
        return other_way(values) if rng.random() < 0.5 else values["answer"] + rng.choice((-10, -2, -1, 1, 2, 10))

    return mistake


def misplaced_nought(rng: Random, values: dict) -> int:
    """One too many; too few where there is one to leave out."""
    answer = values["answer"]
    return answer // 10 if answer % 10 == 0 and rng.random() < 0.5 else answer * 10


def other(*names: str) -> Mistake:
    """Another of the operands."""
    return lambda rng, values: values[rng.choice(names)]


def another_of(part: str, separator: str = "") -> Mistake:
    """Another item of a list, or letter of a word."""
    return lambda rng, values: rng.choice(values[part].split(separator) if separator else values[part])


def disordered(separator: str) -> Mistake:
    """Two neighbours in each other's place, or one item left out."""
    def mistake(rng: Random, values: dict) -> str:
        items = values["answer"].split(separator)
        place = rng.randrange(len(items) - 1)
        if rng.random() < 0.5:
            items[place : place + 2] = items[place + 1], items[place]
        else:
            del items[place]
        return separator.join(items)

    return mistake


def repeated(rng: Random, values: dict) -> str:
    return " ".join([values["word"]] * (values["count"] + rng.choice((-1, 1))))


def replaced(*pairs: tuple[str, str]) -> Mistake:
    """Another sign in the place of the right one."""
    return lambda rng, values: values["answer"].replace(*rng.choice(pairs))


def mixed_date(rng: Random, values: dict) -> str:
    """Day and month in each other's place, or the year at the end."""
    year, month, day = values["answer"].split("-")
    return rng.choice((f"{year}-{day}-{month}", f"{day}-{month}-{year}"))


MISTAKES: dict[str, Mistake] = {
    "add": miscalculated(lambda values: abs(values["a"] - values["b"])),
    "subtract": miscalculated(lambda values: values["a"] + values["b"]),
    "double": miscalculated(lambda values: values["a"] + 2), "times_ten": misplaced_nought,
    "larger": other("a", "b"), "smaller": other("a", "b"),
    "parity": lambda rng, values: {"odd": "even", "even": "odd"}[values["answer"]],
    "spell": disordered("-"), "spell_upper": disordered("-"), "reverse": disordered("-"),
    "upper": disordered("-"), "first_letter": another_of("word"), "last_letter": another_of("word"),
    "letter_count": miscounted, "repeat": repeated,
    "sort": disordered(", "), "largest": another_of("items", ", "), "smallest": another_of("items", ", "),
    "first_item": another_of("items", ", "), "last_item": another_of("items", ", "), "item_count": miscounted,
    "reverse_list": disordered(", "), "join": disordered(", "),
    "to_small_unit": misplaced_nought, "to_large_unit": misplaced_nought,
    "json": replaced(('"', "'"), ("}", ""), ("age", "years"), (": ", "=")),
    "csv": replaced((",", " "), (",", ";"), (",", "\n")), "iso_date": mixed_date,
    "bullets": replaced(("- ", ""), ("- ", "* "), ("\n- ", ", ")),
    "key_value": replaced((": ", "="), ("\n", " "), ("name: ", "")),
}


def wrong_answer(rng: Random, skill: str, values: dict) -> str:
    """A wrong answer that is neither empty nor below zero."""
    while True:
        answer = str(MISTAKES[skill](rng, values))
        if answer and answer != str(values["answer"]) and not answer.startswith("-") and answer != "0":
            return answer


def wrong_fact(rng: Random, table: FactTable, answer: str) -> str:
    """What is true of another key."""
    return rng.choice(sorted({value for _, value in table.rows} - {answer}))
