"""A row during reading, and conversion of turns with any trainer's key names to messages.

Values are removed from a row when they are used; what remains is reported as unused in the data report.
"""

import re
from functools import cache
from typing import Any

from lmmods.data.read.cells import Values, as_text, is_blank, parse
from lmmods.data.read.conversation import Message, RowProblem
from lmmods.data.read.images import IMAGE, TYPES, find_source

Roles = dict[str, str]
CALLS = "function_call"  # role of a turn of the assistant whose text is a call
ROLES: Roles = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter", "question", "instruction"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatgpt", "model", "answer", "bing", "bard", "moss"), "assistant"),
    **dict.fromkeys(
        ("tool", "function", "observation", "function_response", "ipython", "tool_response", "tool-response"), "tool"
    ),
    **dict.fromkeys((CALLS, "tool_call", "tool-call"), CALLS),
}
# Speakers in a turn that contains several texts: {"Human": ..., "MOSS": ...}, xtuner's {"system", "input", "output"}.
SPEAKERS: Roles = {
    "system": "system",
    **dict.fromkeys(("human", "user", "prompter", "prompt", "question", "instruction", "query", "input"), "user"),
    **dict.fromkeys(("gpt", "assistant", "bot", "moss", "completion", "answer", "response", "output"), "assistant"),
}
# Possible keys of each field of a turn; the first that is not null counts.
KEYS: dict[str, tuple[str, ...]] = {
    "role": ("role", "from", "speaker", "author"),
    "content": ("content", "value", "text", "message"),
    "reasoning_content": ("reasoning_content", "reasoning", "thinking", "thought"),
    "tool_calls": ("tool_calls", "function_call"),
    "tool_call_id": ("tool_call_id",),
    "name": ("name",),
    "scored": ("weight", "train", "training", "trainable", "loss", "output_with_loss"),
}
DETAILS = ("train_detail", "training_detail")  # axolotl's spans within a turn
SHOWN = {"image": "an image", "image_url": "an image", "input_image": "an image", "audio": "audio",
         "audio_url": "audio", "input_audio": "audio", "video": "a video", "video_url": "a video", "file": "a file",
         "input_file": "a file", "document": "a file"}
UNSUPPORTED = "which this task does not support"
UNSUPPORTED_IMAGE = "which only SFT and Preference read, with model.images"


@cache
def _keys(turn_fields: tuple[tuple[str, str], ...]) -> dict[str, tuple[str, ...]]:
    explicit = dict(turn_fields)
    return {field: (explicit[field], *keys) if field in explicit else keys for field, keys in KEYS.items()}


