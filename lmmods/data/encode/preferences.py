"""Encode preferences to ids and labels: the answers of a row follow one prompt, which all truncate equally."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from lmmods.core.labels import IGNORED
from lmmods.data.encode.conversations import SFTEncoder, Truncation, drop_fewest_turns
from lmmods.data.encode.encoder import Encoded, Ragged
from lmmods.data.encode.templates import RenderedRow
from lmmods.data.read.conversation import Conversation, Message, RowProblem
from lmmods.data.read.images import images_of
from lmmods.data.read.preferences import Answers, Judged, keep_chosen, read_answers

Tokens = tuple[np.ndarray, np.ndarray]  # ids, and the response number of each


class _Row(NamedTuple):
    """A batch row before encoding: one answer, or a chosen and a rejected one."""

    row_index: int
    rendered: list[RenderedRow]
    is_wanted: bool


@dataclass
class PreferenceEncoder:
    """Encodes rows of preferences as pairs, or as single answers.

    Args:
        conversations: Renders and truncates conversations.
        answers: Content of a row of batches. For single answers, a pair becomes two rows.
    """

    conversations: SFTEncoder
    answers: Answers

    def __call__(self, rows: list[dict[str, Any]]) -> Encoded:
        """Return columns with one entry per pair or answer.

        `input_ids` and `labels` concatenate the answers of a row, each after the prompt; `chosen_length` (tokens of the
        first of them with its prompt), `prompt_length`, `desirable` (1 or 0; 1 for pairs), `weight`, `truncated`.

        Raises:
            RowError: A row is too long under on_overflow: error.
        """
        encoder = self.conversations
        if encoder.prompts_only:
            return encoder([keep_chosen(row) for row in rows])
        return self.encode(rows, lambda row: read_answers(row, encoder.conversation))

    def encode(self, rows: Iterable[Any], read: Callable[[Any], list[Judged]]) -> Encoded:
        """Encode rows of any type; `read` converts each to prepared conversations or raises RowProblem."""
        counts: Counter = Counter()
        pairs: list[_Row] = []
        problems: dict[int, str] = {}
        for index, row in enumerate(rows):
            try:
                pairs += self._render(read(row), index, counts)
            except RowProblem as problem:
                problems[index] = str(problem)
        # All answers of the batch in one call of the tokenizer, in the order in which `pairs` contains them.
        encoded = iter(self._encode_all([rendered for row in pairs for rendered in row.rendered], counts))
        usable = []
        for row in pairs:
            tokens = [next(encoded) for _ in row.rendered]
            try:
                usable.append((row, *self._apply_limits(row, tokens, counts)))
            except RowProblem as problem:
                problems.setdefault(row.row_index, str(problem))
        columns = self._columns(usable)
        self.conversations.count(columns, counts)
        positions = np.array([row.row_index for row, *_ in usable], np.int64)
        dropped = sorted((index, problem) for index,
                         problem in problems.items() if index not in set(positions.tolist()))
        counts["answers_dropped"] += len(problems) - len(dropped)
        return Encoded(columns, positions, dropped, counts)

    def _columns(self, usable: list[tuple]) -> dict[str, Any]:
        def to_array(values: list, dtype: type = np.int64) -> np.ndarray:
            return np.array(values, dtype)

        return {
            "input_ids": Ragged.from_lists([np.concatenate([ids for ids, _ in row]) for _, _, row, *_ in usable]),
            "labels": Ragged.from_lists([np.concatenate([labels for _, labels in row]) for _, _, row, *_ in usable]),
            "chosen_length": to_array([len(row[0][0]) for _, _, row, *_ in usable]),
            "prompt_length": to_array([prompt for *_, prompt, _ in usable]),
            "desirable": to_array([row.is_wanted for row, *_ in usable]),
            "weight": to_array([row.rendered[0].conversation.weight for row, *_ in usable], np.float32),
            "truncated": to_array([removed for *_, removed in usable]),
            **self.conversations.further_columns([conversation for _, conversation, *_ in usable]),
        }

    # Conversations

    def _render(self, judged_answers: list[Judged], index: int, counts: Counter) -> list[_Row]:
        """Return the batch rows that a row's answers become. Raises RowProblem."""
        counted: set[str] = set()
        for conversation, _ in judged_answers:  # count an unused key once per row, not per answer
            conversation.unused = tuple(key for key in conversation.unused if key not in counted)
            counted.update(conversation.unused)
        if self.answers == "pair":
            if len(judged_answers) == 1:
                raise RowProblem("a single answer, not a pair")
            chosen, rejected = judged_answers
            shared = _num_shared(chosen.conversation.messages, rejected.conversation.messages)
            pair = [self._render_one(conversation, shared, counts) for conversation, _ in judged_answers]
            return [_Row(index, pair, True)]
        # Only for its checks: equal answers, or answers to different prompts.
        if len(judged_answers) == 2:
            _num_shared(*(conversation.messages for conversation, _ in judged_answers))
        return [_Row(index, [self._render_one(conversation, _last_answer(conversation), counts)], is_wanted)
                for conversation, is_wanted in judged_answers]

    def _render_one(self, conversation: Conversation, start: int, counts: Counter) -> RenderedRow:
        """Render a conversation whose answers from the turn at `start` on are targets. Raises RowProblem."""
        # Earlier answers belong to the prompt.
        messages: list[Message] = [
            {**message, "scored": False} if message["role"] == "assistant" and index < start else message
            for index, message in enumerate(conversation.messages)]
        rows = self.conversations.render(replace(conversation, messages=messages), counts)
        # A template that renders turns differently once they are answered gives a row per turn.
        if len(rows) != 1:
            raise RowProblem("an answer of several turns, which the chat template renders differently")
        return rows[0]

    # Tokens

    def _encode_all(self, rendered: list[RenderedRow], counts: Counter) -> list[Tokens]:
        encoder = self.conversations
        runs = [encoder.text.runs(row.segments) for row in rendered]
        counts.update(encoder.text.count_spelled(runs))
        return encoder.text.encode_rows(runs, encoder.renderer.separate_responses)

    def _apply_limits(self, row: _Row, tokens: list[Tokens], counts: Counter
                      ) -> tuple[Conversation, list[Tokens], int, int]:
        """Return what is left of a row within the limits.

        This is the first answer's conversation, ids and labels of each answer, the prompt length, and the number of
        removed tokens.

        Raises:
            RowProblem: The row cannot be used.
        """
        before, conversation = sum(len(ids) for ids, _ in tokens), row.rendered[0].conversation
        if self.conversations.limits.on_overflow == "truncate_turns" and not all(map(self._is_within_limits, tokens)):
            conversation, tokens = self._with_fewer_turns(row.rendered)
        removed = [self.conversations.truncation(prompt, len(ids) - prompt, row.row_index)
                   for (ids, _), prompt in zip(tokens, map(_prompt_length, tokens), strict=True)]
        # Both answers must follow the same prompt, so the longer one decides its truncation; ends are separate.
        left, right = max(part.left for part in removed), max(part.right for part in removed)
        shortened = [self._truncate(answer, Truncation(left, right, part.answer))
                     for answer, part in zip(tokens, removed, strict=True)]
        labelled = [(ids, np.where(response >= 0, ids, IGNORED).astype(np.int32)) for ids, response in shortened]
        if not all((labels[1:] != IGNORED).any() for _, labels in labelled):
            raise RowProblem("an answer has no tokens left after truncation")
        # They may differ only in text, for example in white space, or only in truncated tokens.
        if len(labelled) == 2 and np.array_equal(labelled[0][0], labelled[1][0]):
            raise RowProblem("the two answers have the same tokens")
        num_lost = before - sum(len(ids) for ids, _ in labelled)
        counts["rows_cut"] += num_lost > 0
        counts["tokens_cut"] += num_lost
        # If a prompt opens a tag such as <think> that one answer lacks, that answer starts earlier.
        return conversation, labelled, min(map(_prompt_length, shortened)), num_lost

    def _is_within_limits(self, tokens: Tokens) -> bool:
        prompt = _prompt_length(tokens)
        return not any(self.conversations.excess(prompt, len(tokens[0]) - prompt))

    def _truncate(self, tokens: Tokens, removed: Truncation) -> Tokens:
        return self.conversations.shorten(*tokens, _prompt_length(tokens), removed) if any(removed) else tokens

    def _with_fewer_turns(self, rendered: list[RenderedRow]) -> tuple[Conversation, list[Tokens]]:
        """Drop as few of the prompt's oldest exchanges as the longer answer needs.

        Raises:
            RowProblem: The last exchange alone is too long.
        """
        conversations = [row.conversation for row in rendered]
        messages = conversations[0].messages
        start = int(messages[0]["role"] == "system")
        first_answer = next(index for index, message in enumerate(messages)
                            if message["role"] == "assistant" and message.get("scored", True))
        starts = [index for index in range(start + 1, first_answer) if messages[index]["role"] == "user"]

        def encode_from(first: int) -> tuple[Conversation, list[Tokens]] | None:
            shorter, encoded = self._from_turn(conversations, start, first)
            return (shorter, encoded) if encoded and all(map(self._is_within_limits, encoded)) else None

        return drop_fewest_turns(starts, encode_from)

    def _from_turn(self, conversations: list[Conversation], start: int, first: int
                   ) -> tuple[Conversation, list[Tokens]]:
        """Return the first answer's conversation with the system turn and the turns from `first` on, and the tokens of
        all answers; none if a template splits them.
        """
        shorter = [replace(conversation, messages=[*conversation.messages[:start],
                                                   *conversation.messages[first:]]) for conversation in conversations]
        rows = [self.conversations.renderer.rows(conversation, "all") for conversation in shorter]
        if any(len(row) != 1 for row in rows):
            return shorter[0], []
        return shorter[0], self._encode_all([row[0] for row in rows], Counter())  # what is spelled has been counted


