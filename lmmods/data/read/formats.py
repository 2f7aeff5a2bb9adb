"""Conversion of rows of many layouts to conversations.

Layouts whose rows contain several conversations, or a part of one, are regrouped first (trees.py).
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lmmods.core.errors import UserError
from lmmods.data.read.cells import Values, as_text, check_unicode, is_blank, parse
from lmmods.data.read.conversation import Conversation, Message, RowProblem
from lmmods.data.read.images import place_images, take_column
from lmmods.data.read.readers import Row
from lmmods.data.read.trees import flat_instances, oasst_messages, oasst_trees
from lmmods.data.read.turns import UNSUPPORTED, UNSUPPORTED_IMAGE, Roles, RowReader, order_turns, specifications
from lmmods.recipe.source import file_type

# ---------------------------------------------------------------------------------------------------------------------
# Converters of single layouts. Each removes the keys that it knows from a row and returns its messages.

Converter = Callable[[RowReader], list[Message]]
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
PROMPTS = ("prompt", "instruction", "question")  # columns of what a chosen answer answers


@dataclass(frozen=True)
class Pair:
    """Converter of rows with a prompt and a response: texts, or lists of turns as in TRL.

    A row without response becomes a prompt alone. A `history` of [question, answer] pairs, as in LLaMA-Factory, comes
    first.

    Args:
        prompt: Column of the prompt.
        response: Column of the response.
        context: Column of a text that follows the prompt; rows may lack it.
        end_marker: Removed from the end of the response.
    """

    prompt: str
    response: str
    context: str | None = None
    end_marker: str = ""

    def __call__(self, row: RowReader) -> list[Message]:
        messages = row.take_turns(self.prompt, "user")
        if self.context and (text := row.optional(self.context)).strip():
            messages[-1]["input"] = text
        if "history" in row.values:
            messages = _history(row) + messages
        if row.values.get(self.response) is None:
            return messages
        answer = row.take_turns(self.response, "assistant")
        if self.end_marker:
            answer[-1]["content"] = answer[-1]["content"].removesuffix(self.end_marker)
        return messages + answer


def _history(row: RowReader) -> list[Message]:
    history = row.values["history"]
    if not isinstance(history, list):
        return []  # has another meaning; reported as unused
    row.values.pop("history")
    messages: list[Message] = []
    for exchange in history:
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise RowProblem("history is not a list of [question, answer]")
        question, answer = (as_text(text, "history") for text in exchange)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def turns(column: str) -> Converter:
    """Return a converter of rows with a list of turns; a `chosen` column is the answer to them."""

    def convert(row: RowReader) -> list[Message]:
        messages = row.turns(column)
        if row.values.get("chosen") and messages[-1]["role"] != "assistant":
            answer = row.take_turns("chosen", "assistant")
            return messages + answer if answer[0]["role"] == "assistant" else answer
        return messages

    return convert


def marked(column: str, user: str, assistant: str) -> Converter:
    """Return a converter of rows that contain a whole conversation as one text with a marker before each turn."""
    return lambda row: _transcript(row.text(column), column, user, assistant)


def _transcript(text: str, column: str, user: str, assistant: str) -> list[Message]:
    # The group keeps the markers: text before the first, then marker and text in turn.
    head, *parts = re.split(f"({re.escape(user)}|{re.escape(assistant)})", text)
    if not parts:
        raise RowProblem(f"{column} has no {user!r} or {assistant!r} in it")
    messages: list[Message] = [{"role": "system", "content": head.strip()}] if head.strip() else []
    for name, content in zip(parts[::2], parts[1::2], strict=True):
        messages.append({"role": "user" if name == user else "assistant", "content": content.strip()})
    return messages


def whole_text(column: str) -> Converter:
    """Return a converter of rows with a text, all of it a target."""
    return lambda row: [{"role": "assistant", "content": row.text(column)}]


def chosen_conversation(row: RowReader) -> list[Message]:
    """Convert hh-rlhf and similar: the chosen conversation, or the chosen answer to the prompt in another column."""
    value = row.values.get("chosen")
    column = next((name for name in PROMPTS if row.values.get(name) is not None), None)
    answer = row.turns("chosen") if isinstance(value, list) else []
    if column is None:
        return answer or marked("chosen", HUMAN, ASSISTANT)(row)
    prompt = row.values[column]
    if isinstance(value, str) and value.startswith(HUMAN):
        return marked("chosen", HUMAN, ASSISTANT)(row)
    # The answer continues a transcript.
    if isinstance(value, str) and isinstance(prompt, str) and prompt.startswith(HUMAN):
        return _transcript(row.text(column) + row.text("chosen"), column, HUMAN, ASSISTANT)
    # `value` contains the whole conversation, or continues the turns of the prompt.
    if answer and answer[0]["role"] != "assistant":
        if any(message["content"] == prompt for message in answer):
            row.values.pop(column)  # the conversation contains it
        before = row.turns(column) if isinstance(prompt, list) else []
        return answer if answer[: len(before)] == before else before + answer
    return Pair(column, "chosen", "input" if column == "instruction" else None)(row) + answer


# MOSS

SPEAKER_MARK = re.compile(r"^(?:<\|[\w ]+\|>|\[\w+\]):")  # <|Human|>: or [Human]:
END_MARK = re.compile(r"<eo[a-z]>$")  # <eoh>
# name(arguments), then a comma or the end; in arguments, parentheses are allowed only within quotes.
COMMAND = re.compile(r'(\w+)\(((?:"(?:[^"\\]|\\.)*"|[^()"])*)\)(?:\s*,\s*|\s*$)')


def moss(row: RowReader) -> list[Message]:
    """moss-003: {"turn_1": {"Human", "Inner Thoughts", "Commands", "Tool Responses", "MOSS"}, ...}, with markers."""
    chat = row.values.pop("chat", None)
    exchanges = order_turns(chat) if isinstance(chat, dict) else chat
    if isinstance(exchanges, list):
        exchanges = [part for turn in exchanges for part in (_moss_turns(turn) if isinstance(turn, dict) else [turn])]
    return _moss_system(row, "meta_instruction") + row.messages(exchanges, "chat")


def _moss_turns(turn: Values) -> list[Values]:
    """Return the turns of one exchange: the question, a tool call and its result, the answer."""
    if "MOSS" not in turn and "Human" not in turn:
        return [turn]
    turn = dict(turn)
    keys = ("Human", "Inner Thoughts", "Commands", "Tool Responses", "MOSS")
    human, thoughts, commands, results, answer = (_remove_mark(turn.pop(key, None), key) for key in keys)
    turns: list[Values] = [{"role": "user", "content": human}]
    if commands:
        turns.append({"role": "assistant", "reasoning_content": thoughts, **_parse_commands(commands)})
        thoughts = None
    if results:
        turns.append({"role": "tool", "content": results})
    if answer is not None:
        turns.append({"role": "assistant", "content": answer, "reasoning_content": thoughts})
    # Unknown keys stay with the last turn, where they are reported as unused.
    return [*turns[:-1], {**turn, **turns[-1]}]


def _remove_mark(value: Any, key: str) -> str | None:
    if value is None:
        return None
    text = SPEAKER_MARK.sub("", END_MARK.sub("", as_text(value, f"chat.{key}").strip())).strip()
    return None if text == "None" and key not in ("Human", "MOSS") else text


def _parse_commands(commands: str) -> Values:
    """Parse commands like `Search("x"), Calculate("1+1")` as calls; text of another form stays text."""
    calls, position = [], 0
    while position < len(commands):
        match = COMMAND.match(commands, position)
        if match is None:
            return {"content": commands}
        calls.append({"name": match.group(1), "arguments": match.group(2)})
        position = match.end()
    return {"tool_calls": calls}


def moss_marked_text(row: RowReader) -> list[Message]:
    """moss-002: one text in which <eoh> ends a turn of the user and <eoa> one of the assistant."""
    *parts, tail = re.split(r"<(eo[a-z])>", row.text("plain_text"))
    if tail.strip() or not parts:
        raise RowProblem("plain_text does not end in <eoh> or <eoa>")
    messages: list[Message] = [
        {"role": "user" if mark == "eoh" else "assistant", "content": SPEAKER_MARK.sub("", text.strip()).strip()}
        for text, mark in zip(parts[::2], parts[1::2], strict=True)]
    return _moss_system(row, "prefix") + messages


def _moss_system(row: RowReader, column: str) -> list[Message]:
    text = row.optional(column).strip()
    return [{"role": "system", "content": text}] if text else []


# OpenAI's batches


def batch(row: RowReader) -> list[Message]:
    """OpenAI's batch files: the messages of a request, and the answer if the row has the response, too."""
    body = _object(row.values.pop("body", None), "body")
    for key in ("tools", "functions"):
        if key in body:
            row.values[key] = body.pop(key)
    messages = row.messages(body.pop("messages", None), "body.messages")
    row.leave(body, "body")
    if row.values.get("response") is None:
        return messages
    response = _object(row.values.pop("response"), "response")
    choices = _object(response.get("body"), "response.body").get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise RowProblem("response has no answer")
    if len(choices) > 1:
        row.leave({"choices": choices[1:]}, "response.body")
    return messages + row.messages([choices[0].get("message")], "response.body.choices")


