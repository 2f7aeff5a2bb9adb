"""Encoding of conversations to ids and labels. Does not import torch, so that worker processes start fast."""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from lmmods.core.labels import IGNORED
from lmmods.data.encode.chat_renderer import PROBE
from lmmods.data.encode.encoder import UNUSED, Encoded, Ragged, RowError, TextEncoder
from lmmods.data.encode.templates import RenderedRow, Renderer, Segment, Turns, scored_turns
from lmmods.data.read.cells import check_unicode
from lmmods.data.read.conversation import Conversation, Message, RowProblem
from lmmods.data.read.formats import find_format, read_conversation
from lmmods.data.read.turns import Roles

Shortened = TypeVar("Shortened")


def drop_fewest_turns(start_turns: list[int], encode: Callable[[int], Shortened | None]) -> Shortened:
    """Bisect for the fewest turns to drop: build the conversation from the first turn at which it fits the limits.

    Args:
        start_turns: Turns to start at, ascending: later ones give a shorter conversation.
        encode: Builds the conversation from a turn on; None if it exceeds the limits.

    Raises:
        RowProblem: It is too long even from the last of these turns on.
    """
    # Cached, as encoding is expensive and the result is needed again.
    encode_cached = cache(encode)
    first = bisect_left(start_turns, True, key=lambda turn: encode_cached(turn) is not None)
    shortened = encode_cached(start_turns[first]) if first < len(start_turns) else None
    if shortened is None:
        raise RowProblem("longer than the limits, even without its earlier turns")
    return shortened


@dataclass
class Limits:
    """Length policy of a row, in tokens; None means no limit of that kind. `on_overflow` is as in SFTDataFields."""

    max_length: int
    source_max_length: int | None
    target_max_length: int | None
    on_overflow: str


@dataclass
class Choices:
    """Settings of what is rendered and learned from a conversation, as in SFTDataFields."""

    train_on: str = "responses"
    turns: Turns = "all"
    reasoning: str = "keep"
    system_prompt: str | None = None
    replace_system_prompt: bool = False


class Truncation(NamedTuple):
    """Tokens to remove: from the start of a prompt, from its end, and from the end of its answer."""

    left: int = 0
    right: int = 0
    answer: int = 0


CALL = "a12345678"  # id of a call, in the form that Mistral's templates require
# Reasoning that a template or dataset wrote inline.
THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


