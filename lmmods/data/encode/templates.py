"""Rendering of conversations by named templates, which are data; chat_renderer.py uses a tokenizer's own template.

A renderer returns segments. Special tokens are recognised in `template` segments only. The response number (0, 1, ...
or -1 in prompts) marks what a model is trained to write, including its terminator.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

from lmmods.core.errors import UserError
from lmmods.data.encode.encoder import TextEncoder
from lmmods.data.read.conversation import Conversation, Message, RowProblem


class Segment(NamedTuple):
    """A part of a rendered row."""

    text: str
    template: bool
    response: int


class RenderedRow(NamedTuple):
    """One row of a conversation.

    Args:
        segments: Its text.
        conversation: The turns in it, with `scored` as for this row.
        unshown: Keys that the conversation fills and the template does not render.
        unlike_inference: Number of learned responses that do not follow the prompt of inference.
    """

    segments: list[Segment]
    conversation: Conversation
    unshown: list[str]
    unlike_inference: int = 0


Turns = Literal["all", "last", "split"]


def only_turn(conversation: Conversation, turn: int) -> Conversation:
    """Return the conversation up to the turn at `turn`, with only that turn as target."""
    messages: list[Message] = [
        {**message, "scored": False} if message["role"] == "assistant" and index < turn else message
        for index, message in enumerate(conversation.messages[: turn + 1])]
    return replace(conversation, messages=messages)


class Renderer(Protocol):
    """Converts conversations to segments.

    Args:
        separate_responses: True if responses are encoded as separate texts.
        notes: Notes on the template for the report.
    """

    separate_responses: bool
    notes: list[str]

    def prompt(self, conversation: Conversation) -> list[Segment]:
        """Return the conversation up to the model's answer. Raises RowProblem."""
        ...

    def segments_after_call(self, conversation: Conversation, index: int) -> list[Segment]:
        """Return the token that ends the assistant's turn at `index`, which calls tools, and all up to its next answer.

        Raises RowProblem.
        """
        ...

    def rows(self, conversation: Conversation, turns: Turns) -> list[RenderedRow]:
        """Rows that end in turns of the assistant and contain them as inference would show them. Raises RowProblem.

        Args:
            conversation: Ends in a turn of the assistant. Turns with `scored` False are not targets.
            turns: `all` is one row if it shows all target turns as inference would, else, like `split`, one row for
                each of them; `last` is one row for the last.
        """
        ...

    def ends(self) -> list[str]:
        """Control tokens that end a turn of the assistant."""
        ...


def scored_turns(conversation: Conversation, turns: Turns) -> list[int]:
    """Return the positions of the turns to learn."""
    indices = [index for index, message in enumerate(conversation.messages)
               if message["role"] == "assistant" and message.get("scored", True)]
    return indices[-1:] if turns == "last" else indices