def _object(value: Any, name: str) -> Values:
    value = parse(value, name) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise RowProblem(f"{name} is not an object")
    return dict(value)


END_OF_TEXT = "<|endoftext|>"
LARGEST_WEIGHT = 3e38  # below the largest float32
MEDIA = ("images", "videos", "audios")
BESIDE = {"system", "tools", "functions", "documents", "chat_template_kwargs", "weight", "kto_tag", *MEDIA,
          *(column.removesuffix("s") for column in MEDIA)}  # columns that rows of any layout may have
IN_TREES = ("message_id", "parent_id", "message_tree_id", "rank")


@dataclass(frozen=True)
class Format:
    """A row layout.

    Args:
        columns: Columns that every row of this layout has; used by detection.
        convert: Converts a row to messages; removes the keys that it uses from the row. Raises RowProblem.
        sniff: Further test on the first row, if the columns do not decide.
        regroup: Converts rows as read to rows of one conversation each.
        template: Template that these rows need, overriding all settings.
        spent: Keys of rows and turns that only identify the layout or the order of turns.
    """

    columns: tuple[str, ...]
    convert: Converter
    sniff: Callable[[Values], bool] = lambda row: True
    regroup: Callable[[Iterable[Row]], Iterator[Row]] = iter
    template: str | None = None
    spent: tuple[str, ...] = ()


