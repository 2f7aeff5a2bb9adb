"""What the rows of single layouts become. Each converter takes what it knows out of a row and returns its messages."""

import re
from collections.abc import Callable
from typing import Any

from lmmods.data.sources.cells import Values, as_text, parsed
from lmmods.data.sources.conversation import Message, RowProblem
from lmmods.data.sources.turns import Reading, in_order

Converter = Callable[[Reading], list[Message]]
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


def pair(prompt: str, response: str, context: str | None = None, end_marker: str = "") -> Converter:
    """Converter of rows that hold a prompt and a response: texts, or lists of turns, as TRL has them.

    A row without response becomes a prompt alone. A `history` of [question, answer] pairs, as LLaMA-Factory has it,
    comes first.
    """

    def convert(row: Reading) -> list[Message]:
        messages = row.said(prompt, "user")
        if context and (text := row.optional(context)).strip():
            messages[-1]["input"] = text
        if "history" in row.values:
            messages = _history(row) + messages
        if row.values.get(response) is None:
            return messages
        answer = row.said(response, "assistant")
        if end_marker:
            answer[-1]["content"] = answer[-1]["content"].removesuffix(end_marker)
        return messages + answer

    return convert


def _history(row: Reading) -> list[Message]:
    history = row.values["history"]
    if not isinstance(history, list):
        return []  # of another meaning; it is named as not used
    row.values.pop("history")
    messages: list[Message] = []
    for exchange in history:
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise RowProblem("history is not a list of [question, answer]")
        question, answer = (as_text(text, "history") for text in exchange)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def turns(column: str) -> Converter:
    """Converter of rows that hold a list of turns; a `chosen` beside it is the answer to them."""

    def convert(row: Reading) -> list[Message]:
        messages = row.turns(column)
        if row.values.get("chosen") and messages[-1]["role"] != "assistant":
            answer = row.said("chosen", "assistant")
            return messages + answer if answer[0]["role"] == "assistant" else answer
        return messages

    return convert


def marked(column: str, user: str, assistant: str) -> Converter:
    """Converter of rows that hold a whole conversation as one text with a marker before each turn."""
    return lambda row: _transcript(row.text(column), column, user, assistant)


def _transcript(text: str, column: str, user: str, assistant: str) -> list[Message]:
    head, *parts = re.split(f"({re.escape(user)}|{re.escape(assistant)})", text)
    if not parts:
        raise RowProblem(f"{column} has no {user!r} or {assistant!r} in it")
    messages: list[Message] = [{"role": "system", "content": head.strip()}] if head.strip() else []
    for name, content in zip(parts[::2], parts[1::2], strict=True):
        messages.append({"role": "user" if name == user else "assistant", "content": content.strip()})
    return messages


def whole_text(row: Reading) -> list[Message]:
    """The text of a row, all of it scored."""
    return [{"role": "assistant", "content": row.text("text")}]


def preferred(row: Reading) -> list[Message]:
    """hh-rlhf and its kin: the chosen conversation, or the chosen answer to the prompt in another column."""
    chosen = row.values.get("chosen")
    asked = next((name for name in ("prompt", "instruction", "question") if row.values.get(name) is not None), None)
    answer = row.turns("chosen") if isinstance(chosen, list) else []
    if asked is None:
        return answer or marked("chosen", HUMAN, ASSISTANT)(row)
    prompt = row.values[asked]
    if isinstance(chosen, str) and chosen.startswith(HUMAN):
        return marked("chosen", HUMAN, ASSISTANT)(row)
    if isinstance(chosen, str) and isinstance(prompt, str) and prompt.startswith(HUMAN):
        return _transcript(row.text(asked) + row.text("chosen"), asked, HUMAN, ASSISTANT)
    if answer and answer[0]["role"] != "assistant":
        if any(message["content"] == prompt for message in answer):
            row.values.pop(asked)  # it stands in the conversation
        before = row.turns(asked) if isinstance(prompt, list) else []
        return answer if answer[: len(before)] == before else before + answer
    return pair(asked, "chosen", "input" if asked == "instruction" else None)(row) + answer


