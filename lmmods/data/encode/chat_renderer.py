"""Render conversations with a tokenizer's own chat template, and find the parts that the assistant wrote.

The template itself shows what the model should learn: the text between its {% generation %} marks, or what a turn adds
to the prompt of inference. Templates such as Qwen3's render earlier turns differently (without their reasoning), so no
single text contains the prompts of all turns. Such a conversation becomes one row per turn.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from lmmods.core.errors import UserError
from lmmods.data.encode.chat_template import BEGIN, END, ChatTemplate, without_marks
from lmmods.data.encode.encoder import TextEncoder
from lmmods.data.encode.templates import RenderedRow, Segment, Turns, only_turn, scored_turns
from lmmods.data.read.conversation import Conversation, Message, RowProblem
from lmmods.data.read.images import IMAGE, images_of

if TYPE_CHECKING:
    from lmmods.data.encode.images import ImageProcessor

PROBE = "\U0010fffd"  # an answer that shares no prefix with real ones
OPENED = re.compile(r"<[^<>]*>")  # a tag that a prompt opens for the answer to close
# An unfinished tag at the end of a text.
IN_TAG = re.compile(r"<[^<>\s]*$")


def is_template_file(template: str | None) -> TypeGuard[str]:
    """Return True if `data.template` is a Jinja file rather than a name."""
    return template is not None and template.endswith((".jinja", ".jinja2", ".j2"))


def read_template_file(path: str) -> str:
    """Read a Jinja file. Raises UserError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.template {path}: the chat template cannot be read ({error}). Use a Jinja file, or the "
                        "name of a template") from error