def _prompt_length(tokens: Tokens) -> int:
    """Return the number of tokens before the first target."""
    # Not the last response, as in SFTEncoder: answers may have several turns.
    return int(np.argmax(tokens[1] >= 0))


def _num_shared(chosen: list[Message], rejected: list[Message]) -> int:
    """Return the number of turns that two conversations share before an answer in both. Raises RowProblem."""
    shared = next((index for index, pair in enumerate(zip(chosen, rejected)) if not _is_same(*pair)),
                  min(len(chosen), len(rejected)))
    if shared == len(chosen) == len(rejected):
        raise RowProblem("the two answers are equal")
    # Both must continue with an answer: comparing answers to different questions is meaningless.
    ends = [messages[shared]["role"] if shared < len(messages) else None for messages in (chosen, rejected)]
    if ends != ["assistant", "assistant"]:
        raise RowProblem("the two conversations differ before the answer")
    if images_of(chosen) != images_of(rejected):
        raise RowProblem("the two answers have different images")
    return shared


def _is_same(one: Message, other: Message) -> bool:
    return {**one, "content": one["content"].strip()} == {**other, "content": other["content"].strip()}


def _last_answer(conversation: Conversation) -> int:
    """Return the position of the last turn of the assistant; 0 if there is none, which is reported later."""
    messages = conversation.messages
    return next((index for index in reversed(range(len(messages))) if messages[index]["role"] == "assistant"), 0)
