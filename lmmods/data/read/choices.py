"""Rows of multiple choice: SWAG, HellaSwag, RACE, ARC, CommonsenseQA, MMLU and their like."""

import math
import re
from typing import Any, NamedTuple

from lmmods.data.read.cells import Values, as_text, check_unicode, is_blank, parse
from lmmods.data.read.conversation import RowProblem

# Names of each part, the first that a row has counts; data.columns gives these names to others.
CONTEXTS = ("context", "article", "passage", "paragraph", "story", "ctx", "premise", "sent1")
QUESTIONS = ("question", "question_stem", "query", "goal", "sentence", "prompt", "sent2")
CHOICES = ("choices", "endings", "options", "candidates")
NUMBERED = re.compile(r"(ending|choice|option|sol)_?(\d+)")  # one column for each choice
ANSWERS = ("label", "answer", "answerKey", "answer_key", "correct_answer")
MIN_CHOICES = 2  # choices of a question


class Question(NamedTuple):
    """A row as a model sees it: a pair of texts for each choice.

    Args:
        first: The text before the choices.
        seconds: Of each choice, the text that follows: the choice, after the question if `first` is a context.
        choices: The choices alone.
        answer: Number of the right choice; None if the row does not say it.
    """

    first: str
    seconds: list[str]
    choices: list[str]
    answer: int | None


def holds_choices(row: Values) -> bool:
    """Return True if a row has a text, and several choices in a list or in numbered columns."""
    name = next((name for name in CHOICES if name in row), None)
    has_choices = len(_list_numbered(row)) >= MIN_CHOICES if name is None else isinstance(row[name], list | dict | str)
    return has_choices and any(name in row for name in (*CONTEXTS, *QUESTIONS))


def read_question(row: Values, with_answer: bool = True) -> Question:
    """Read the parts of a row.

    Args:
        with_answer: Read which choice is right; else `answer` is None.

    With a context and a question, the question is put before each choice, as in the programs for SWAG and RACE, so that
    only the context can be truncated.

    Raises:
        RowProblem: The row has no text, fewer than two choices, or an answer that is none of them.
    """
    context, question = (_text_among(row, names) for names in (CONTEXTS, QUESTIONS))
    first = question if context is None else context
    if first is None:
        raise RowProblem("no text before the choices")
    choices, labels = _choices(row)
    for index, choice in enumerate(choices):
        if not choice.strip():
            raise RowProblem(f"choice {index} is empty")
    seconds = choices if context is None or question is None else [f"{question.rstrip()} {choice.lstrip()}"
                                                                   for choice in choices]
    name = next((name for name in ANSWERS if with_answer and not is_blank(row.get(name))), None)
    return Question(first, seconds, choices, None if name is None else _find_choice(row[name], name, choices, labels))


def _text_among(row: Values, names: tuple[str, ...]) -> str | None:
    """Return the first text under one of these names that is not empty. Raises RowProblem."""
    name = next((name for name in names if not is_blank(row.get(name))), None)
    if name is None:
        return None
    text = as_text(row[name], name)
    check_unicode(text)
    return text if text.strip() else None


def _list_numbered(row: Values) -> list[str]:
    """Return the names of the columns that contain a choice each, in the order of their numbers."""
    columns = [(int(match[2]), name) for name in row if (match := NUMBERED.fullmatch(name))]
    return [name for _, name in sorted(columns)]


def _choices(row: Values) -> tuple[list[str], list[str]]:
    """Return the choices, and the names by which an answer may call them, as A, B, C; [] if they have none.

    Raises:
        RowProblem: There are fewer than two.
    """
    name = next((name for name in CHOICES if not is_blank(row.get(name))), None)
    values: Any
    labels: list[Any] = []
    if name is None:
        columns = _list_numbered(row)
        values, name = [row[column] for column in columns], "choices"
        labels = [NUMBERED.fullmatch(column)[2] for column in columns]  # type: ignore[index]
    else:
        values = parse(row[name], name) if isinstance(row[name], str) else row[name]
        if isinstance(values, dict):  # ARC: {text: [...], label: [...]}
            values, labels = values.get("text"), values.get("label") or []
        elif isinstance(values, list) and values and all(isinstance(value, dict) for value in values):
            labels = [value.get("label") for value in values]
            values = [value.get("text") for value in values]
    if not isinstance(values, list) or not isinstance(labels, list) or len(labels) not in (0, len(values)):
        raise RowProblem(f"{name} is not a list of strings")
    if len(values) < MIN_CHOICES:
        raise RowProblem("fewer than two choices")
    choices = [as_text(value, name) for value in values]
    check_unicode(choices)
    return choices, [str(label).strip() for label in labels if label is not None]


def _find_choice(answer: Any, name: str, choices: list[str], labels: list[str]) -> int | None:
    """Return the index of the choice that an answer names; None for -1, with which test sets hide an answer.

    A number counts from 0. A string is a choice's name, its text, a letter, or a number, whichever fits first. In the
    column `label`, a number comes first, by convention.

    Raises:
        RowProblem: The answer names no choice, or has another type.
    """
    if isinstance(answer, bool) or not isinstance(answer, int | float | str):
        raise RowProblem(f"{name} is neither a number nor a string")
    text = answer.strip() if isinstance(answer, str) else ""
    number = int(answer) if not isinstance(answer, str) and math.isfinite(answer) and answer == int(answer) else None
    if re.fullmatch(r"-?\d{1,9}", text):
        number = int(text)
    if number == -1:
        return None
    index = None if number is None or not 0 <= number < len(choices) else number
    if index is None or isinstance(answer, str) and name != "label":
        by_text = [text.casefold() == choice.strip().casefold() for choice in choices]
        if text in labels:
            index = labels.index(text)
        elif text and sum(by_text) == 1:
            index = by_text.index(True)
        elif re.fullmatch(r"[A-Za-z]", text):
            index = ord(text.upper()) - ord("A")
    if index is None or index >= len(choices):
        raise RowProblem(f"{name} is not one of the choices")
    return index
