"""Conversation to text: named templates as data, and the tokenizer's own chat template.

A renderer gives segments. In a `template` segment special tokens are recognised, in others never. The response number
(0, 1, ... or -1 in prompts) marks what a model is trained to write, its terminator included.
"""

import re
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from lmmods.core.errors import UserError
from lmmods.data.encode.chat_template import ChatTemplate
from lmmods.data.encode.text_encoder import TextEncoder
from lmmods.data.sources.conversation import Message, RowProblem


class Segment(NamedTuple):
    """A stretch of a rendered row."""

    text: str
    template: bool
    response: int


class Renderer(Protocol):
    """Messages to segments. With `open_response`, the row ends where the model is to answer.

    Args:
        apart: Whether responses are encoded as texts of their own.
    """

    apart: bool

    def render(self, messages: list[Message], open_response: bool = False) -> list[Segment]: ...


@dataclass(frozen=True)
class Template:
    """A chat layout. {content} and {input} stand for texts, {bos} and {eos} for the tokenizer's tokens.

    Args:
        user: One user turn.
        user_with_input: One user turn with an input; None puts the input below the instruction.
        response: What opens a response: the generation prompt.
        end: Terminator of a response.
        after: Between a response and the next turn.
        system: The system turn; None puts the system text into the first user turn by `system_in_user`.
        system_in_user: First user turn's content when there is a system text and no system turn.
        tool: A tool's answer; None makes it a user turn.
        default_system: Rendered in front when the conversation has no system turn.
        default_system_with_input: The same when the first user turn has an input; None means the same text.
        apart: The begin token stands in front with any tokenizer that has one, and a response is encoded as a text of
            its own, before which some tokenizers put a space.
    """

    user: str
    response: str
    user_with_input: str | None = None
    end: str = "{eos}"
    after: str = ""
    system: str | None = None
    system_in_user: str = "{system}\n\n{content}"
    tool: str | None = None
    default_system: str | None = None
    default_system_with_input: str | None = None
    apart: bool = False


ALPACA_START = "Below is an instruction that describes a task"
TEMPLATES: dict[str, Template] = {
    "alpaca": Template(
        system="{content}\n\n",
        default_system=f"{ALPACA_START}. Write a response that appropriately completes the request.",
        default_system_with_input=f"{ALPACA_START}, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.",
        user="### Instruction:\n{content}\n\n",
        user_with_input="### Instruction:\n{content}\n\n### Input:\n{input}\n\n",
        response="### Response:",
        after="\n\n",
    ),
    "chatml": Template(
        system="<|im_start|>system\n{content}<|im_end|>\n",
        user="<|im_start|>user\n{content}<|im_end|>\n",
        tool="<|im_start|>tool\n{content}<|im_end|>\n",
        response="<|im_start|>assistant\n",
        end="<|im_end|>",
        after="\n",
    ),
    "llama2": Template(
        system_in_user="<<SYS>>\n{system}\n<</SYS>>\n\n{content}",
        user="[INST] {content} [/INST]",
        response=" ",
    ),
    "llama3": Template(
        system="<|start_header_id|>system<|end_header_id|>\n\n{content}<|eot_id|>",
        user="<|start_header_id|>user<|end_header_id|>\n\n{content}<|eot_id|>",
        tool="<|start_header_id|>ipython<|end_header_id|>\n\n{content}<|eot_id|>",
        response="<|start_header_id|>assistant<|end_header_id|>\n\n",
        end="<|eot_id|>",
    ),
    "mistral": Template(user="[INST] {content} [/INST]", response=" "),
    "gemma": Template(
        user="<start_of_turn>user\n{content}<end_of_turn>\n",
        response="<start_of_turn>model\n",
        end="<end_of_turn>",
        after="\n",
    ),
    "vicuna": Template(
        system="{content} ",
        default_system="A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions.",
        user="USER: {content} ",
        response="ASSISTANT: ",
    ),
    "zephyr": Template(
        system="<|system|>\n{content}{eos}\n",
        user="<|user|>\n{content}{eos}\n",
        response="<|assistant|>\n",
        after="\n",
    ),
    "plain": Template(system="{content}", user="{content}", response=""),
}
# As qlora.py writes its rows (Dettmers et al. 2023): alpaca's prompt ends in a space, other sets have none.
TEMPLATES["qlora-alpaca"] = replace(TEMPLATES["alpaca"], response="### Response: ", apart=True)
TEMPLATES["qlora-plain"] = replace(TEMPLATES["plain"], apart=True)
PLACEHOLDER = re.compile(r"\{(content|input|system)\}")


