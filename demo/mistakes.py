"""Plausible wrong answers for preference pairs: typical mistakes in each skill."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from world import FactTable

Mistake = Callable[[Random, dict], object]  # from a skill's operands, including "answer"


def miscount(rng: Random, values: dict) -> int:
    return values["answer"] + rng.choice((-1, 1))


def make_miscalculation(other_way: Callable[[dict], int]) -> Mistake:
    """Return a mistake: another rule of arithmetic, or a slip of the pen."""
    def make_mistake(rng: Random, values: dict) -> int:
        return other_way(values) if rng.random() < 0.5 else values["answer"] + rng.choice((-10, -2, -1, 1, 2, 10))

    return make_mistake


def misplace_zero(rng: Random, values: dict) -> int:
    """Add a zero, or remove one if there is one."""
    answer = values["answer"]
    return answer // 10 if answer % 10 == 0 and rng.random() < 0.5 else answer * 10


def make_other_operand(*names: str) -> Mistake:
    """Return a mistake that answers with one of these operands."""
    return lambda rng, values: values[rng.choice(names)]


def make_other_item(part: str, separator: str = "") -> Mistake:
    """Return a mistake that answers with any item of a list, or letter of a word."""
    return lambda rng, values: rng.choice(values[part].split(separator) if separator else values[part])


def make_disorder(separator: str) -> Mistake:
    """Return a mistake that swaps two neighbours or drops an item."""
    def make_mistake(rng: Random, values: dict) -> str:
        items = values["answer"].split(separator)
        index = rng.randrange(len(items) - 1)
        if rng.random() < 0.5:
            items[index : index + 2] = items[index + 1], items[index]
        else:
            del items[index]
        return separator.join(items)

    return make_mistake


def repeat_wrongly(rng: Random, values: dict) -> str:
    return " ".join([values["word"]] * (values["count"] + rng.choice((-1, 1))))


def make_replacement(*pairs: tuple[str, str]) -> Mistake:
    """Return a mistake that replaces one of these signs by another."""
    return lambda rng, values: values["answer"].replace(*rng.choice(pairs))


def mix_date(rng: Random, values: dict) -> str:
    """Swap day and month, or write the year last."""
    year, month, day = values["answer"].split("-")
    return rng.choice((f"{year}-{day}-{month}", f"{day}-{month}-{year}"))


MISTAKES: dict[str, Mistake] = {
    "add": make_miscalculation(lambda values: abs(values["a"] - values["b"])),
    "subtract": make_miscalculation(lambda values: values["a"] + values["b"]),
    "double": make_miscalculation(lambda values: values["a"] + 2), "times_ten": misplace_zero,
    "larger": make_other_operand("a", "b"), "smaller": make_other_operand("a", "b"),
    "parity": lambda rng, values: {"odd": "even", "even": "odd"}[values["answer"]],
    "spell": make_disorder("-"), "spell_upper": make_disorder("-"), "reverse": make_disorder("-"),
    "upper": make_disorder("-"), "first_letter": make_other_item("word"), "last_letter": make_other_item("word"),
    "letter_count": miscount, "repeat": repeat_wrongly,
    "sort": make_disorder(", "), "largest": make_other_item("items", ", "), "smallest": make_other_item("items", ", "),
    "first_item": make_other_item("items", ", "), "last_item": make_other_item("items", ", "), "item_count": miscount,
    "reverse_list": make_disorder(", "), "join": make_disorder(", "),
    "to_small_unit": misplace_zero, "to_large_unit": misplace_zero,
    "json": make_replacement(('"', "'"), ("}", ""), ("age", "years"), (": ", "=")),
    "csv": make_replacement((",", " "), (",", ";"), (",", "\n")), "iso_date": mix_date,
    "bullets": make_replacement(("- ", ""), ("- ", "* "), ("\n- ", ", ")),
    "key_value": make_replacement((": ", "="), ("\n", " "), ("name: ", "")),
}


def make_wrong_answer(rng: Random, skill: str, values: dict) -> str:
    """Return a wrong answer that is not empty, zero or negative."""
    while True:
        answer = str(MISTAKES[skill](rng, values))
        if answer and answer != str(values["answer"]) and not answer.startswith("-") and answer != "0":
            return answer


def choose_wrong_fact(rng: Random, table: FactTable, answer: str) -> str:
    """Choose the value of another key."""
    return rng.choice(sorted({value for _, value in table.rows} - {answer}))