class RowReader:
    """One row during reading.

    Args:
        row: Columns of the row; not modified.
        roles: Maps names of roles in the file to roles, besides the usual names.
        turn_fields: Maps fields of a message to keys of the file's turns, besides the usual keys.
        reads_images: Parts of turns may be images; otherwise such a row has a problem.

    Attributes:
        values: Columns not used yet.
        unused: Non-empty keys within columns that were not read.
    """

    __slots__ = ("_keys", "_roles", "reads_images", "unused", "values")

    def __init__(self, row: Values, roles: Roles, turn_fields: dict[str, str] | None = None,
                 reads_images: bool = False) -> None:
        self.values = dict(row)
        self.unused: dict[str, None] = {}
        self._roles, self.reads_images = roles, reads_images
        self._keys = _keys(tuple(turn_fields.items())) if turn_fields else KEYS

    # Columns

    def text(self, column: str) -> str:
        """Take the text of a column. Raises RowProblem if there is none."""
        if column not in self.values:
            raise RowProblem(f"{column} is missing")
        return as_text(self.values.pop(column), column)

    def optional(self, column: str) -> str:
        """Take the text of a column, "" if there is none. Raises RowProblem."""
        value = self.values.pop(column, None)
        return "" if value is None else as_text(value, column)

    def take_turns(self, column: str, role: str) -> list[Message]:
        """Remove a column and return its turns; plain text becomes one turn of `role`. Raises RowProblem."""
        value = self.values.get(column)
        if isinstance(value, str):  # the usual case
            return [{"role": role, "content": self.values.pop(column)}]
        if isinstance(value, list | dict) and self._holds_turns(value):
            return self.turns(column)
        return [{"role": role, "content": self.text(column)}]

    def turns(self, column: str) -> list[Message]:
        """Take the turns of a column that must contain some. Raises RowProblem."""
        return self.messages(self.values.pop(column, None), column)

    def leave(self, values: Values, name: str) -> None:
        """Report the remaining keys of a nested object as unused."""
        self.unused.update(dict.fromkeys(f"{name}.{key}" for key, value in values.items() if not is_blank(value)))

    def _holds_turns(self, value: list | dict) -> bool:
        # A list of objects contains turns; a single object is a turn if it names its speaker.
        first = value[0] if value and isinstance(value, list) else value
        return isinstance(first, dict) and (first is not value or any(key in value for key in self._keys["role"]))

    # Turns

    def messages(self, turns: Any, name: str) -> list[Message]:
        """Convert a list of turns, an object of turns with numbered keys, or one turn to messages.

        Args:
            turns: The turns; also as JSON text, as in CSV files.
            name: Their name in error messages.

        Raises:
            RowProblem: They are not turns, or one cannot be used.
        """
        if isinstance(turns, str):
            try:
                turns = parse(turns, name)
            except RowProblem as problem:
                raise RowProblem(f"{name} is text, not a list of turns") from problem
        if isinstance(turns, dict):
            turns = [turns] if self._holds_turns(turns) else order_turns(turns)
        if not isinstance(turns, list) or not turns:
            raise RowProblem(f"{name} is not a list of turns" if turns else f"{name} is empty or missing")
        messages: list[Message] = []
        for turn in turns:
            if not isinstance(turn, dict):
                raise RowProblem(f"{name} has a turn that is not an object")
            turn = dict(turn)
            role_key = self._key(turn, "role")
            messages += self._speakers(turn, name) if role_key is None else [self._message(turn, role_key, name)]
        return messages

    def _key(self, turn: Values, field: str) -> str | None:
        """Return the key under which a turn has a field; None if it has none."""
        for key in self._keys[field]:
            if turn.get(key) is not None:
                return key
        return None

    def _role(self, name: str) -> str | None:
        name = self._roles.get(name, name)
        return ROLES.get(name) or ROLES.get(name.lower())

    def _message(self, turn: Values, role_key: str, name: str) -> Message:
        content_key = self._key(turn, "content")
        speaker = str(turn.pop(role_key))
        role = self._role(speaker)
        if role is None:
            raise RowProblem(f"{name} has the unknown role {speaker[:40]!r} (map it with data.roles)")
        content = None if content_key is None else turn.pop(content_key)
        if not turn and isinstance(content, str) and role != CALLS:  # the usual case of a turn
            return {"role": role, "content": content}
        message: Message = {"role": "assistant" if role == CALLS else role, "content": ""}
        if isinstance(content, list):
            content = self._join_parts(content, message, f"{name}.{content_key}")
        if message["role"] == "assistant":
            content = self._add_calls(message, content, turn, role, name)
        if content is None and "tool_calls" not in message:
            # Name the key that is null, if there is one.
            null = next((key for key in self._keys["content"] if key in turn), None)
            raise RowProblem(f"{name}.{null} is null" if null else f"{name} has a turn without role or content")
        message["content"] = "" if content is None else as_text(content, f"{name}.{content_key}")
        self._add_rest(message, turn, name)
        return message

    def _join_parts(self, parts: list, message: Message, name: str) -> str:
        """Join the texts of a content in parts. Raises RowProblem for a part that cannot be shown."""
        texts = []
        for part in parts:
            part = {"text": part} if isinstance(part, str) else part
            if not isinstance(part, dict):
                raise RowProblem(f"{name} has a part that is neither text nor an object")
            part = dict(part)
            # Some datasets omit the type of parts; then the key of the content determines it.
            part_type = part.pop("type", None) or next((key for key in SHOWN if not is_blank(part.get(key))), "text")
            if part_type in ("thinking", "reasoning") and isinstance(part.get(part_type), str):
                message["reasoning_content"] = message.get("reasoning_content", "") + part.pop(part_type)
            elif part_type in ("text", "input_text", "output_text"):
                texts.append(as_text(part.pop("text", None), f"{name}.text"))
            elif part_type in TYPES and self.reads_images:
                texts.append(IMAGE)
                message.setdefault("images", []).append(find_source(part))
                continue
            else:
                part_type = str(part_type)[:40]
                kind = SHOWN.get(part_type, f"a part of type {part_type!r}")
                raise RowProblem(f"a turn has {kind}, {UNSUPPORTED_IMAGE if kind == SHOWN['image'] else UNSUPPORTED}")
            self.leave(part, name)
        return "".join(texts)

    def _add_calls(self, message: Message, content: Any, turn: Values, role: str, name: str) -> Any:
        """Move calls and reasoning of an assistant's turn into its message; returns the remaining content."""
        tool_calls = [call for key in self._keys["tool_calls"] if key in turn for call in calls(
            turn.pop(key), f"{name}.{key}")]
        if role == CALLS and isinstance(content, str) and (spoken := spoken_calls(content)):
            tool_calls, content = tool_calls + spoken, None
        if tool_calls:
            message["tool_calls"] = tool_calls
        key = self._key(turn, "reasoning_content")
        if key is not None and isinstance(turn[key], str):
            message["reasoning_content"] = turn.pop(key)
        return content

    def _add_rest(self, message: Message, turn: Values, name: str) -> None:
        """Move the remaining fields of a turn into its message; all others are reported as unused."""
        for field in ("tool_call_id", "name"):
            key = self._key(turn, field)
            if key is not None and not is_blank(turn[key]):
                message[field] = as_text(turn.pop(key), f"{name}.{key}")
        for key in DETAILS:
            if not is_blank(turn.get(key)):
                raise RowProblem(f"{name}.{key} selects parts of a turn, which is not supported; select whole turns")
        # `masked` means the opposite of the others. A turn is learned only if none of them forbids it.
        flags = [(key, _flag(turn.pop(key), f"{name}.{key}")) for key in (*self._keys["scored"], "masked")
                 if turn.get(key) is not None]
        if flags:
            message["scored"] = all(flag is not (key == "masked") for key, flag in flags)
        if turn:
            self.leave(turn, name)

    def _speakers(self, turn: Values, name: str) -> list[Message]:
        """Return the messages of a turn that contains the texts of several speakers, in the order of its keys.

        Other keys belong to the assistant's turn.
        """
        spoken: list[tuple[str, Any]] = []
        for key in () if self._key(turn, "content") else tuple(turn):
            role = self._role(key) if key in self._roles else SPEAKERS.get(key.lower())
            if role is not None:
                content = turn.pop(key)
                if content is not None and (content != "" or role == "assistant"):
                    spoken.append((role, content))
        if not spoken:
            raise RowProblem(f"{name} has a turn without role or content")
        # Other keys (reasoning, calls) go to the last text of the assistant.
        last = max((index for index, (role, _) in enumerate(spoken) if role == "assistant"), default=len(spoken) - 1)
        return [self._message({"role": role, "content": content} | (turn if index == last else {}), "role", name)
                for index, (role, content) in enumerate(spoken)]


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise RowProblem(f"{name} is neither 0 nor 1: a turn is a target or it is not")
    return bool(value)


