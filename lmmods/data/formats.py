"""Rows of many layouts to one: a conversation, which is a list of {"role", "content"} messages.

A user message may also carry "input": text that an instruction works on, which templates place by themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmmods.errors import UserError

Message = dict[str, str]


class RowProblem(Exception):
    """Why one row cannot be used. The reason is counted in the data report."""


@dataclass(frozen=True)
class Format:
    """A row layout.

    Args:
        columns: Columns that every row of this layout has; detection looks for them.
        convert: Row -> messages. Raises RowProblem.
        sniff: Further test on the first row, where columns do not decide.
    """

    columns: tuple[str, ...]
    convert: Callable[[dict[str, Any]], list[Message]]
    sniff: Callable[[dict[str, Any]], bool] | None = None


def as_text(value: Any, column: str) -> str:
    """Text of a cell; numbers are written out. Raises RowProblem for null and nested values."""
    if isinstance(value, str):
        return value
    if value is None:
        raise RowProblem(f"{column} is null")
    if isinstance(value, bool | int | float):
        return str(value)
    raise RowProblem(f"{column} is a {type(value).__name__}, not text")


def _cell(row: dict[str, Any], column: str) -> str:
    if column not in row:
        raise RowProblem(f"{column} is missing")
    return as_text(row[column], column)


def _optional(row: dict[str, Any], column: str) -> str:
    return "" if row.get(column) is None else as_text(row[column], column)


def _exchange(prompt: str, response: str, context: str = "", system: str = "") -> list[Message]:
    messages = [{"role": "system", "content": system}] if system.strip() else []
    user = {"role": "user", "content": prompt}
    if context.strip():
        user["input"] = context
    return [*messages, user, {"role": "assistant", "content": response}]


def _pair(prompt: str, response: str, context: str | None = None) -> Callable[[dict[str, Any]], list[Message]]:
    """Converter of rows that hold one prompt and one response. A row without response becomes a prompt alone."""

    def convert(row: dict[str, Any]) -> list[Message]:
        messages = _exchange(_cell(row, prompt), _optional(row, response), _optional(row, context) if context else "",
                             _optional(row, "system"))
        return messages if response in row and row[response] is not None else messages[:-1]

    return convert


ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user", "question": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant",
    "answer": "assistant", "bing": "assistant", "bard": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "ipython": "tool",
    "function_call": "assistant",
}


def _conversation(column: str) -> Callable[[dict[str, Any]], list[Message]]:
    def convert(row: dict[str, Any]) -> list[Message]:
        turns = row.get(column)
        if not isinstance(turns, list) or not turns:
            raise RowProblem(f"{column} is not a list of turns" if turns else f"{column} is empty or missing")
        system = _optional(row, "system")
        messages = [{"role": "system", "content": system}] if system.strip() else []
        return messages + [_turn(turn, column) for turn in turns]

    return convert


def _turn(turn: Any, column: str) -> Message:
    if not isinstance(turn, dict):
        raise RowProblem(f"{column} holds a turn that is not an object")
    role_key = next((key for key in ("role", "from") if key in turn), None)
    text_key = next((key for key in ("content", "value", "text") if key in turn), None)
    if role_key is None or text_key is None:
        raise RowProblem(f"{column} holds a turn without role or content")
    role = ROLES.get(str(turn[role_key]).lower())
    if role is None:
        raise RowProblem(f"{column} holds the unknown role {str(turn[role_key])[:40]!r}")
    content = turn[text_key]
    if isinstance(content, list):  # content parts as of multimodal chat: keep the texts
        content = "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return {"role": role, "content": as_text(content, f"{column}.{text_key}")}


FORMATS: dict[str, Format] = {
    "messages": Format(("messages",), _conversation("messages")),
    "sharegpt": Format(("conversations",), _conversation("conversations")),
    "alpaca": Format(("instruction", "output"), _pair("instruction", "output", "input")),
    "prompt-completion": Format(("prompt", "completion"), _pair("prompt", "completion")),
    "input-output": Format(("input", "output"), _pair("input", "output")),
}
ALIASES = {"alpaca-clean": "alpaca"}


def find_format(name: str) -> Format:
    """Format by name. Raises UserError naming the known ones."""
    name = ALIASES.get(name, name)
    if name not in FORMATS:
        raise UserError(f"data.dataset_format {name!r} is unknown; known are {', '.join([*FORMATS, *ALIASES])}")
    return FORMATS[name]


def detect_format(row: dict[str, Any], where: str) -> str:
    """Name of the first format whose columns `row` has. Raises UserError naming the columns found."""
    for name, layout in FORMATS.items():
        if all(column in row for column in layout.columns) and (layout.sniff is None or layout.sniff(row)):
            return name
    known = "; ".join(f"{name}: {', '.join(layout.columns)}" for name, layout in FORMATS.items())
    raise UserError(f"{where}: the columns {', '.join(row) or '(none)'} fit no known format ({known}). Map them with "
                    "data.columns, for example {your_column: instruction}, or name data.dataset_format")