class ChatTemplateRenderer:
    """Renders with the tokenizer's chat template.

    Args:
        tokenizer: transformers tokenizer with a chat template.
        encoder: Knows the control tokens.
        eos_token: Terminator for templates that write none and have no token that opens turns.
        template_kwargs: Variables of the template, for example {"enable_thinking": False}; a row may set its own.
        images: Processor of a model with images, whose templates get turns as lists of parts.

    Raises:
        UserError: The chat template is not valid Jinja, or a variable has a reserved name.
    """

    separate_responses = False

    def __init__(self, tokenizer, encoder: TextEncoder, eos_token: str,  # noqa: ANN001
                 template_kwargs: dict[str, Any] | None = None, images: "ImageProcessor | None" = None) -> None:
        if reserved := RESERVED & (template_kwargs or {}).keys():
            raise UserError(f"data.chat_template_kwargs sets {', '.join(sorted(reserved))}, which each row sets "
                            "itself. Remove it")
        variables = tokenizer.special_tokens_map
        self._template = ChatTemplate(tokenizer.get_chat_template(), variables)
        with_tools = tokenizer.get_chat_template(tools=[{}])  # some tokenizers have a separate template for tools
        self._tool_template = (self._template if with_tools == self._template.source
                               else ChatTemplate(with_tools, variables))
        self.encoder = encoder
        self.eos_token = eos_token
        self.template_kwargs, self.images = template_kwargs or {}, images
        # A processor lets the tokenizer add its begin token to a text without one, unlike a tokenizer's own template.
        self.begin = tokenizer.bos_token if images and tokenizer("a").input_ids[0] == tokenizer.bos_token_id else None
        self.notes: list[str] = []
        if "strftime_now" in self._template.names:
            self.notes.append("the chat template writes the date: tokens differ from day to day")

    def prompt(self, conversation: Conversation) -> list[Segment]:
        """Return the segments up to the assistant's answer, equal to `apply_chat_template(add_generation_prompt=True)`.

        Raises:
            RowProblem: The template rejects the conversation.
        """
        rendered = _Turns(self, conversation)
        return rendered.segments(rendered.text(len(conversation.messages), True), [], conversation)

    def rows(self, conversation: Conversation, turns: Turns) -> list[RenderedRow]:
        """Return rows that contain the assistant's turns, see Renderer.

        Raises:
            RowProblem: The template rejects the conversation, or does not render a turn of the assistant.
        """
        rendered = _Turns(self, conversation)
        scored = scored_turns(conversation, turns)
        if turns == "all" and (row := rendered.all_turns(scored)):
            return [row]
        return [rendered.one_turn(index) for index in scored]

    def segments_after_call(self, conversation: Conversation, index: int) -> list[Segment]:
        """See Renderer. The arguments of the last call contain `PROBE`."""
        return _Turns(self, conversation).segments_after_call(index)

    @cached_property
    def trailing_text(self) -> str:
        """Text that the template always appends to the conversation, whoever has the last turn.

        Phi-3's appends an end of text, Command A's the start of an answer.
        """
        question: Message = {"role": "user", "content": "a"}
        answer: Message = {"role": "assistant", "content": "b"}
        try:
            rendered = _Turns(self, Conversation([question, answer]))
            texts = [rendered.text(num_turns, False) for num_turns in (1, 2)]
        except RowProblem:  # the template does not support such turns
            return ""
        # The common ending of texts whose last turns have different roles, from its first control token on.
        common = os.path.commonprefix([text[::-1] for text in texts])[::-1]
        tokens = self.encoder.control_pattern
        common = common[match.start():] if (match := tokens.search(common)) else ""
        before = texts[0].removesuffix(common).rstrip()
        # If no control token ends the turn itself, the first of the common ones does, and the rest is appended.
        is_ended = any(token.end() == len(before) for token in tokens.finditer(before))
        return common if is_ended or not common else common[tokens.match(common).end():]  # type: ignore[union-attr]  # `common` starts with one

    @cached_property
    def terminator(self) -> str:
        """Terminator of a last turn that the template leaves open.

        It is the token that would open the next turn, as for all turns before, else the tokenizer's end token.
        """
        question: Message = {"role": "user", "content": "a"}
        answer: Message = {"role": "assistant", "content": PROBE}
        with suppress(RowProblem):
            rendered = _Turns(self, Conversation([question, answer, question]))
            following = rendered.text(3, False).partition(PROBE)[2].lstrip()
            # Templates that omit the answer of a last turn give no evidence.
            if (token := self.encoder.control_pattern.match(following)) and PROBE in rendered.text(2, False):
                return token[0]
        return self.eos_token

    def ends(self) -> list[str]:
        """Control tokens that end turns of the assistant: answers, and tool calls if the template supports them."""
        function = {"name": "a", "description": "a", "parameters": {"type": "object", "properties": {}}}
        call = {"type": "function", "function": {"name": "a", "arguments": {}}, "id": "a12345678"}
        question: Message = {"role": "user", "content": "a"}
        answer: Message = {"role": "assistant", "content": "b"}
        calls: list[Message] = [{"role": "assistant", "content": "", "tool_calls": [call]},
                                {"role": "tool", "content": "c", "name": "a", "tool_call_id": "a12345678"}]
        endings = []
        for conversation in (Conversation([question, answer, question, answer]),
                             Conversation([question, *calls, answer], [{"type": "function", "function": function}])):
            if conversation.tools and "tools" not in self._tool_template.names:
                continue
            with suppress(RowProblem):  # the template does not support such turns
                for row in self.rows(conversation, "all"):
                    # The last part of each response that is not white space: later entries replace earlier ones.
                    ends = {part.response: part for part in row.segments if part.response >= 0 and part.text.strip()}
                    endings += [part.text for part in ends.values() if part.template]
        return list(dict.fromkeys(endings))

    def template_of(self, conversation: Conversation) -> ChatTemplate:
        return self._tool_template if conversation.tools else self._template


class _Span(NamedTuple):
    """Characters [start, end) that the assistant wrote; `closed` is True if a control token ends them."""

    start: int
    end: int
    closed: bool