def order_turns(turns: Values) -> list | Values:
    """Sort turns of an object like {"turn_1": {...}, "turn_2": {...}} by the numbers in its keys; other values are
    unchanged."""
    there = {key: turn for key, turn in turns.items() if turn is not None}
    if not there or not all(isinstance(turn, dict) for turn in there.values()):
        return turns
    return [there[key] for key in sorted(there, key=_natural)]


def _natural(key: str) -> list[tuple[int, str]]:
    """Sort key that orders by the numbers in a key, however long; every second part of the split is a number."""
    parts = enumerate(re.split(r"(\d+)", key))
    # Numbers compare by length, then digit by digit: int() would reject thousands of digits.
    return [(len(part.lstrip("0")), part.lstrip("0")) if index % 2 else (0, part) for index, part in parts]


# ---------------------------------------------------------------------------------------------------------------------
# Tools in the form that chat templates read: specifications and calls.

def specifications(value: Any, name: str) -> list[Values]:
    """Convert a list of tools, one tool, or JSON text of either to [{"type": "function", "function": {...}}].

    A bare {"name", "description", "parameters"} is wrapped. Raises RowProblem.
    """
    return [_specification(item, name) for item in _items(value, name)]


def _specification(item: Any, name: str) -> Values:
    item = parse(item, name) if isinstance(item, str) else item
    if not isinstance(item, dict):
        raise RowProblem(f"{name} has a tool that is not an object")
    function = item.get("function")
    if not isinstance(function, dict):
        function = {key: value for key, value in item.items() if key != "type"}
        item = {"type": "function", "function": function}
    if not isinstance(function.get("name"), str):
        raise RowProblem(f"{name} has a tool without a name")
    return item if item.get("type") else {"type": "function", "function": function}


def calls(value: Any, name: str) -> list[Values]:
    """Convert a list of calls, one call, or JSON text of either to OpenAI's form.

    Arguments as JSON text become an object, since templates convert them to JSON themselves. Raises RowProblem.
    """
    return [_call(item, name) for item in _items(value, name)]


def _call(item: Any, name: str) -> Values:
    item = parse(item, name) if isinstance(item, str) else item
    if not isinstance(item, dict):
        raise RowProblem(f"{name} has a call that is not an object")
    function = item["function"] if isinstance(item.get("function"), dict) else item
    if not isinstance(function.get("name"), str):
        raise RowProblem(f"{name} has a call without a name")
    arguments = _arguments(function.get("arguments", function.get("parameters")), name)
    call: Values = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if item.get("id") is not None:
        call["id"] = as_text(item["id"], f"{name}.id")
    return call


def _arguments(value: Any, name: str) -> Values | str:
    if value is None or isinstance(value, dict):
        return value or {}
    if not isinstance(value, str):
        raise RowProblem(f"{name} has arguments that are neither an object nor text")
    if not value.strip():
        return {}
    try:
        arguments = parse(value, name)
    except RowProblem:
        return value
    return arguments if isinstance(arguments, dict) else value


def spoken_calls(text: str) -> list[Values]:
    """Return the calls that are a turn's whole text: {"name", "arguments"} or a list of these; [] for other text."""
    try:
        value = parse(text, "")
        items = value if isinstance(value, list) else [value]
        are_calls = all(isinstance(item, dict) and {"name", "arguments"} <= item.keys() for item in items)
        return calls(items, "") if are_calls else []
    except RowProblem:
        return []


def _items(value: Any, name: str) -> list:
    if isinstance(value, str):
        value = parse(value, name) if value.strip() else None
    return value if isinstance(value, list) else [value] if value else []