def _holds(column: str, text: str) -> Callable[[Values], bool]:
    return lambda row: isinstance(row.get(column), str) and text in row[column] and "output" not in row


def _instances_have(column: str) -> Callable[[Values], bool]:
    return lambda row: (isinstance(row["instances"], list)
                        and any(isinstance(item, dict) and column in item for item in row["instances"]))


def _are_plain_texts(row: Values) -> bool:
    """Return True if the answers of a pair are neither turns nor transcripts, and answer nothing in another column."""
    return (all(isinstance(row[name], str) and HUMAN not in row[name] for name in ("chosen", "rejected"))
            and all(is_blank(row.get(name)) for name in PROMPTS))


FORMATS: dict[str, Format] = {
    "messages": Format(("messages",), turns("messages")),
    "sharegpt": Format(("conversations",), turns("conversations")),
    "oasst1-messages": Format(("message_id", "parent_id", "text", "role"), turns("messages"), regroup=oasst_messages,
                              spent=IN_TREES),
    "oasst1-trees": Format(("message_tree_id", "prompt"), turns("messages"),
                           lambda row: isinstance(row["prompt"], dict), oasst_trees, spent=IN_TREES),
    "oasst1": Format(("text",), marked("text", "### Human:", "### Assistant:"), _holds("text", "### Human:")),
    "chip2": Format(("text",), marked("text", "<human>:", "<bot>:"), _holds("text", "<human>:")),
    "text-pair": Format(("chosen", "rejected"), whole_text("chosen"), _are_plain_texts, template="plain"),
    "hh-rlhf": Format(("chosen",), chosen_conversation),
    "unnatural-instructions": Format(("instruction", "instances"), Pair("instruction_with_input", "output"),
                                     _instances_have("instruction_with_input"), flat_instances,
                                     spent=("instruction",)),  # contained in instruction_with_input
    "self-instruct-nested": Format(("instruction", "instances"), Pair("instruction", "output", "input"),
                                   regroup=flat_instances),
    "alpaca": Format(("instruction", "output"), Pair("instruction", "output", "input")),
    "dolly": Format(("instruction", "context", "response"), Pair("instruction", "response", "context")),
    "instruction-response": Format(("instruction", "response"), Pair("instruction", "response", "input")),
    "self-instruct": Format(("prompt", "completion"), Pair("prompt", "completion", end_marker=END_OF_TEXT),
                            _holds("completion", END_OF_TEXT)),
    "prompt-completion": Format(("prompt", "completion"), Pair("prompt", "completion")),
    "prompt-response": Format(("prompt", "response"), Pair("prompt", "response")),
    "question-answer": Format(("question", "answer"), Pair("question", "answer", "context")),
    "input-output": Format(("input", "output"), Pair("input", "output")),
    "text": Format(("text",), whole_text("text"), template="plain"),
    "conversation": Format(("conversation",), turns("conversation")),
    "moss": Format(("chat",), moss, lambda row: isinstance(row["chat"], list | dict)),
    "moss-text": Format(("plain_text",), moss_marked_text, _holds("plain_text", "<eoh>")),
    "openai-batch": Format(("custom_id", "body"), batch, spent=("custom_id", "method", "url")),
}
ALIASES = {"alpaca-clean": "alpaca", "longform": "input-output", "gsm8k": "question-answer"}


