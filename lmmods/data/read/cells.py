"""Checks of the values of a row against the types that a layout expects."""

import json
import math
from typing import Any

from lmmods.data.read.conversation import RowProblem

Values = dict[str, Any]
DEEPEST = 100  # nesting of lists and objects; deeper values are not data, and Python's recursion ends at some hundreds


def as_text(value: Any, name: str) -> str:
    """Return the text of a cell; numbers are converted. Raises RowProblem for null, nested values, NaN and infinity."""
    if isinstance(value, str):
        return value
    if value is None:
        raise RowProblem(f"{name} is null")
    if isinstance(value, float) and not math.isfinite(value):
        raise RowProblem(f"{name} is {value} (NaN or too large a number), not text")
    if isinstance(value, bool | int | float):
        return str(value)
    raise RowProblem(f"{name} is a {type(value).__name__}, not text")


def check_unicode(value: Any) -> None:
    """Raise RowProblem for text without a UTF-8 form, at any depth, and for nested values unknown to JSON."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RowProblem("text with a lone surrogate (half of a character)") from error
    elif isinstance(value, dict | list):
        # The items of a list, or the keys of an object.
        for key in value:
            check_unicode(key)
        for item in value.values() if isinstance(value, dict) else ():
            check_unicode(item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise RowProblem("a nested number that is NaN or too large")
    elif value is not None and not isinstance(value, bool | int | float):
        raise RowProblem(f"a nested value of type {type(value).__name__}, which JSON does not have")


def parse(text: str, name: str) -> Any:
    """Parse a cell of JSON text: lists and objects in files whose cells are all text. Raises RowProblem."""
    try:
        # NaN and Infinity are Python's extension of JSON.
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RowProblem(f"{name} is text, but not JSON") from error
    if is_deeper_than(value, DEEPEST):
        raise RowProblem(f"{name} has lists and objects nested more than {DEEPEST} deep")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def is_deeper_than(value: Any, depth: int) -> bool:
    """Return True if lists and objects are nested more than `depth` deep."""
    # Level by level: recursion could exceed Python's limit, which is what this guards against.
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth + 1):
        level = [
            item
            for node in level
            for item in (node.values() if isinstance(node, dict) else node)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def is_longer_than(value: Any, characters: int) -> bool:
    """True if the strings in a value, at any depth, have more characters in total; each element counts as one, too."""
    # Stops as soon as the limit is exceeded, so that huge values cost no more than the limit.
    waiting = [value]
    while waiting and characters >= 0:
        item = waiting.pop()
        characters -= len(item) if isinstance(item, str | bytes) else 1
        if isinstance(item, dict | list):
            waiting += [*item, *item.values()] if isinstance(item, dict) else item
    return characters < 0


def without_fillers(row: Values) -> Values:
    """Remove the nulls that Arrow adds to nested objects: one for each key that only other rows have.

    Otherwise the arguments of a call would name the parameters of all tools in the table. Columns are kept, null or
    not.
    """
    return {column: _without_nulls(value) if isinstance(value, dict | list) else value for column, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def is_blank(value: Any) -> bool:
    """Return True if a cell is empty: null, "", [] or {}."""
    return value is None or (isinstance(value, str | list | dict) and not value)
