"""Rows of many layouts to one: a conversation.

Layouts whose rows hold several conversations, or a part of one, are regrouped first (trees.py).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lmmods.core.errors import UserError
from lmmods.data.sources import layouts, tools
from lmmods.data.sources.cells import Values, check_unicode, is_blank, parsed
from lmmods.data.sources.conversation import Conversation, Message, RowProblem
from lmmods.data.sources.layouts import Converter, marked, pair, turns
from lmmods.data.sources.readers import Row
from lmmods.data.sources.trees import flat_instances, oasst_messages, oasst_trees
from lmmods.data.sources.turns import Reading, Roles

END_OF_TEXT = "<|endoftext|>"
LARGEST_WEIGHT = 3e38  # as float32 has it
MEDIA = ("images", "videos", "audios")
BESIDE = {"system", "tools", "functions", "documents", "chat_template_kwargs", "weight", "kto_tag", *MEDIA,
          *(column.removesuffix("s") for column in MEDIA)}  # what rows of any layout may hold
IN_TREES = ("message_id", "parent_id", "message_tree_id", "rank")


@dataclass(frozen=True)
class Format:
    """A row layout.

    Args:
        columns: Columns that every row of this layout has; detection looks for them.
        convert: Row -> messages; takes what it uses out of the row. Raises RowProblem.
        sniff: Further test on the first row, where columns do not decide.
        regroup: Rows as read -> rows of one conversation each.
        template: Template that these rows need, whatever else is set.
        spent: Keys of rows and turns that have told the layout, or the order of turns, and say nothing more.
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


FORMATS: dict[str, Format] = {
    "messages": Format(("messages",), turns("messages")),
    "sharegpt": Format(("conversations",), turns("conversations")),
    "oasst1-messages": Format(("message_id", "parent_id", "text", "role"), turns("messages"), regroup=oasst_messages,
                              spent=IN_TREES),
    "oasst1-trees": Format(("message_tree_id", "prompt"), turns("messages"),
                           lambda row: isinstance(row["prompt"], dict), oasst_trees, spent=IN_TREES),
    "oasst1": Format(("text",), marked("text", "### Human:", "### Assistant:"), _holds("text", "### Human:")),
    "chip2": Format(("text",), marked("text", "<human>:", "<bot>:"), _holds("text", "<human>:")),
    "hh-rlhf": Format(("chosen",), layouts.preferred),
    "unnatural-instructions": Format(("instruction", "instances"), pair("instruction_with_input", "output"),
                                     _instances_have("instruction_with_input"), flat_instances,
                                     spent=("instruction",)),  # instruction_with_input has it whole
    "self-instruct-nested": Format(("instruction", "instances"), pair("instruction", "output", "input"),
                                   regroup=flat_instances),
    "alpaca": Format(("instruction", "output"), pair("instruction", "output", "input")),
    "dolly": Format(("instruction", "context", "response"), pair("instruction", "response", "context")),
    "instruction-response": Format(("instruction", "response"), pair("instruction", "response", "input")),
    "self-instruct": Format(("prompt", "completion"), pair("prompt", "completion", end_marker=END_OF_TEXT),
                            _holds("completion", END_OF_TEXT)),
    "prompt-completion": Format(("prompt", "completion"), pair("prompt", "completion")),
    "prompt-response": Format(("prompt", "response"), pair("prompt", "response")),
    "question-answer": Format(("question", "answer"), pair("question", "answer", "context")),
    "input-output": Format(("input", "output"), pair("input", "output")),
    "text": Format(("text",), layouts.whole_text, template="plain"),
    "conversation": Format(("conversation",), turns("conversation")),
    "moss": Format(("chat",), layouts.moss, lambda row: isinstance(row["chat"], list | dict)),
    "moss-text": Format(("plain_text",), layouts.moss_text, _holds("plain_text", "<eoh>")),
    "openai-batch": Format(("custom_id", "body"), layouts.batch, spent=("custom_id", "method", "url")),
}
ALIASES = {"alpaca-clean": "alpaca", "longform": "input-output", "gsm8k": "question-answer"}


def read_conversation(layout: str, row: Values, roles: Roles, turn_fields: dict[str, str] | None = None
                      ) -> Conversation:
    """The conversation of a row.

    Args:
        layout: Name of the row's format.
        row: The row as read; left as it is.
        roles: Names of roles in the file -> system, user, assistant or tool, beside the usual names.
        turn_fields: Fields of a message -> keys of the file's turns, beside the usual keys.

    Raises:
        RowProblem: The row holds none that can be used.
        UserError: The layout is unknown.
    """
    form = find_format(layout)
    reading = Reading(row, roles, turn_fields)
    conversation = Conversation(form.convert(reading))
    if not BESIDE.isdisjoint(reading.values):
        _read_beside(reading, conversation, form)
    if reading.values or reading.unused:
        names = (*(name for name, value in reading.values.items() if not is_blank(value)), *reading.unused)
        conversation.unused = tuple(name for name in names if name.rpartition(".")[2] not in form.spent)
    return conversation


def _read_beside(reading: Reading, conversation: Conversation, form: Format) -> None:
    """Take what rows of any layout may hold beside their turns. Raises RowProblem."""
    values = reading.values
    for column in MEDIA:
        one = column.removesuffix("s")
        is_placed = any(f"<{one}>" in message["content"] for message in conversation.messages)
        if not is_blank(values.get(column)) or (is_placed and not is_blank(values.get(one))):
            raise RowProblem(f"the row holds {column}, which this task cannot show")
    if values.get("kto_tag") in (False, "false", "False"):
        raise RowProblem("kto_tag is false: the answer is one that is not wanted")
    values.pop("kto_tag", None)
    conversation.weight = _weight(values.pop("weight", None))
    if form.template is not None:
        return
    if (system := reading.optional("system")).strip():
        turn: Message = {"role": "system", "content": system}
        if conversation.messages[:1] != [turn]:
            conversation.messages.insert(0, turn)
    for column in ("tools", "functions"):
        conversation.tools += tools.specifications(values.pop(column, None), column)
    settings = values.pop("chat_template_kwargs", None)
    settings = parsed(settings, "chat_template_kwargs") if isinstance(settings, str) and settings else settings
    if not is_blank(settings):
        if not isinstance(settings, dict):
            raise RowProblem("chat_template_kwargs is not an object")
        conversation.template_kwargs = settings
    documents = values.get("documents")
    if isinstance(documents, list) and documents and all(isinstance(item, dict) for item in documents):
        conversation.documents = values.pop("documents")  # what has another form is named as not used
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
