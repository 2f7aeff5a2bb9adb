"""A conversation and the texts that a chat template makes of its beginnings."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from lmmods.data.encode.chat_template import ChatTemplate, without_marks
from lmmods.data.encode.text_encoder import TextEncoder
from lmmods.data.sources.conversation import Conversation, Message, RowProblem

RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")  # of the key under which templates look for it


class ChatText:
    """Texts of the first turns of a conversation.

    Special tokens typed in it are replaced by private characters while the template runs, so they come out as text.

    Args:
        conversation: All of it.
        template: Writes it.
        encoder: Knows the control tokens.
        template_kwargs: Variables of the template; the conversation's own go before.

    Raises:
        RowProblem: The conversation sets a variable that it may not.
    """

    def __init__(self, conversation: Conversation, template: ChatTemplate, encoder: TextEncoder,
                 template_kwargs: dict[str, Any]) -> None:
        if taken := RESERVED & conversation.template_kwargs.keys():
            raise RowProblem(f"chat_template_kwargs sets {sorted(taken)[0]}, which the row sets itself")
        self._template, self._control = template, encoder.control_pattern
        given = {**template_kwargs, **conversation.template_kwargs, "tools": conversation.tools or None,
                 "documents": conversation.documents or None}
        messages = [self._turn(message) for message in conversation.messages]
        reasoning = [message.get("reasoning_content", "") for message in conversation.messages]
        found, self.hidden = self._hide_control((messages, given, reasoning))
        self.messages, self._given, self.reasoning = found
        self._texts: dict[tuple[int, bool], str] = {}
        self._calls_as_text = False

    def _turn(self, message: Message) -> dict[str, Any]:
        """What the template is given of a turn; reasoning under the name by which the template looks for it."""
        turn = as_given(message)
        turn.pop("reasoning_content", None)
        if reasoning := message.get("reasoning_content"):
            source = self._template.source
            turn |= {name: reasoning for name in REASONING_NAMES if re.search(rf"[.'\"]{name}\b", source)}
        return turn

    def _hide_control(self, value: Any) -> tuple[Any, dict[str, str]]:
        pattern = self._control
        everything = "\0".join(_strings(value))
        if not pattern.search(everything):
            return value, {}
        free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in everything)
        names = sorted({match.group() for match in pattern.finditer(everything)})
        hidden = dict(zip(names, free, strict=False))
        return _mapped(value, lambda text: pattern.sub(lambda match: hidden[match.group()], text)), hidden

    def text(self, num_turns: int, open_response: bool) -> str:
        """The first turns as text. Raises RowProblem where the template refuses them."""
        return without_marks(self.marked(num_turns, open_response))

    def marked(self, num_turns: int, open_response: bool) -> str:
        """The same with BEGIN and END around what the template marks as generated."""
        key = num_turns, open_response
        if key not in self._texts:
            if not num_turns:
                raise RowProblem("the conversation begins with the assistant")
            self._texts[key] = self._written(self.messages[:num_turns], open_response)
        return self._texts[key]

    def answered_by(self, num_turns: int, answer: str) -> str:
        """The first turns and an answer as text."""
        return without_marks(self._written([*self.messages[:num_turns], {"role": "assistant", "content": answer}],
                                           False))

    def _written(self, messages: list[dict[str, Any]], open_response: bool) -> str:
        """Arguments of calls are objects; JSON where the template refuses them, as one that joins them to text does."""
        if not self._calls_as_text:
            try:
                return self._template.render_marked(messages, open_response, **self._given)
            except RowProblem:
                if not any("tool_calls" in message for message in messages):
                    raise
        text = self._template.render_marked([_with_json_arguments(message) for message in messages], open_response,
                                     **self._given)
        self._calls_as_text = True
        return text


def as_given(message: Message) -> dict[str, Any]:
    """A turn as `apply_chat_template` takes it: an input stands below its instruction."""
    turn: dict[str, Any] = {key: value for key, value in message.items() if key not in ("input", "scored")}
    if "input" in message:
        turn["content"] += "\n\n" + message["input"]
    return turn


def _strings(value: Any) -> Iterator[str]:
    """All texts in lists and objects, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The same with all texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value


def _with_json_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [{**call, "function": {**call["function"], "arguments": arguments if isinstance(
        arguments := call["function"].get("arguments", {}), str) else json.dumps(arguments, ensure_ascii=False)}}
        for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}