class TemplateRenderer:
    """Renders with a named template.

    Args:
        name: A key of TEMPLATES.
        encoder: Tells which control tokens the vocabulary holds.
        eos_token: Text of the tokenizer's end token.
        bos_token: Text of its begin token where it uses one.

    Raises:
        UserError: The template is unknown.
    """

    def __init__(self, name: str, encoder: TextEncoder, eos_token: str, bos_token: str | None) -> None:
        if name not in TEMPLATES:
            raise UserError(f"data.template {name!r} is unknown; known are {', '.join(TEMPLATES)}")
        self.template = TEMPLATES[name]
        self.apart = self.template.apart
        self._bos = bos_token if encoder.uses_bos or self.apart else None
        self._eos = eos_token
        end = self.template.end.replace("{eos}", eos_token)
        self.notes: list[str] = []
        if end not in encoder.control:
            self.notes.append(f"template {name}: {end} is no token of this tokenizer, responses end in {eos_token} "
                              "instead (data.add_tokens can add it)")
            end = eos_token
        self.end = end

    def render(self, messages: list[Message], open_response: bool = False) -> list[Segment]:
        """Segments of a conversation. Raises RowProblem where a turn does not fit the template."""
        template = self.template
        segments = [Segment(self._bos, True, -1)] if self._bos else []
        messages = self._with_system(messages)
        number = 0
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                segments += self._turn(message)
                continue
            segments += [Segment(template.response, True, -1), Segment(message["content"], False, number),
                         Segment(self.end, True, number)]
            if position + 1 < len(messages) or open_response:
                segments.append(Segment(template.after, True, -1))
            number += 1
        if open_response:
            segments.append(Segment(template.response, True, -1))
        return segments

    def _with_system(self, messages: list[Message]) -> list[Message]:
        template = self.template
        first, rest = messages[0], messages[1:]
        if first["role"] != "system":
            default = template.default_system
            if "input" in first and template.default_system_with_input:
                default = template.default_system_with_input
            return [{"role": "system", "content": default}, *messages] if default else messages
        if template.system is not None:
            return messages
        if not rest or rest[0]["role"] != "user":
            raise RowProblem("a system turn without a user turn after it")
        return [{**rest[0], "system": first["content"]}, *rest[1:]]

    def _turn(self, message: Message) -> list[Segment]:
        template = self.template
        if message["role"] == "system":
            if template.system is None:
                raise RowProblem("a system turn in the middle of the conversation")
            return self._fill(template.system, message)
        layout = template.user
        if message["role"] == "tool" and template.tool:
            layout = template.tool
        if "input" in message:
            layout = template.user_with_input or layout.replace("{content}", "{content}\n\n{input}")
        if "system" in message:
            layout = layout.replace("{content}", template.system_in_user)
        return self._fill(layout, message)

    def _fill(self, layout: str, message: Message) -> list[Segment]:
        """Texts are put beside the template's pieces, never into a string that is parsed again."""
        pieces = PLACEHOLDER.split(layout.replace("{eos}", self._eos))
        return [Segment(message[piece], False, -1) if place % 2 else Segment(piece, True, -1)
                for place, piece in enumerate(pieces) if piece]


class ChatTemplateRenderer:
    """Renders with the chat template that the tokenizer carries.

    Responses are found as what rendering a turn adds to the prompt that opens it. Special tokens typed in a message are
    replaced by private characters while the template runs, so that they come out as text.

    Args:
        tokenizer: transformers tokenizer with a chat template.
        encoder: Knows the control tokens.
        eos_token: Terminator for templates that write none.

    Raises:
        UserError: The chat template is no Jinja.
    """

    apart = False

    def __init__(self, tokenizer, encoder: TextEncoder, eos_token: str) -> None:
        self._template = ChatTemplate(tokenizer.get_chat_template(), tokenizer.special_tokens_map)
        self._encoder = encoder
        self._eos = eos_token
        self.notes: list[str] = []

    def render(self, messages: list[Message], open_response: bool = False) -> list[Segment]:
        """Segments of a conversation. Raises RowProblem where the template refuses it or rewrites earlier turns."""
        masked, hidden = self._hide_control([_join_input(message) for message in messages])
        text = self._apply(masked, open_response)
        segments: list[Segment] = []
        at = 0
        responses = [place for place, message in enumerate(masked) if message["role"] == "assistant"]
        for number, place in enumerate(responses):
            prompt, answered = self._apply(masked[:place], True), self._apply(masked[: place + 1], False)
            answered = answered if text.startswith(answered) else answered.rstrip()
            if not (text.startswith(answered) and answered.startswith(prompt)):
                raise RowProblem("the chat template writes earlier turns differently (use data.template)")
            segments += self._segments(text[at : len(prompt)], hidden, -1)
            segments += self._response(text[len(prompt) : len(answered)], hidden, number)
            at = len(answered)
        return segments + self._segments(text[at:], hidden, -1)

    def _apply(self, messages: list[Message], open_response: bool) -> str:
        if not messages:
            raise RowProblem("the conversation begins with the assistant")
        return self._template.render(messages, open_response)

    def _hide_control(self, messages: list[Message]) -> tuple[list[Message], dict[str, str]]:
        pattern = self._encoder.control_pattern
        if not any(pattern.search(message["content"]) for message in messages):
            return messages, {}
        everything = "".join(message["content"] for message in messages)
        free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in everything)
        names = sorted({match.group() for match in pattern.finditer(everything)})
        hidden = dict(zip(names, free, strict=False))
        cover = lambda text: pattern.sub(lambda match: hidden[match.group()], text)  # noqa: E731
        return [{**message, "content": cover(message["content"])} for message in messages], hidden

    def _segments(self, text: str, hidden: dict[str, str], response: int) -> list[Segment]:
        segments = []
        for part in self._encoder.split_control(text):
            if isinstance(part, int):
                name = next(name for name, number in self._encoder.control.items() if number == part)
                segments.append(Segment(name, True, response))
            else:
                for name, character in hidden.items():
                    part = part.replace(character, name)
                segments.append(Segment(part, False, response))
        return segments

    def _response(self, text: str, hidden: dict[str, str], number: int) -> list[Segment]:
        """The response up to its last control token is learned; line breaks behind it belong to the next prompt."""
        segments = self._segments(text, hidden, number)
        ends = [place for place, segment in enumerate(segments) if segment.template]
        if ends and not "".join(segment.text for segment in segments[ends[-1] + 1 :]).strip():
            last = ends[-1]
            return segments[: last + 1] + [segment._replace(response=-1) for segment in segments[last + 1 :]]
        return [*segments, Segment(self._eos, True, number)]


def _join_input(message: Message) -> Message:
    content = message["content"] + ("\n\n" + message["input"] if "input" in message else "")
    return {"role": message["role"], "content": content}