def read_conversation(layout: str, row: Values, roles: Roles, turn_fields: dict[str, str] | None = None,
                      reads_images: bool = False) -> Conversation:
    """Convert a row to a conversation.

    Args:
        layout: Name of the row's format.
        row: The row as read; not modified.
        roles: Maps names of roles in the file to system, user, assistant or tool, besides the usual names.
        turn_fields: Maps fields of a message to keys of the file's turns, besides the usual keys.
        reads_images: Keep the images of the row in the messages; otherwise a row with images has a problem.

    Raises:
        RowProblem: The row has no usable conversation.
        UserError: The layout is unknown.
    """
    form = find_format(layout)
    reading = RowReader(row, roles, turn_fields, reads_images)
    conversation = Conversation(form.convert(reading))
    if reads_images:
        place_images(conversation.messages, take_column(reading.values))
    if not BESIDE.isdisjoint(reading.values):
        _read_beside(reading, conversation, form)
    if reading.values or reading.unused:
        names = (*(name for name, value in reading.values.items() if not is_blank(value)), *reading.unused)
        conversation.unused = tuple(name for name in names if name.rpartition(".")[2] not in form.spent)
    return conversation


def _read_beside(reading: RowReader, conversation: Conversation, form: Format) -> None:
    """Take the columns that rows of any layout may have besides their turns. Raises RowProblem."""
    values = reading.values
    for column in MEDIA:
        one = column.removesuffix("s")
        # Plural columns are media; a singular one may be a plain text column, unless the turns have a place for it.
        is_placed = any(f"<{one}>" in message["content"] for message in conversation.messages)
        if not is_blank(values.get(column)) or (is_placed and not is_blank(values.get(one))):
            raise RowProblem(f"the row has {column}, {UNSUPPORTED_IMAGE if column == MEDIA[0] else UNSUPPORTED}")
    if values.get("kto_tag") in (False, "false", "False"):
        raise RowProblem("kto_tag is false: the answer is unwanted")
    values.pop("kto_tag", None)
    conversation.weight = _weight(values.pop("weight", None))
    if form.template is not None:
        return
    if (system := reading.optional("system")).strip():
        turn: Message = {"role": "system", "content": system}
        # Some datasets repeat the system turn in a column.
        if conversation.messages[:1] != [turn]:
            conversation.messages.insert(0, turn)
    for column in ("tools", "functions"):
        conversation.tools += specifications(values.pop(column, None), column)
    settings = values.pop("chat_template_kwargs", None)
    settings = parse(settings, "chat_template_kwargs") if isinstance(settings, str) and settings else settings
    if not is_blank(settings):
        if not isinstance(settings, dict):
            raise RowProblem("chat_template_kwargs is not an object")
        conversation.template_kwargs = settings
    documents = values.get("documents")
    if isinstance(documents, list) and documents and all(isinstance(item, dict) for item in documents):
        conversation.documents = values.pop("documents")  # other forms are reported as unused
    check_unicode([conversation.tools, conversation.template_kwargs, conversation.documents])


