"""Rows of many layouts to one: a conversation, which is a list of {"role", "content"} messages.

A user message may also carry "input": text that an instruction works on, which templates place by themselves. Layouts
whose rows hold several conversations, or a part of one, are regrouped first (trees.py).
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lmmods.core.errors import UserError
from lmmods.data.sources.conversation import Conversation, Message, RowProblem
from lmmods.data.sources.readers import Row
from lmmods.data.sources.trees import flat_instances, oasst_messages, oasst_trees

Values = dict[str, Any]
Roles = dict[str, str]
Converter = Callable[[Values, Roles], list[Message]]
END_OF_TEXT = "<|endoftext|>"
ROLES: Roles = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter", "question", "instruction"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatgpt", "model", "answer", "bing", "bard", "function_call"),
                    "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "ipython"), "tool"),
}


@dataclass(frozen=True)
class Format:
    """A row layout.

    Args:
        columns: Columns that every row of this layout has; detection looks for them.
        convert: Row -> messages. Raises RowProblem.
        sniff: Further test on the first row, where columns do not decide.
        regroup: Rows as read -> rows of one conversation each.
        template: Template that these rows need, whatever else is set.
    """

    columns: tuple[str, ...]
    convert: Converter
    sniff: Callable[[Values], bool] = lambda row: True
    regroup: Callable[[Iterable[Row]], Iterator[Row]] = iter
    template: str | None = None


def as_text(value: Any, column: str) -> str:
    """Text of a cell; numbers are written out. Raises RowProblem for null, nested values and what is no number."""
    if isinstance(value, str):
        return value
    if value is None:
        raise RowProblem(f"{column} is null")
    if isinstance(value, float) and not math.isfinite(value):
        raise RowProblem(f"{column} is {value} (NaN or too large a number), not text")
    if isinstance(value, bool | int | float):
        return str(value)
    raise RowProblem(f"{column} is a {type(value).__name__}, not text")


def check_unicode(text: str) -> None:
    """Raises RowProblem for text that has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowProblem("text with a lone surrogate (half of a character)") from error


def _cell(row: Values, column: str) -> str:
    if column not in row:
        raise RowProblem(f"{column} is missing")
    return as_text(row[column], column)


def _optional(row: Values, column: str) -> str:
    return "" if row.get(column) is None else as_text(row[column], column)


def _system(row: Values) -> list[Message]:
    """System turn from the columns `system` and `tools`; tools are kept as text."""
    tools = row.get("tools")
    texts = [_optional(row, "system"), tools if isinstance(tools, str) else json.dumps(tools) if tools else ""]
    content = "\n\n".join(text for text in texts if text.strip())
    return [{"role": "system", "content": content}] if content else []


def _pair(prompt: str, response: str, context: str | None = None, end_marker: str = "") -> Converter:
    """Converter of rows that hold one prompt and one response. A row without response becomes a prompt alone."""

    def convert(row: Values, roles: Roles) -> list[Message]:
        user = {"role": "user", "content": _cell(row, prompt)}
        if context and _optional(row, context).strip():
            user["input"] = _optional(row, context)
        messages = [*_system(row), user]
        if row.get(response) is not None:
            content = as_text(row[response], response).removesuffix(end_marker)
            messages.append({"role": "assistant", "content": content})
        return messages

    return convert


def _turns(column: str) -> Converter:
    """Converter of rows that hold a list of turns with a role and a text each, under any of the usual names."""

    def convert(row: Values, roles: Roles) -> list[Message]:
        turns = row.get(column)
        if isinstance(turns, str):  # lists written into a CSV cell
            turns = _parsed(turns, column)
        if not isinstance(turns, list) or not turns:
            raise RowProblem(f"{column} is not a list of turns" if turns else f"{column} is empty or missing")
        return _system(row) + [_turn(turn, column, roles) for turn in turns]

    return convert


