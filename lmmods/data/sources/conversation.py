"""A conversation: what the rows of every layout become, and what templates write."""

from dataclasses import dataclass, field
from typing import Any, TypedDict


class RowProblem(Exception):
    """Why one row cannot be used. The reason is counted in the data report."""


class _Turn(TypedDict):
    role: str
    content: str


class Message(_Turn, total=False):
    """A turn. Roles are system, user, assistant and tool; all else is there only where the row has it.

    Args:
        role: Who speaks.
        content: The text; "" for a turn that only calls tools.
        input: Text that a user's instruction works on, which templates place by themselves.
        reasoning_content: What the assistant thought before it answered.
        tool_calls: The assistant's calls, [{"type": "function", "function": {"name": text, "arguments": an object, or
            text where it is not JSON}, "id": text where the row has one}].
        tool_call_id: The call that a tool answers.
        name: The tool that answers, or a name of the speaker.
        scored: Whether the turn is learned from; True where it is not there.
    """

    input: str
    reasoning_content: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str
    scored: bool


@dataclass
class Conversation:
    """The turns of a row, and what a chat template is given beside them.

    Args:
        messages: The turns in order.
        tools: Specifications of the tools that the assistant may call, [{"type": "function", "function": {...}}].
        documents: Texts that the assistant may use, [{"title": ..., "text": ...}].
        template_kwargs: Variables of the chat template that this row sets, for example {"enable_thinking": False}.
        weight: How much the row counts in the loss, 0 or more.
        unused: Keys of the row, and of its turns as `turns.key`, that hold something and are not read.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    documents: list[dict[str, Any]] = field(default_factory=list)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    unused: tuple[str, ...] = ()