class _Turns:
    """The turns of a conversation as the template renders them.

    Args:
        renderer: Template and tokens.
        conversation: The whole conversation.
    """

    def __init__(self, renderer: ChatTemplateRenderer, conversation: Conversation) -> None:
        self._renderer, self._control = renderer, renderer.encoder.control_pattern
        self._template = renderer.template_of(conversation)
        self._conversation = conversation
        self._chat = ChatText(conversation, self._template, renderer.encoder, renderer.template_kwargs,
                              in_parts=renderer.images is not None)
        self.text = self._chat.text
        self._image_texts: Iterator[str] = iter(())

    def all_turns(self, scored: list[int]) -> RenderedRow | None:
        """Return one row of all turns, with those at `scored` as targets; None if inference shows one differently.

        Raises:
            RowProblem: The template rejects the conversation, or does not render a turn.
        """
        num_turns = len(self._conversation.messages)
        text, spans = self.text(num_turns, False), self._marked_spans(scored, num_turns)
        if spans is None:
            answers = [self._locate_answer(index) for index in scored]
            # Each turn must be shown exactly as a model that answers there would see and write it.
            if not all(text.startswith(answer[: span.end]) for answer, span in answers):
                return None
            spans = [[self._close(text, span)] for _, span in answers]
        if any(not parts[-1].closed and text[parts[-1].end:].strip() for parts in spans):
            return None  # the terminator added here would be in later prompts, but inference does not show it
        return self._make_row(text, scored, spans, self._conversation)

    def one_turn(self, index: int) -> RenderedRow:
        """Return a row of the turns up to `index`, with only that one as target. Raises RowProblem, see `all_turns`."""
        text, spans = self.text(index + 1, False), self._marked_spans([index], index + 1)
        if spans is None:
            text, span = self._locate_answer(index)
            spans = [[self._close(text, span)]]
        return self._make_row(text, [index], spans, only_turn(self._conversation, index))

    def segments_after_call(self, index: int) -> list[Segment]:
        """See ChatTemplateRenderer.segments_after_call."""
        text, (answer, span) = self.text(len(self._conversation.messages), True), self._locate_answer(index)
        # The end of the turn; templates such as Qwen3's start the last turn differently.
        end = answer[answer.rfind(PROBE) : span.end]
        start = text.rfind(PROBE)
        if PROBE not in end:
            raise RowProblem("the chat template does not render tool calls")
        if not text.startswith(end, start):
            raise RowProblem("the chat template ends a turn differently if others follow")
        span = self._close(text, _Span(start, start + len(end), span.closed))
        tokens = [match[0] for match in self._control.finditer(text, start, span.end)]
        last = tokens[-1] if span.closed else self._renderer.terminator
        return [Segment(last, True, -1), *self._split(text[span.end :], -1)]

    def _make_row(self, text: str, scored: list[int], spans: list[list[_Span]], conversation: Conversation
                  ) -> RenderedRow:
        turns = list(zip(scored, spans, strict=True))
        unshown = [key for index, parts in turns for key in self._find_unshown(index, text, parts)]
        unshown += [key for key in ("tools", "documents")
                    if getattr(conversation, key) and key not in self._template.names]
        unlike = sum(not text[: parts[0].start].startswith(self.text(index, True)) for index, parts in turns)
        return RenderedRow(self.segments(text, spans, conversation), conversation, unshown, unlike)

    def _marked_spans(self, scored: list[int], num_turns: int) -> list[list[_Span]] | None:
        """Return the spans that {% generation %} marks in each target turn; None without marks."""
        if not self._template.has_marks or BEGIN not in (marked := self._chat.marked(num_turns, False)):
            return None
        # Every second part is between marks; `position` counts characters without the marks, as in `text`.
        spans, position = [], 0
        for index, part in enumerate(re.split(f"[{BEGIN}{END}]", marked)):
            if index % 2:
                spans.append((position, position + len(part)))
            position += len(part)
        text = self.text(num_turns, False)
        answers = [turn for turn, message in enumerate(self._conversation.messages[:num_turns])
                   if message["role"] == "assistant"]
        first = {turn: index for index, turn in enumerate(answers)}  # index of each turn's first span
        # A turn may have several spans, or none: count the marks in the text before it.
        if len(spans) != len(answers):
            first = {turn: self._chat.marked(turn, False).count(BEGIN) if turn else 0 for turn in answers}
        after = dict(zip(answers, [*list(first.values())[1:], len(spans)], strict=True))
        return [[self._extend_to_end(text, *span) for span in spans[first[turn]: after[turn]]] for turn in scored]

    def _extend_to_end(self, text: str, start: int, end: int) -> _Span:
        """Return a marked span, extended by a control token that directly follows the mark and ends the turn."""
        # The mark may include the control token that ends the turn, or close before it.
        inner = list(self._control.finditer(text, start, end))
        if inner and not text[inner[-1].end():end].strip():
            return _Span(start, end, True)
        following = self._control.match(text, end)
        return _Span(start, following.end(), True) if following else _Span(start, end, False)

    def _locate_answer(self, index: int) -> tuple[str, _Span]:
        """Return the text of a row that ends in the turn at `index`, and the span of that turn.

        The turn is what it adds to its prompt. Some templates open each answer with <think> in the prompt and omit that
        in turns without reasoning: then the turn starts where the two texts diverge. Others, such as Mistral's, render
        the question differently once it is answered (they omit the system turn): then the turn is appended to the
        prompt of inference.
        """
        prompt, text = self.text(index, True), self.text(index + 1, False)
        # The usual case: the turn adds to its prompt.
        if text.startswith(prompt):
            return text, self._span(text, len(prompt))
        # The question is unchanged, and the texts differ only in how the answer is opened.
        if text.startswith(self.text(index, False).rstrip()):
            start = self._common_length(prompt, text)
            if OPENED.fullmatch(prompt[start:].strip()):
                return text, self._span(text, start)
        else:
            # Texts with different answers diverge where the answer starts.
            start = self._common_length(self._chat.render_answer(index, PROBE), text)
        span = self._span(text, start)
        return prompt + text[start: span.end], _Span(len(prompt), len(prompt) + span.end - start, span.closed)

    def _common_length(self, prompt: str, answered: str) -> int:
        """Return the length of the common prefix, not ending inside a tag or a control token."""
        common = os.path.commonprefix([prompt, answered])
        length = len(IN_TAG.sub("", common))
        return next((token.start() for token in self._control.finditer(answered)
                     if token.start() < length < token.end()), length)

    def _span(self, text: str, start: int) -> _Span:
        """Return the span from `start` to the control token that ends the turn; line breaks after it belong to the next
        prompt."""
        text = text.removesuffix(self._renderer.trailing_text)
        # Only a control token at the very end closes the turn; others, such as those of tool calls, are inside it.
        matches = list(self._control.finditer(text, start))
        if not matches or text[matches[-1].end():].strip():
            return _Span(start, max(start, len(text.rstrip())), False)
        return _Span(start, matches[-1].end(), True)

    def _close(self, text: str, span: _Span) -> _Span:
        """Close a span: without a terminator, as in GLM's template, the token that opens the next turn ends it."""
        space = len(text) - span.end - len(text[span.end:].lstrip())  # white space after the span
        following = None if span.closed else self._control.match(text, span.end + space)
        return _Span(span.start, following.end(), True) if following else span

    def _find_unshown(self, index: int, text: str, spans: list[_Span]) -> list[str]:
        """Return the keys of a target turn that the template omits. Raises RowProblem if nothing is left to learn."""
        message = self._chat.messages[index]
        shown = "".join(text[span.start:span.end] for span in spans)
        # A template without tool support may omit calls silently: the row would teach an empty answer.
        if any(call["function"]["name"] not in shown for call in message.get("tool_calls", ())):
            raise RowProblem("the chat template does not render tool calls")
        if not self._control.sub("", shown).strip():
            raise RowProblem("the chat template does not render the assistant's turn")
        reasoning = self._chat.reasoning[index].strip()
        return ["messages.reasoning_content"] if reasoning not in shown else []

    def segments(self, text: str, turns: list[list[_Span]], conversation: Conversation) -> list[Segment]:
        """Split the text into segments; the spans of the n-th turn get response number n.

        Args:
            conversation: The turns in the text.

        Raises:
            RowProblem: The template or the processor does not render an image.
        """
        segments, position = [], 0
        if images := self._renderer.images:
            texts = images.texts(tuple(picture.size for picture in images_of(conversation.messages)))
            if sum(match[0] == images.token for match in self._control.finditer(text)) != len(texts):
                raise RowProblem("the chat template does not render an image")
            self._image_texts = iter(texts)
            if self._renderer.begin and not text.startswith(self._renderer.begin):
                segments.append(Segment(self._renderer.begin, True, -1))
        for index, spans in enumerate(turns):
            for span in spans:
                segments += self._split(text[position:span.start], -1)
                segments += self._split(text[span.start:span.end], index)
                position = span.end
            # The template left the turn open, so the model would not learn to end it.
            if spans and not spans[-1].closed:
                segments.append(Segment(self._renderer.terminator, True, index))
        return segments + self._split(text[position:], -1)

    def _split(self, text: str, response: int) -> list[Segment]:
        segments = []
        for part in self._renderer.encoder.split_control(text):
            if isinstance(part, int):
                name = self._renderer.encoder.control_names[part]
                is_image = self._renderer.images is not None and name == self._renderer.images.token
                segments.append(Segment(next(self._image_texts) if is_image else name, True, response))
            else:
                # Special tokens that users typed come back, as text.
                for name, character in self._chat.hidden.items():
                    part = part.replace(character, name)
                segments.append(Segment(part, False, response))
        return segments


