"""Tools as chat templates read them: their specifications, and the calls of them."""

from typing import Any

from lmmods.data.sources.cells import Values, as_text, parsed
from lmmods.data.sources.conversation import RowProblem


def specifications(value: Any, name: str) -> list[Values]:
    """[{"type": "function", "function": {...}}] of a list of tools, one tool, or JSON text of either.

    A bare {"name", "description", "parameters"} is put into such an object. Raises RowProblem.
    """
    return [_specification(item, name) for item in _items(value, name)]


def _specification(item: Any, name: str) -> Values:
    item = parsed(item, name) if isinstance(item, str) else item
    if not isinstance(item, dict):
        raise RowProblem(f"{name} holds a tool that is not an object")
    function = item.get("function")
    if not isinstance(function, dict):
        function = {key: value for key, value in item.items() if key != "type"}
        item = {"type": "function", "function": function}
    if not isinstance(function.get("name"), str):
        raise RowProblem(f"{name} holds a tool without a name")
    return item if item.get("type") else {"type": "function", "function": function}


def calls(value: Any, name: str) -> list[Values]:
    """Calls in OpenAI's form, of a list of them, one call, or JSON text of either.

    Arguments that are written as JSON text become the object, since templates write them as JSON themselves. Raises
    RowProblem.
    """
    return [_call(item, name) for item in _items(value, name)]


def _call(item: Any, name: str) -> Values:
    item = parsed(item, name) if isinstance(item, str) else item
    if not isinstance(item, dict):
        raise RowProblem(f"{name} holds a call that is not an object")
    function = item["function"] if isinstance(item.get("function"), dict) else item
    if not isinstance(function.get("name"), str):
        raise RowProblem(f"{name} holds a call without a name")
    arguments = _arguments(function.get("arguments", function.get("parameters")), name)
    call: Values = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if item.get("id") is not None:
        call["id"] = as_text(item["id"], f"{name}.id")
    return call


def _arguments(value: Any, name: str) -> Values | str:
    if value is None or isinstance(value, dict):
        return value or {}
    if not isinstance(value, str):
        raise RowProblem(f"{name} holds arguments that are neither an object nor text")
    if not value.strip():
        return {}
    try:
        found = parsed(value, name)
    except RowProblem:
        return value
    return found if isinstance(found, dict) else value


def spoken_calls(text: str) -> list[Values]:
    """Calls that a turn writes as its text: {"name", "arguments"} or a list of these; [] for any other text."""
    try:
        found = parsed(text, "")
        items = found if isinstance(found, list) else [found]
        are_calls = all(isinstance(item, dict) and {"name", "arguments"} <= item.keys() for item in items)
        return calls(items, "") if are_calls else []
    except RowProblem:
        return []


def _items(value: Any, name: str) -> list:
    if isinstance(value, str):
        value = parsed(value, name) if value.strip() else None
    return value if isinstance(value, list) else [value] if value else []
