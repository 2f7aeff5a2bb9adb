"""The conversation, into which rows of every layout are converted and which templates render."""

from dataclasses import dataclass, field
from typing import Any, TypedDict


class RowProblem(Exception):
    """Reason why one row cannot be used, counted in the data report."""


class _Turn(TypedDict):
    role: str
    content: str


class Message(_Turn, total=False):
    """A turn. Roles are system, user, assistant and tool; the other keys exist only if the row has them.

    Args:
        role: Role of the speaker.
        content: The text; "" for a turn that only calls tools.
        input: Text that a user's instruction applies to, which templates place separately.
        reasoning_content: The assistant's reasoning before its answer.
        tool_calls: The assistant's calls, [{"type": "function", "function": {"name": text, "arguments": an object, or
            text if it is not JSON}, "id": text if the row has one}].
        tool_call_id: The call that a tool answers.
        name: The tool that answers, or a name of the speaker.
        scored: True (the default) if the turn's tokens are targets.
        images: Images whose places the content marks, for tasks that read them; see `images.place_images`.
    """

    input: str
    reasoning_content: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str
    scored: bool
    images: list[Any]


@dataclass
class Conversation:
    """The turns of a row, and further inputs of a chat template.

    Args:
        messages: The turns in order.
        tools: Specifications of the tools that the assistant may call, [{"type": "function", "function": {...}}].
        documents: Texts that the assistant may use, [{"title": ..., "text": ...}].
        template_kwargs: Variables of the chat template that this row sets, for example {"enable_thinking": False}.
        weight: Weight of the row in the loss, 0 or more.
        unused: Non-empty keys of the row, and of its turns as `turns.key`, that are not read.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    documents: list[dict[str, Any]] = field(default_factory=list)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    unused: tuple[str, ...] = ()