# ---------------------------------------------------------------------------------------------------------------------
# A conversation, and the texts of its first turns in a chat template.

RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")  # keys that templates read reasoning from


class ChatText:
    """Texts of the first turns of a conversation.

    Special tokens typed by users are replaced by private-use characters during rendering, so that they stay text.

    Args:
        conversation: The whole conversation.
        template: Template that renders it.
        encoder: Knows the control tokens.
        template_kwargs: Variables of the template; the conversation's own take precedence.
        in_parts: The template gets the content of a turn as a list of parts, texts and images.

    Raises:
        RowProblem: The conversation sets a reserved variable.
    """

    def __init__(self, conversation: Conversation, template: ChatTemplate, encoder: TextEncoder,
                 template_kwargs: dict[str, Any], in_parts: bool = False) -> None:
        if reserved := RESERVED & conversation.template_kwargs.keys():
            raise RowProblem(f"chat_template_kwargs sets {sorted(reserved)[0]}, which the row sets itself")
        self._template, self._control, self._in_parts = template, encoder.control_pattern, in_parts
        variables = {**template_kwargs, **conversation.template_kwargs, "tools": conversation.tools or None,
                     "documents": conversation.documents or None}
        messages = [self._turn(message) for message in conversation.messages]
        reasoning = [message.get("reasoning_content", "") for message in conversation.messages]
        hidden_values, self.hidden = self._hide_control((messages, variables, reasoning))
        self.messages, self._variables, self.reasoning = hidden_values
        # By (number of turns, open response): the same text is needed as prompt and as answer.
        self._texts: dict[tuple[int, bool], str] = {}
        self._calls_as_text = False

    def _turn(self, message: Message) -> dict[str, Any]:
        """Return a turn as passed to the template, with reasoning under the keys that the template reads."""
        turn = to_template_turn(message, self._in_parts)
        turn.pop("reasoning_content", None)
        if reasoning := message.get("reasoning_content"):
            source = self._template.source
            turn |= {name: reasoning for name in REASONING_NAMES if re.search(rf"[.'\"]{name}\b", source)}
        return turn

    def _hide_control(self, value: Any) -> tuple[Any, dict[str, str]]:
        pattern = self._control
        all_text = "\0".join(_strings(value))
        if not pattern.search(all_text):
            return value, {}
        # Private-use characters that do not occur in the conversation, so that they can be replaced back.
        free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in all_text)
        names = sorted({match.group() for match in pattern.finditer(all_text)})
        hidden = dict(zip(names, free, strict=False))
        return _map_strings(value, lambda text: pattern.sub(lambda match: hidden[match.group()], text)), hidden

    def text(self, num_turns: int, open_response: bool) -> str:
        """Return the first turns as text. Raises RowProblem if the template rejects them."""
        return without_marks(self.marked(num_turns, open_response))

    def marked(self, num_turns: int, open_response: bool) -> str:
        """Return the text of `text`, with BEGIN and END around what the template marks as generated."""
        key = num_turns, open_response
        if key not in self._texts:
            if not num_turns:
                raise RowProblem("the conversation starts with the assistant")
            self._texts[key] = self._render(self.messages[:num_turns], open_response)
        return self._texts[key]

    def render_answer(self, num_turns: int, answer: str) -> str:
        """Return the first turns and an answer as text."""
        turn = to_template_turn({"role": "assistant", "content": answer}, self._in_parts)
        return without_marks(self._render([*self.messages[:num_turns], turn], False))

    def _render(self, messages: list[dict[str, Any]], open_response: bool) -> str:
        """Render with arguments of calls as objects, or as JSON for templates that reject objects."""
        if not self._calls_as_text:
            try:
                return self._template.render_marked(messages, open_response, **self._variables)
            except RowProblem:
                if not any("tool_calls" in message for message in messages):
                    raise
        text = self._template.render_marked([_with_json_arguments(message) for message in messages], open_response,
                                            **self._variables)
        # From here on for all texts of the conversation, which must agree in form.
        self._calls_as_text = True
        return text


def to_template_turn(message: Message, in_parts: bool = False) -> dict[str, Any]:
    """Convert a turn for `apply_chat_template`, with its input after the instruction.

    Args:
        in_parts: Convert the content to a list of parts, texts and images; see `images.place_images`.
    """
    turn: dict[str, Any] = {key: value for key, value in message.items() if key not in ("input", "scored", "images")}
    if "input" in message:
        turn["content"] += "\n\n" + message["input"]
    if in_parts:
        first, *others = [[{"type": "text", "text": text}] if text else [] for text in turn["content"].split(IMAGE)]
        turn["content"] = first + [part for parts in others for part in ({"type": "image"}, *parts)] or [
            {"type": "text", "text": ""}]
    return turn


def _strings(value: Any) -> Iterator[str]:
    """Return all strings in nested lists and dicts, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to all strings in nested lists and dicts."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


def _with_json_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [{**call, "function": {**call["function"], "arguments": arguments if isinstance(
        arguments := call["function"].get("arguments", {}), str) else json.dumps(arguments, ensure_ascii=False)}}
        for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}