@dataclass
class SFTEncoder:
    """Encodes rows of one format to ids, labels, and the length of the prompt of the last response.

    Args:
        choices: Settings of what is rendered and learned.
        prompts_only: Rows may lack a response; encode them only up to where it starts.
        tools: Specifications of the tools of every conversation; rows must not have others.
        never_targets: Ids that are never targets.
    """

    dataset_format: str
    renderer: Renderer
    text: TextEncoder
    limits: Limits
    choices: Choices = field(default_factory=Choices)
    roles: Roles = field(default_factory=dict)
    turn_fields: dict[str, str] = field(default_factory=dict)
    prompts_only: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    never_targets: tuple[int, ...] = field(default=(), kw_only=True)

    def __call__(self, rows: list[dict[str, Any]]) -> Encoded:
        """Columns `input_ids`, `labels`, `weight`, `prompt_length`, `truncated`.

        Raises:
            RowError: A row is too long under on_overflow: error.
        """
        # Render all rows first, so that their texts are encoded in one call. A row may give several.
        rendered: list[tuple[int, RenderedRow]] = []
        dropped = []
        counts: Counter = Counter()
        for index, row in enumerate(rows):
            try:
                rendered_rows = self.render(self.conversation(row), counts)
            except RowProblem as problem:
                dropped.append((index, str(problem)))
                continue
            rendered += [(index, rendered_row) for rendered_row in rendered_rows]
        runs = [self.text.runs(rendered_row.segments) for _, rendered_row in rendered]
        counts.update(self.text.count_spelled(runs))
        encoded = self.text.encode_rows(runs, self.renderer.separate_responses)
        fitted = []
        problems: dict[int, str] = {}
        for (index, rendered_row), (ids, response) in zip(rendered, encoded, strict=True):
            try:
                fitted.append((index, *self._apply_limits(rendered_row, ids, response, index, counts)))
            except RowProblem as problem:
                problems.setdefault(index, str(problem))
        # A row counts as dropped only if none of its turns is left; the others count as dropped turns.
        usable = {index for index, *_ in fitted}
        dropped += [(index, problem) for index, problem in problems.items() if index not in usable]
        counts["turns_dropped"] += sum(index in usable for index in problems)
        columns = {
            "input_ids": Ragged.from_lists([ids for _, _, ids, *_ in fitted]),
            "labels": Ragged.from_lists([labels for *_, labels, _, _ in fitted]),
            "weight": np.array([conversation.weight for _, conversation, *_ in fitted], np.float32),
            "prompt_length": np.array([prompt for *_, prompt, _ in fitted], np.int64),
            "truncated": np.array([removed for *_, removed in fitted], np.int64),
            **self.further_columns([conversation for _, conversation, *_ in fitted]),
        }
        self.count(columns, counts)
        return Encoded(columns, np.array([index for index, *_ in fitted], np.int64), sorted(dropped), counts)

    def further_columns(self, conversations: list[Conversation]) -> dict[str, Any]:
        """Return columns besides those of tokens, for the conversations of the kept rows. Default: none."""
        return {}

    def conversation(self, row: dict[str, Any]) -> Conversation:
        """Read and prepare the conversation of a row. Raises RowProblem if it contains none."""
        return self.normalise(read_conversation(self.dataset_format, row, self.roles, self.turn_fields))

    def normalise(self, conversation: Conversation) -> Conversation:
        """Apply the settings of system prompt, reasoning and tools. Raises RowProblem for invalid text, or other tools.
        """
        # Content is most of a turn; the slower check of all its fields is for turns that have more.
        for message in conversation.messages:
            check_unicode(message["content"])
            if len(message) > 2:
                check_unicode({key: value for key, value in message.items() if key != "images"})
        messages = conversation.messages
        if self.choices.reasoning == "drop":
            messages = [_without_reasoning(message) for message in messages]
        has_system = messages[0]["role"] == "system"
        replaces = self.choices.replace_system_prompt or not has_system
        # Formats with their own template (`plain` text) do not support a system turn.
        if self.choices.system_prompt is not None and replaces and find_format(self.dataset_format).template is None:
            messages = [{"role": "system", "content": self.choices.system_prompt}, *messages[int(has_system):]]
        if self.tools:
            if conversation.tools not in ([], self.tools):
                raise RowProblem("the row has its own tools, but the environment defines them")
            return replace(conversation, messages=messages, tools=self.tools)
        return conversation if messages is conversation.messages else replace(conversation, messages=messages)

    def prompts(self, conversations: list[list[Message]]) -> list[list[int]]:
        """Return the token ids of conversations up to the response. Raises RowProblem if one cannot be rendered."""
        return self.prompts_of([self.normalise(Conversation(messages)) for messages in conversations])

    def prompts_of(self, conversations: list[Conversation]) -> list[list[int]]:
        """Return the token ids of prepared conversations up to the response. Raises RowProblem."""
        return self._ids([self.renderer.prompt(conversation) for conversation in conversations])

    def tool_turns(self, answers: list[Message]) -> list[int]:
        """Return the token ids that follow an assistant turn with tool calls: the answers and the next turn's start.

        They do not depend on earlier turns, whose tokens do not change.

        Raises:
            RowProblem: The template does not support tools, or rejects the answers.
        """
        for answer in answers:
            check_unicode(answer["content"])
        # Without the token that ends the turn, after which some tokenizers start a text differently.
        return self._ids([self.renderer.segments_after_call(self._make_call(answers[0]["name"], {"a": PROBE}, answers),
                                                            1)])[0][1:]

    def tool_call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the template's text of a turn that calls a tool. Raises RowProblem if it does not support tools."""
        row = self.renderer.rows(self._make_call(name, arguments, []), "last")[0]
        return "".join(part.text for part in row.segments if part.response >= 0)

    def _make_call(self, name: str, arguments: dict[str, Any], answers: list[Message]) -> Conversation:
        """Return a conversation in which the assistant calls a tool, and the tool answers."""
        call = {"type": "function", "function": {"name": name, "arguments": arguments}, "id": CALL}
        messages: list[Message] = [{"role": "user", "content": "a"},
                                   {"role": "assistant", "content": "", "tool_calls": [call]}]
        tool_messages: list[Message] = [{**answer, "tool_call_id": CALL} for answer in answers]
        return Conversation(messages + tool_messages, self.tools)

    def _ids(self, rows: list[list[Segment]]) -> list[list[int]]:
        return [ids.tolist() for ids, _ in self.text.encode_rows([self.text.runs(row) for row in rows])]

    def render(self, conversation: Conversation, counts: Counter) -> list[RenderedRow]:
        """Render a prepared conversation to rows, and count what happened to it. Raises RowProblem."""
        messages = conversation.messages
        # Number of turns up to the last one of the assistant; what follows has no answer to learn.
        num_answered = next((n for n in range(len(messages), 0, -1) if messages[n - 1]["role"] == "assistant"), 0)
        for key in conversation.unused:
            counts[f"{UNUSED}{key}"] += 1
        if self.prompts_only:
            if find_format(self.dataset_format).template is not None:  # a text to continue
                messages = [{**message, "role": "user"} for message in messages]
            elif num_answered == len(messages):  # the answer is what the model is to write
                messages = messages[:-1]
            if not messages:
                raise RowProblem("no prompt")
            conversation = replace(conversation, messages=messages)
            return [RenderedRow(self.renderer.prompt(conversation), conversation, [])]
        if not num_answered:
            raise RowProblem("no response")
        # In float32, as it is stored: a tiny weight may round to 0.
        if not np.float32(conversation.weight):
            raise RowProblem("the row's weight is 0")
        if messages[0]["role"] == "assistant" and find_format(self.dataset_format).template is None:
            if num_answered == 1:
                raise RowProblem("the conversation starts with the assistant")
            messages = [{**messages[0], "scored": False}, *messages[1:]]  # an opening without a question is not learned
        if any(_is_empty(message) for message in messages[:num_answered]):
            raise RowProblem("empty response")
        if messages is not conversation.messages or num_answered < len(messages):
            conversation = replace(conversation, messages=messages[:num_answered])
        if not scored_turns(conversation, "all"):
            raise RowProblem("no turn to train on")
        turns = "last" if self.choices.train_on == "last" else self.choices.turns
        rows = self.renderer.rows(conversation, turns)
        counts["turns_without_response"] += len(messages) - num_answered
        counts["conversations_split"] += len(rows) > 1
        counts["responses_unlike_inference"] += sum(row.unlike_inference for row in rows)
        for row in rows:
            for key in row.unshown:
                counts[f"{UNUSED}{key}"] += 1
        return rows

    def _apply_limits(self, row: RenderedRow, ids: np.ndarray, response: np.ndarray, index: int, counts: Counter
                      ) -> tuple[Conversation, np.ndarray, np.ndarray, int, int]:
        """Return conversation, ids, labels, prompt length and number of removed tokens, within the limits.

        Raises RowProblem.
        """
        prompt = self._prompt_length(response)
        if self.limits.on_overflow == "truncate_turns" and self.excess(prompt, len(ids) - prompt) != (0, 0, 0):
            before, num_turns = len(ids), len(row.conversation.messages)
            row, ids, response = self._with_fewer_turns(row.conversation)
            counts["rows_cut"] += 1
            counts["turns_cut"] += num_turns - len(row.conversation.messages)
            counts["tokens_cut"] += before - len(ids)
            # Fits by now, so nothing more is removed.
            ids, labels, prompt, _ = self._label(ids, response, index, counts)
            return row.conversation, ids, labels, prompt, before - len(ids)
        return row.conversation, *self._label(ids, response, index, counts)

    def _with_fewer_turns(self, conversation: Conversation) -> tuple[RenderedRow, np.ndarray, np.ndarray]:
        """Drop as few of the oldest exchanges as needed; the system turn and the tools are kept.

        Raises:
            RowProblem: The last exchange alone is too long.
        """
        messages = conversation.messages
        start = int(messages[0]["role"] == "system")
        # A shorter conversation starts with a question; the first one (the whole conversation) is known not to fit.
        starts = [index for index, message in enumerate(messages) if message["role"] == "user" and index > start]
        return drop_fewest_turns(starts, lambda first: self._encode(
            replace(conversation, messages=[*messages[:start], *messages[first:]])))

    def _encode(self, conversation: Conversation) -> tuple[RenderedRow, np.ndarray, np.ndarray] | None:
        """Encode a conversation as one row; None if it exceeds the limits or learns nothing."""
        if self.prompts_only:
            rows = [RenderedRow(self.renderer.prompt(conversation), conversation, [])]
        else:
            rows = self.renderer.rows(conversation, "all") if scored_turns(conversation, "all") else []
        if len(rows) != 1:
            return None
        (ids, response), = self.text.encode_rows([self.text.runs(rows[0].segments)], self.renderer.separate_responses)
        prompt = self._prompt_length(response)
        return (rows[0], ids, response) if self.excess(prompt, len(ids) - prompt) == (0, 0, 0) else None

    def _label(self, ids: np.ndarray, response: np.ndarray, index: int, counts: Counter
               ) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Apply the length policy in tokens and build the labels. Raises RowProblem if the row is dropped."""
        prompt = self._prompt_length(response)
        removed = self.truncation(prompt, len(ids) - prompt, index)
        if any(removed):
            counts["rows_cut"] += 1
            counts["tokens_cut"] += sum(removed)
            ids, response = self.shorten(ids, response, prompt, removed)
        train_on_all = self.choices.train_on == "all" and not self.prompts_only
        # Labels are not shifted: position t contains the id of token t, and the loss of t - 1 predicts it.
        labels = ids if train_on_all else np.where(response >= 0, ids, IGNORED)
        if self.never_targets:
            labels = np.where(np.isin(ids, self.never_targets), IGNORED, labels)
        # The first token is never predicted.
        if not self.prompts_only and not (labels[1:] != IGNORED).any():
            raise RowProblem("no target tokens left after truncation")
        counts["responses_complete"] += int(not removed.answer and not self.prompts_only)
        return ids, labels, prompt - removed.left - removed.right, sum(removed)

    def _prompt_length(self, response: np.ndarray) -> int:
        """Return the number of tokens before the last response, from the response number of each token."""
        # argmax finds the first token of the highest number.
        return len(response) if self.prompts_only else int(np.argmax(response == response.max(initial=-1)))

    def excess(self, prompt: int, answer: int) -> tuple[int, int, int]:
        """Return the tokens over the limits: of the prompt, of the answer, and of both together in addition."""
        limits = self.limits
        # The limits of the parts apply first, then the limit of both together.
        source = max(0, prompt - (limits.source_max_length or prompt))
        target = max(0, answer - (limits.target_max_length or answer))
        # A prompt of predict leaves space for at least one token.
        return source, target, max(0, prompt - source + answer - target - limits.max_length + int(self.prompts_only))

    def shorten(self, ids: np.ndarray, response: np.ndarray, prompt: int, removed: "Truncation"
               ) -> tuple[np.ndarray, np.ndarray]:
        """Remove the truncated tokens; the begin token is kept."""
        first, num_left = int(ids[0] == self.text.bos_id), removed.left
        # Truncation inside an earlier response: its rest is not a target without its start.
        if num_left and response[first + num_left] == response[first + num_left - 1]:
            response = np.where(response == response[first + num_left], -1, response)
        keep = np.r_[:first, first + num_left : prompt - removed.right, prompt : len(ids) - removed.answer]
        return ids[keep], response[keep]

    def truncation(self, prompt: int, answer: int, index: int) -> "Truncation":
        """Return how many tokens to remove from a prompt and its answer. Raises RowProblem if the row is dropped."""
        limits = self.limits
        source, target, total = self.excess(prompt, answer)
        if not source + target + total:
            return Truncation()
        if limits.on_overflow == "error":
            raise RowError(
                index,
                f"{prompt} prompt and {answer} response tokens are more than max_length "
                f"{limits.max_length} / source_max_length {limits.source_max_length} / target_max_length "
                f"{limits.target_max_length}. Raise the limit or set data.on_overflow",
            )
        if limits.on_overflow == "skip":
            raise RowProblem("longer than the limits")
        if limits.on_overflow == "truncate_ends":
            return Truncation(right=source + (total if self.prompts_only else 0),
                              answer=0 if self.prompts_only else target + total)
        if limits.on_overflow == "truncate" and not self.prompts_only:
            return Truncation(left=source, answer=target + total)
        # Only the prompt may be truncated, to at least two tokens, as the first may be the begin token.
        if target or source + total >= prompt - 1:
            raise RowProblem("response longer than the limits")
        return Truncation(left=source + total)

    def count(self, columns: dict[str, Any], counts: Counter) -> None:
        labels = columns["labels"].values
        counts["tokens"] += len(labels)
        counts["rows_weighted"] += int((columns["weight"] != 1).sum())
        counts["labelled_tokens"] += int((labels != IGNORED).sum())
        counts["unknown_tokens"] += int((columns["input_ids"].values == self.text.unk_id).sum())
        counts["terminators_labelled"] += int(np.isin(labels, self.stop_token_ids).sum())

    @cached_property
    def stop_token_ids(self) -> list[int]:
        """Return the tokens that end a response: the template's terminators and the tokenizer's end token."""
        ends = {self.text.control[name] for name in self.renderer.ends()}
        return sorted(ends | ({self.text.eos_id} if self.text.eos_id is not None else set()))


def _without_reasoning(message: Message) -> Message:
    turn = {key: value for key, value in message.items() if key != "reasoning_content"}
    if message["role"] == "assistant":
        turn["content"] = THOUGHT.sub("", message["content"], count=1)
    return turn  # type: ignore[return-value]


def _is_empty(message: Message) -> bool:
    return (message["role"] == "assistant" and message.get("scored", True) and not message["content"].strip()
            and not message.get("tool_calls"))
