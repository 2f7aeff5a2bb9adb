"""A named template as Jinja, so that transformers writes conversations as a run's rows were written."""

import json

from lmmods.data.encode.templates import PLACEHOLDER, TemplateRenderer

CONTENT = "message['content']"
FIRST = "messages[0]['content']"
TOOL_TURN = " or message['role'] == 'tool'"
NO_TOOLS = "this template has no place for tools"


def template_jinja(renderer: TemplateRenderer) -> str:
    """The chat template that gives what the renderer gives, for messages whose contents are texts.

    What the renderer refuses raises an exception. Responses with their terminators stand between the marks by which
    transformers tells which tokens the assistant writes (`return_assistant_tokens_mask`).
    """
    template, eos = renderer.template, renderer.eos
    default = template.default_system and _joined(template.system, eos, _quoted(template.default_system))
    lines = [
        _written(_quoted(renderer.bos)) if renderer.bos else "",
        "{%- for message in messages -%}",
        *_raising("message['content'] is not string", "the content of a message is not text"),
        *_raising(f"tools or message['tool_calls']{'' if template.tool else TOOL_TURN}", NO_TOOLS),
        *([f"{{%- if loop.first and message['role'] != 'system' -%}}{_written(default)}{{%- endif -%}}"] if default
          else []),
        "{%- if message['role'] == 'assistant' -%}",
        _written(_quoted(template.response)) if template.response else "",
        f"{{%- generation -%}}{_written(f'{CONTENT} ~ {_quoted(renderer.end)}')}{{%- endgeneration -%}}",
        f"{{%- if not loop.last or add_generation_prompt -%}}{_written(_quoted(template.after))}{{%- endif -%}}"
        if template.after else "",
        "{%- elif message['role'] == 'system' -%}",
        *(_system_in_user() if template.system is None else [_written(_joined(template.system, eos))]),
        "{%- elif message['role'] == 'user' -%}",
        *_user(renderer),
        *(["{%- elif message['role'] == 'tool' -%}", _written(_joined(template.tool, eos))] if template.tool else []),
        "{%- else -%}",
        "{{- raise_exception('the role ' ~ message['role'] ~ ' is unknown') -}}",
        "{%- endif -%}",
        "{%- endfor -%}",
        f"{{%- if add_generation_prompt -%}}{_written(_quoted(template.response))}{{%- endif -%}}"
        if template.response else "",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _user(renderer: TemplateRenderer) -> list[str]:
    template, eos = renderer.template, renderer.eos
    turn = _written(_joined(template.user, eos))
    if template.system is not None:
        return [turn]
    with_system = _joined(template.user.replace("{content}", template.system_in_user), eos)
    return [f"{{%- if loop.index0 == 1 and messages[0]['role'] == 'system' -%}}{_written(with_system)}"
            f"{{%- else -%}}{turn}{{%- endif -%}}"]


def _system_in_user() -> list[str]:
    """A system turn writes nothing: the user turn after it holds its text."""
    return [*_raising("not loop.first", "a system turn in the middle of the conversation"),
            *_raising("loop.last or loop.nextitem['role'] != 'user'", "a system turn without a user turn after it")]


def _raising(condition: str, message: str) -> list[str]:
    return [f"{{%- if {condition} -%}}{{{{- raise_exception({_quoted(message)}) -}}}}{{%- endif -%}}"]


def _joined(layout: str, eos: str, content: str = CONTENT) -> str:
    """A layout as an expression in which the texts stand for their places."""
    places = {"content": content, "system": FIRST}
    pieces = PLACEHOLDER.split(layout.replace("{eos}", eos))
    return " ~ ".join(places[piece] if place % 2 else _quoted(piece) for place, piece in enumerate(pieces) if piece)


def _written(expression: str) -> str:
    return f"{{{{- {expression} -}}}}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