@dataclass(frozen=True)
class Template:
    """A chat layout. {content} and {input} are replaced by texts, {bos} and {eos} by the tokenizer's tokens.

    Args:
        user: One user turn.
        user_with_input: One user turn with an input; None puts the input after the instruction.
        response: Opening of a response: the generation prompt.
        end: Terminator of a response.
        after: Text between a response and the next turn.
        system: The system turn; None puts the system text into the first user turn by `system_in_user`.
        system_in_user: Content of the first user turn if there is a system text and no system turn.
        tool: A tool's answer; None if unsupported.
        default_system: System text if the conversation has no system turn.
        default_system_with_input: The same if the first user turn has an input; None means the same text.
        separate_responses: Start with the begin token if the tokenizer has one, and encode each response as a separate
            text, which some tokenizers start with a space.
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
    separate_responses: bool = False


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
# The rows of qlora.py (Dettmers et al. 2023): alpaca's prompt ends in a space, other datasets have no prompt text.
TEMPLATES["qlora-alpaca"] = replace(TEMPLATES["alpaca"], response="### Response: ", separate_responses=True)
TEMPLATES["qlora-plain"] = replace(TEMPLATES["plain"], separate_responses=True)
PLACEHOLDER = re.compile(r"\{(content|input|system)\}")


class TemplateRenderer:
    """Renders with a named template.

    Args:
        name: A key of TEMPLATES.
        encoder: Knows the control tokens of the vocabulary.
        eos_token: Text of the tokenizer's end token.
        bos_token: Text of its begin token, if it uses one.

    Raises:
        UserError: The template is unknown.
    """

    def __init__(self, name: str, encoder: TextEncoder, eos_token: str, bos_token: str | None) -> None:
        if name not in TEMPLATES:
            raise UserError(f"data.template {name!r} is unknown. Use one of {', '.join(TEMPLATES)}")
        self.name, self.template = name, TEMPLATES[name]
        self.separate_responses = self.template.separate_responses
        self.bos = bos_token if encoder.uses_bos or self.separate_responses else None
        self.eos = eos_token
        end = self.template.end.replace("{eos}", eos_token)
        self.notes: list[str] = []
        # As plain text it would be several tokens, on which generation could not stop.
        if end not in encoder.control:
            self.notes.append(f"template {name}: {end} is not a token of this tokenizer, responses end in {eos_token} "
                              "instead (data.add_tokens can add it)")
            end = eos_token
        self.end = end

    def prompt(self, conversation: Conversation) -> list[Segment]:
        """See Renderer."""
        return [*self._segments(self._plain(conversation), True), Segment(self.template.response, True, -1)]

    def segments_after_call(self, conversation: Conversation, index: int) -> list[Segment]:
        """See Renderer; no named template has calls."""
        return self.prompt(conversation)

    def rows(self, conversation: Conversation, turns: Turns) -> list[RenderedRow]:
        """See Renderer; earlier turns are rendered the same in all rows."""
        rows = [conversation]
        if turns != "all":
            rows = [only_turn(conversation, index) for index in scored_turns(conversation, turns)]
        return [RenderedRow(self._segments(self._plain(row), False), row, self._unshown(row)) for row in rows]

    def _unshown(self, conversation: Conversation) -> list[str]:
        keys = ["messages.reasoning_content" for message in conversation.messages
                if "reasoning_content" in message and message.get("scored", True)]
        return [*keys, "documents"] if conversation.documents else keys

    def ends(self) -> list[str]:
        """See Renderer."""
        return [self.end]

    def _plain(self, conversation: Conversation) -> list[Message]:
        """Return the turns. Raises RowProblem if the template does not support them."""
        messages = conversation.messages
        if conversation.tools or any("tool_calls" in message for message in messages):
            raise RowProblem(f"template {self.name} does not support tools, and no named template does. Use a "
                             "tokenizer whose chat template supports tools and remove data.template, or set it to a "
                             "Jinja file")
        if not self.template.tool and any(message["role"] == "tool" for message in messages):
            able = [name for name, template in TEMPLATES.items() if template.tool]
            raise RowProblem(f"template {self.name} does not support tool answers. Use data.template "
                             f"{' or '.join(able)}, or a tokenizer whose chat template supports tools")
        return messages

    def _segments(self, messages: list[Message], continues: bool) -> list[Segment]:
        template = self.template
        segments = [Segment(self.bos, True, -1)] if self.bos else []
        messages = self._with_system(messages)
        index = 0
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                segments += self._turn(message)
                continue
            # Turns that are not targets are like a prompt; indices count only targets.
            turn = index if (scored := message.get("scored", True)) else -1
            # The opening belongs to the prompt, as inference writes it; the terminator is a target.
            segments += [Segment(template.response, True, -1), Segment(message["content"], False, turn),
                         Segment(self.end, True, turn)]
            # Nothing follows the last terminator, where generation ends.
            if position + 1 < len(messages) or continues:
                segments.append(Segment(template.after, True, -1))
            index += scored
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
        # Without a system turn in the layout, `_turn` puts the text into the first user turn.
        user: Any = {**rest[0], "system": first["content"]}
        return [user, *rest[1:]]

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

    def _fill(self, layout: str, message: Mapping[str, Any]) -> list[Segment]:
        """Insert texts as separate segments, never into a string that is parsed again."""
        # Every second piece names a placeholder. Its text is not a template, so control tokens in it stay text.
        parts = PLACEHOLDER.split(layout.replace("{eos}", self.eos))
        return [Segment(message[part], False, -1) if index % 2 else Segment(part, True, -1)
                for index, part in enumerate(parts) if part]


# ---------------------------------------------------------------------------------------------------------------------
# A named template as Jinja, so that transformers renders conversations like the rows of a run.

CONTENT = "message['content']"
FIRST = "messages[0]['content']"
TOOL_TURN = " or message['role'] == 'tool'"
NO_TOOLS = "this template has no place for tools"


def template_jinja(renderer: TemplateRenderer) -> str:
    """Return a Jinja chat template equivalent to the renderer, for messages whose contents are texts.

    It raises an exception for whatever the renderer rejects. Responses with their terminators are inside the marks from
    which transformers knows the assistant's tokens (`return_assistant_tokens_mask`).
    """
    template, eos = renderer.template, renderer.eos
    default = template.default_system and template.system and _as_expression(
        template.system, eos, _quote(template.default_system))
    # Every tag strips the white space around it, so that the line breaks below are not part of the text.
    lines = [
        _write(_quote(renderer.bos)) if renderer.bos else "",
        "{%- for message in messages -%}",
        *_raising("message['content'] is not string", "the content of a message is not text"),
        *_raising(f"tools or message['tool_calls']{'' if template.tool else TOOL_TURN}", NO_TOOLS),
        *([f"{{%- if loop.first and message['role'] != 'system' -%}}{_write(default)}{{%- endif -%}}"] if default
          else []),
        "{%- if message['role'] == 'assistant' -%}",
        _write(_quote(template.response)) if template.response else "",
        f"{{%- generation -%}}{_write(f'{CONTENT} ~ {_quote(renderer.end)}')}{{%- endgeneration -%}}",
        f"{{%- if not loop.last or add_generation_prompt -%}}{_write(_quote(template.after))}{{%- endif -%}}"
        if template.after else "",
        "{%- elif message['role'] == 'system' -%}",
        *(_system_in_user() if template.system is None else [_write(_as_expression(template.system, eos))]),
        "{%- elif message['role'] == 'user' -%}",
        *_user(renderer),
        *(["{%- elif message['role'] == 'tool' -%}",
           _write(_as_expression(template.tool, eos))] if template.tool else []),
        "{%- else -%}",
        "{{- raise_exception('the role ' ~ message['role'] ~ ' is unknown') -}}",
        "{%- endif -%}",
        "{%- endfor -%}",
        f"{{%- if add_generation_prompt -%}}{_write(_quote(template.response))}{{%- endif -%}}"
        if template.response else "",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _user(renderer: TemplateRenderer) -> list[str]:
    template, eos = renderer.template, renderer.eos
    turn = _write(_as_expression(template.user, eos))
    if template.system is not None:
        return [turn]
    # The turn right after the system turn also shows its text.
    with_system = _as_expression(template.user.replace("{content}", template.system_in_user), eos)
    return [f"{{%- if loop.index0 == 1 and messages[0]['role'] == 'system' -%}}{_write(with_system)}"
            f"{{%- else -%}}{turn}{{%- endif -%}}"]


def _system_in_user() -> list[str]:
    """A system turn renders nothing: the user turn after it contains its text."""
    return [*_raising("not loop.first", "a system turn in the middle of the conversation"),
            *_raising("loop.last or loop.nextitem['role'] != 'user'", "a system turn without a user turn after it")]


def _raising(condition: str, message: str) -> list[str]:
    return [f"{{%- if {condition} -%}}{{{{- raise_exception({_quote(message)}) -}}}}{{%- endif -%}}"]


def _as_expression(layout: str, eos: str, content: str = CONTENT) -> str:
    """Return a layout as a Jinja expression, with its placeholders replaced by variables."""
    variables = {"content": content, "system": FIRST}
    parts = PLACEHOLDER.split(layout.replace("{eos}", eos))
    return " ~ ".join(variables[part] if index % 2 else _quote(part) for index, part in enumerate(parts) if part)


def _write(expression: str) -> str:
    return f"{{{{- {expression} -}}}}"


def _quote(text: str) -> str:
    # JSON's escapes are valid in Jinja's string literals, too.
    return json.dumps(text, ensure_ascii=False)