def _weight(value: Any) -> float:
    if value is None or value == "":
        return 1.0
    try:
        weight = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if not 0 <= weight <= LARGEST_WEIGHT:
        raise RowProblem("weight is not a number of 0 or more")
    return weight


def find_format(name: str) -> Format:
    """Return a format by name. Raises UserError that lists the known ones."""
    name = ALIASES.get(name, name)
    if name not in FORMATS:
        raise UserError(f"data.dataset_format {name!r} is unknown. Use one of {', '.join([*FORMATS, *ALIASES])}")
    return FORMATS[name]


def format_of(row: Values) -> str | None:
    """Return the name of the first format that fits a row; None if none does."""
    # The first that fits: FORMATS lists more specific layouts before those whose columns they share.
    return next((name for name, layout in FORMATS.items()
                 if all(column in row for column in layout.columns) and layout.sniff(row)), None)


def recognise_texts(row: Row) -> str | None:
    """Return why a source with this first row contains texts; None if it does not."""
    if file_type(row.file) == ".txt":
        return "the data are texts"
    return "the rows are texts" if format_of(row.values) == "text" else None


def detect_format(row: Values, location: str, prompts_only: bool = False) -> str:
    """Return the name of the first format that fits a row. Raises UserError that lists the columns: none fits.

    Args:
        row: The first row of a source.
        location: Its file and line.
        prompts_only: The rows may lack the column of the response; the other columns then decide.
    """
    if (name := format_of(row)) is not None:
        return name
    if prompts_only and (name := _format_of_prompt(row)) is not None:
        return name
    known = "; ".join(f"{name}: {', '.join(layout.columns)}" for name, layout in FORMATS.items())
    lacking = ", also without the column of the response" if prompts_only else ""
    raise UserError(f"{location}: the columns {', '.join(row) or '(none)'} fit no known format{lacking} ({known}). Map "
                    "them with data.columns, for example {your_column: instruction}, or set data.dataset_format")


def _format_of_prompt(row: Values) -> str | None:
    """Return the layout of pairs that reads most columns of a row without a response; None if none fits."""
    read: dict[str, int] = {}
    for name, layout in FORMATS.items():
        pair = layout.convert
        if (isinstance(pair, Pair) and all(column in row for column in layout.columns if column != pair.response)
                and layout.sniff(row)):
            read[name] = sum(column in row for column in (pair.prompt, pair.context))
    return max(read, key=read.__getitem__, default=None)  # the first of several