def _parsed(text: str, column: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowProblem(f"{column} is text, not a list of turns") from error


def _turn(turn: Any, column: str, roles: Roles) -> Message:
    if not isinstance(turn, dict):
        raise RowProblem(f"{column} holds a turn that is not an object")
    role_key = next((key for key in ("role", "from", "speaker") if key in turn), None)
    text_key = next((key for key in ("content", "value", "text") if key in turn), None)
    if role_key is None or text_key is None:
        raise RowProblem(f"{column} holds a turn without role or content")
    name = str(turn[role_key])
    role = roles.get(name) or ROLES.get(name.lower())
    if role is None:
        raise RowProblem(f"{column} holds the unknown role {name[:40]!r} (map it with data.roles)")
    content = turn[text_key]
    if isinstance(content, list):  # parts as in multimodal chat: keep the texts
        content = "".join(part["text"] for part in content
                          if isinstance(part, dict) and isinstance(part.get("text"), str))
    if turn.get("tool_calls"):
        content = "\n".join(text for text in (content, json.dumps(turn["tool_calls"], ensure_ascii=False)) if text)
    return {"role": role, "content": as_text(content, f"{column}.{text_key}")}


def _marked(column: str, user: str, assistant: str) -> Converter:
    """Converter of rows that hold a whole conversation as one text with a marker before each turn."""
    marker = re.compile(f"({re.escape(user)}|{re.escape(assistant)})")

    def convert(row: Values, roles: Roles) -> list[Message]:
        head, *parts = marker.split(_cell(row, column))
        if not parts:
            raise RowProblem(f"{column} has no {user!r} or {assistant!r} in it")
        messages = [{"role": "system", "content": head.strip()}] if head.strip() else []
        for name, content in zip(parts[::2], parts[1::2], strict=True):
            messages.append({"role": "user" if name == user else "assistant", "content": content.strip()})
        return messages

    return convert


def _text(row: Values, roles: Roles) -> list[Message]:
    return [{"role": "assistant", "content": _cell(row, "text")}]


def _preferred(row: Values, roles: Roles) -> list[Message]:
    """hh-rlhf and its kin: the chosen conversation, or the chosen answer to a prompt column."""
    if isinstance(row.get("chosen"), list):
        return _turns("chosen")(row, roles)
    if isinstance(row.get("prompt"), str):
        return _pair("prompt", "chosen")(row, roles)
    return _marked("chosen", "\n\nHuman:", "\n\nAssistant:")(row, roles)


def _holds(column: str, text: str) -> Callable[[Values], bool]:
    return lambda row: isinstance(row.get(column), str) and text in row[column] and "output" not in row


def _instances_have(column: str) -> Callable[[Values], bool]:
    return lambda row: (isinstance(row["instances"], list)
                        and any(isinstance(item, dict) and column in item for item in row["instances"]))


FORMATS: dict[str, Format] = {
    "messages": Format(("messages",), _turns("messages")),
    "sharegpt": Format(("conversations",), _turns("conversations")),
    "oasst1-messages": Format(("message_id", "parent_id", "text", "role"), _turns("messages"), regroup=oasst_messages),
    "oasst1-trees": Format(("message_tree_id", "prompt"), _turns("messages"),
                           lambda row: isinstance(row["prompt"], dict), oasst_trees),
    "oasst1": Format(("text",), _marked("text", "### Human:", "### Assistant:"), _holds("text", "### Human:")),
    "chip2": Format(("text",), _marked("text", "<human>:", "<bot>:"), _holds("text", "<human>:")),
    "hh-rlhf": Format(("chosen",), _preferred),
    "unnatural-instructions": Format(("instruction", "instances"), _pair("instruction_with_input", "output"),
                                     _instances_have("instruction_with_input"), flat_instances),
    "self-instruct-nested": Format(("instruction", "instances"), _pair("instruction", "output", "input"),
                                   regroup=flat_instances),
    "alpaca": Format(("instruction", "output"), _pair("instruction", "output", "input")),
    "dolly": Format(("instruction", "context", "response"), _pair("instruction", "response", "context")),
    "instruction-response": Format(("instruction", "response"), _pair("instruction", "response", "input")),
    "self-instruct": Format(("prompt", "completion"), _pair("prompt", "completion", end_marker=END_OF_TEXT),
                            _holds("completion", END_OF_TEXT)),
    "prompt-completion": Format(("prompt", "completion"), _pair("prompt", "completion")),
    "prompt-response": Format(("prompt", "response"), _pair("prompt", "response")),
    "question-answer": Format(("question", "answer"), _pair("question", "answer", "context")),
    "input-output": Format(("input", "output"), _pair("input", "output")),
    "text": Format(("text",), _text, template="plain"),
}
ALIASES = {"alpaca-clean": "alpaca", "longform": "input-output", "gsm8k": "question-answer"}


def read_conversation(layout: str, row: Values, roles: Roles) -> Conversation:
    """The conversation of a row. Raises RowProblem where it holds none; UserError for an unknown layout."""
    return Conversation(find_format(layout).convert(row, roles))


def find_format(name: str) -> Format:
    """Format by name. Raises UserError naming the known ones."""
    name = ALIASES.get(name, name)
    if name not in FORMATS:
        raise UserError(f"data.dataset_format {name!r} is unknown; known are {', '.join([*FORMATS, *ALIASES])}")
    return FORMATS[name]


def detect_format(row: Values, where: str, prompts_only: bool = False) -> str:
    """Name of the first format that fits a row. Raises UserError: none fits; names the columns found.

    Args:
        row: The first row of a source.
        prompts_only: The rows may lack the column of the response, which is then found by the other columns.
    """
    for name, layout in FORMATS.items():
        if all(column in row for column in layout.columns) and layout.sniff(row):
            return name
    if prompts_only:
        for name, layout in FORMATS.items():
            if len(layout.columns) > 1 and layout.columns[0] in row:
                return name
    known = "; ".join(f"{name}: {', '.join(layout.columns)}" for name, layout in FORMATS.items())
    raise UserError(f"{where}: the columns {', '.join(row) or '(none)'} fit no known format ({known}). Map them with "
                    "data.columns, for example {your_column: instruction}, or name data.dataset_format")