# MOSS

SPEAKER_MARK = re.compile(r"^(?:<\|[\w ]+\|>|\[\w+\]):")
END_MARK = re.compile(r"<eo[a-z]>$")
COMMAND = re.compile(r'(\w+)\(((?:"(?:[^"\\]|\\.)*"|[^()"])*)\)(?:\s*,\s*|\s*$)')


def moss(row: Reading) -> list[Message]:
    """moss-003: {"turn_1": {"Human", "Inner Thoughts", "Commands", "Tool Responses", "MOSS"}, ...}, with marks."""
    chat = row.values.pop("chat", None)
    exchanges = in_order(chat) if isinstance(chat, dict) else chat
    if isinstance(exchanges, list):
        exchanges = [part for turn in exchanges for part in (_moss_turns(turn) if isinstance(turn, dict) else [turn])]
    return _moss_system(row, "meta_instruction") + row.messages(exchanges, "chat")


def _moss_turns(turn: Values) -> list[Values]:
    """Turns of one exchange: the question, the call of a tool and what it gave, the answer."""
    if "MOSS" not in turn and "Human" not in turn:
        return [turn]
    turn = dict(turn)
    keys = ("Human", "Inner Thoughts", "Commands", "Tool Responses", "MOSS")
    human, thoughts, commands, results, answer = (_unmarked(turn.pop(key, None), key) for key in keys)
    said: list[Values] = [{"role": "user", "content": human}]
    if commands:
        said.append({"role": "assistant", "reasoning_content": thoughts, **_called(commands)})
        thoughts = None
    if results:
        said.append({"role": "tool", "content": results})
    if answer is not None:
        said.append({"role": "assistant", "content": answer, "reasoning_content": thoughts})
    return [*said[:-1], {**turn, **said[-1]}]


def _unmarked(value: Any, key: str) -> str | None:
    if value is None:
        return None
    text = SPEAKER_MARK.sub("", END_MARK.sub("", as_text(value, f"chat.{key}").strip())).strip()
    return None if text == "None" and key not in ("Human", "MOSS") else text


def _called(commands: str) -> Values:
    """Calls of commands like `Search("x"), Calculate("1+1")`; text of another form stays text."""
    calls, at = [], 0
    while at < len(commands):
        found = COMMAND.match(commands, at)
        if found is None:
            return {"content": commands}
        calls.append({"name": found.group(1), "arguments": found.group(2)})
        at = found.end()
    return {"tool_calls": calls}


def moss_text(row: Reading) -> list[Message]:
    """moss-002: one text in which <eoh> ends what the human says and <eoa> what the assistant does."""
    *pieces, rest = re.split(r"<(eo[a-z])>", row.text("plain_text"))
    if rest.strip() or not pieces:
        raise RowProblem("plain_text does not end in <eoh> or <eoa>")
    messages: list[Message] = [
        {"role": "user" if mark == "eoh" else "assistant", "content": SPEAKER_MARK.sub("", text.strip()).strip()}
        for text, mark in zip(pieces[::2], pieces[1::2], strict=True)]
    return _moss_system(row, "prefix") + messages


def _moss_system(row: Reading, column: str) -> list[Message]:
    text = row.optional(column).strip()
    return [{"role": "system", "content": text}] if text else []


# OpenAI's batches


def batch(row: Reading) -> list[Message]:
    """OpenAI's batch files: the messages of a request, and the answer where the response stands beside it."""
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
        raise RowProblem("response holds no answer")
    if len(choices) > 1:
        row.leave({"choices": choices[1:]}, "response.body")
    return messages + row.messages([choices[0].get("message")], "response.body.choices")


def _object(value: Any, name: str) -> Values:
    value = parsed(value, name) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise RowProblem(f"{name} is not an object")
    return dict(value)
