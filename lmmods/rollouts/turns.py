"""Answers of several turns: the model calls tools of an environment, reads what they say, and goes on.

Token ids are only ever added: what the model drew is never tokenised again. What a tool says is encoded as the chat
template writes it between two turns of the assistant.
"""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lmmods.core.errors import UserError
from lmmods.data.grpo import Prompt, PromptData
from lmmods.data.read.conversation import Message, RowProblem
from lmmods.recipe.rewards import read_rewards
from lmmods.recipe.tasks.grpo import GRPOFields
from lmmods.rollouts.environments import ENVIRONMENT, KEY, RESET, SCORE, Environments, Reply, Request
from lmmods.rollouts.policy import Policy, SampledAnswer
from lmmods.rollouts.rollout import Answer

AT_ONCE = 256  # answers that have an environment at the same time, each of which is a process
UNKNOWN = "unknown"  # name of the tool of a call without one

# ---------------------------------------------------------------------------------------------------------------------
# Calls in the text of a turn: <tool_call>{"name": ..., "arguments": {...}}</tool_call> of Hermes' and Qwen's templates;
# the JSON alone, with `parameters` for `arguments` in Llama 3.1's, or a list of such in Mistral's.

TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
MARKS = ("<|python_tag|>", "[TOOL_CALLS]")  # before calls that are JSON alone
THOUGHT = "</think>"
ARGUMENTS = ("arguments", "parameters")
FORM = 'a call must be {"name": ..., "arguments": {...}}'


class Call(NamedTuple):
    """A call of a tool.

    Args:
        problem: Why it cannot be made; None if it can.
    """

    name: str
    arguments: dict[str, Any]
    problem: str | None = None


def read_calls(text: str) -> list[Call]:
    """Return the calls in the text of a turn, those that cannot be read with their problem."""
    text = text.rpartition(THOUGHT)[2]
    if TAGGED.search(text):
        return [_read(part) for part in TAGGED.findall(text)]
    is_marked = any(mark in text for mark in MARKS)
    for mark in MARKS:
        text = text.replace(mark, "")
    if not text.strip().startswith(("{", "[")):
        return [Call(UNKNOWN, {}, FORM)] if is_marked else []
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [Call(UNKNOWN, {}, f"{FORM}, in JSON: {error}")] if is_marked else []
    calls = found if isinstance(found, list) else [found]
    # JSON that is no call is an answer.
    if not is_marked and not (calls and all(map(_is_call, calls))):
        return []
    return [_call(each) for each in calls] or [Call(UNKNOWN, {}, FORM)]


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and "name" in value and any(key in value for key in ARGUMENTS)


def _read(text: str) -> Call:
    try:
        return _call(json.loads(text))
    except (ValueError, RecursionError) as error:
        return Call(UNKNOWN, {}, f"{FORM}, in JSON: {error}")


def _call(value: Any) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call(UNKNOWN, {}, FORM)
    arguments = next((value[key] for key in ARGUMENTS if key in value), {})
    if isinstance(arguments, str):  # as OpenAI's API has them
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return Call(value["name"], {}, f"{FORM}, in JSON: {error}")
    if not isinstance(arguments, dict):
        return Call(value["name"], {}, FORM)
    return Call(value["name"], arguments)


# ---------------------------------------------------------------------------------------------------------------------
# Conversations


@dataclass(eq=False)
class _Episode:
    """An answer as it grows.

    Args:
        number: Of its environment.
        prompt: The prompt, with what `reset` said.
        numbers: [max_new_tokens] that decide its tokens; None is greedy.
        tokens: All that follows the prompt, with `logps`, `entropies` and `drawn` for each.
        begun: Place of the first token of the current turn.
        calls: Calls of the last turn, which are not answered yet.
        is_open: True if tokens are still to be drawn.
        reason: Why the environment has failed.
    """

    number: int
    prompt: Prompt
    numbers: np.ndarray | None
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    begun: int = 0
    calls: list[Call] = field(default_factory=list)
    is_open: bool = True
    ended: bool = False
    reason: str | None = None
    reward: float | None = None
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("turns", "calls", "failures", "cut"), 0))

    def add(self, tokens: Sequence[int], logps: Sequence[float], entropies: Sequence[float], drawn: bool) -> None:
        self.tokens += tokens
        self.logps += logps
        self.entropies += entropies
        self.drawn += [drawn] * len(tokens)

    def close(self, ended: bool = False, reason: str | None = None) -> None:
        self.is_open, self.ended, self.reason, self.calls = False, ended, reason, []


def environment_facts(task: GRPOFields) -> dict[str, Any]:
    """Return what prompts must know of the environment that a task names, as arguments of `PromptData.connect`.

    Raises:
        UserError: As of `Environments`; one cannot be made, or a method cannot be a tool; or nothing gives a reward.
    """
    names = [each.name for each in read_rewards(task.rewards or [])]
    with Environments(task.environment, task.reward_timeout, 1) as environments:
        tools, gives_reward = environments.facts()
    if not (names or gives_reward):
        raise UserError(f"{KEY}: {task.environment} has no method {SCORE}, and model.rewards is empty: name a reward, "
                        "for example [{name: exact_match}].")
    if gives_reward and ENVIRONMENT in names:
        raise UserError(f"model.rewards[{names.index(ENVIRONMENT)}] has the name {ENVIRONMENT}, which is that of the "
                        "environment's own reward: give it another by its key label.")
    return {"tools": tools, "is_scored_by_environment": gives_reward}


class Turns:
    """Answers prompts with the help of environments. All processes call it alike.

    Args:
        task: Settings of the task.
        data: The prompts, set up.
        policy: The network in training.

    Raises:
        UserError: The environment is not trusted or cannot be imported, or the chat template writes calls of tools in a
            way that is not known here.
    """

    def __init__(self, task: GRPOFields, data: PromptData, policy: Policy) -> None:
        self._task, self._data, self._policy = task, data, policy
        self._limit, self._encoder = task.max_new_tokens, data.codec.prompt_encoder("messages")
        self._tools = [tool["function"]["name"] for tool in data.codec.model.tools]
        if self._tools:
            self._check_form()
        self._environments = Environments(task.environment, task.reward_timeout, task.reward_processes)

    def close(self) -> None:
        """End the environments."""
        self._environments.close()

    def _check_form(self) -> None:
        name, arguments = self._tools[0], {"word": "a"}
        try:
            written = self._encoder.tool_call(name, arguments)
        except RowProblem as problem:
            raise UserError(f"{KEY} has tools, but {problem}") from problem
        end = re.compile(rf"(?:{self._encoder.text.control_pattern.pattern})\s*\Z")
        if read_calls(end.sub("", written)) != [Call(name, arguments)]:
            raise UserError(f"{KEY} has tools, but the chat template writes a call of one as {written!r}, of which "
                            'nothing is known here: <tool_call>{"name": ..., "arguments": {...}}</tool_call> and '
                            "JSON alone are. Name a file of Jinja as data.template that writes it so.")

    def answer(self, prompts: list[Prompt], size: int, numbers: np.ndarray | None, seconds: dict[str, float]
               ) -> tuple[list[Prompt], list[Answer]]:
        """Draw `size` answers to each prompt.

        Args:
            numbers: [prompts * size, max_new_tokens] uniform numbers that decide the tokens; None is greedy.
            seconds: Seconds by what took them, to which `drawing` and `tools` are added.

        Returns:
            The prompts with what `reset` said, and the answers to each in turn.
        """
        at_once = max(AT_ONCE // size, 1)
        most = max(self._policy.gather({self._policy.rank: len(prompts)}).values())
        asked, answers = [], []
        for start in range(0, most, at_once):
            part = prompts[start : start + at_once]
            talks = [_Episode(number, prompt, None if numbers is None else numbers[start * size + number])
                     for number, prompt in enumerate(each for each in part for _ in range(size))]
            try:
                asked += self._reset(talks, size, seconds)
                while (room := self._token_budget(talks)) is not None:
                    self._draw([talk for talk in talks if talk.is_open], room, numbers is None, seconds)
                    self._call([talk for talk in talks if talk.calls], seconds)
                self._score(talks, seconds)
            finally:
                for talk in talks:
                    self._environments.end(talk.number)
            answers += [self._answer(talk) for talk in talks]
        return asked, answers

    # Environments ----------------------------------------------------------------------------------------------------

    def _ask(self, requests: dict[int, list[Request]], seconds: dict[str, float]) -> dict[int, list[Reply]]:
        """Call methods of this process's environments. Processes that draw the same answers read the same replies."""
        rank, num_ranks, began = self._policy.rank, self._policy.num_ranks, time.perf_counter()
        replies = self._environments.ask(requests)
        seconds["tools"] = seconds.get("tools", 0.0) + time.perf_counter() - began
        shared = self._policy.gather({number * num_ranks + rank: found for number, found in replies.items()})
        return {number: shared[number * num_ranks + rank] for number in requests}

    def _reset(self, talks: list[_Episode], size: int, seconds: dict[str, float]) -> list[Prompt]:
        """Begin, and return the prompts with what `reset` says, which must be the same for all answers to one."""
        replies = self._ask({talk.number: [Request(RESET, talk.prompt.row)] for talk in talks}, seconds)
        found = []
        for place in range(0, len(talks), size):
            prompts: dict[str | None, Prompt] = {}  # by what was said
            for talk in talks[place : place + size]:
                [reply] = replies[talk.number]
                said = reply.value or None
                if reply.error is not None:
                    talk.close(reason=f"{RESET}: {reply.error}")
                elif prompts and said not in prompts:
                    talk.close(reason=f"{RESET} said something else than for another answer to the prompt")
                else:
                    try:
                        if said not in prompts:
                            prompts[said] = self._prompt(talk.prompt, said, reply.left_out)
                    except RowProblem as problem:
                        talk.close(reason=f"{RESET}: {problem}")
                    else:
                        talk.prompt = prompts[said]
            found.append(next(iter(prompts.values()), talks[place].prompt))
        return found

    def _prompt(self, prompt: Prompt, said: str | None, left_out: int) -> Prompt:
        if left_out:
            raise RowProblem(f"it returned {len(said) + left_out} characters")
        return prompt if said is None else self._data.codec.prompt_with(prompt, said)

    def _call(self, talks: list[_Episode], seconds: dict[str, float]) -> None:
        """Make the calls of the last turns, and add what the tools say."""
        requests = {talk.number: [Request(call.name, call.arguments) for call in talk.calls if call.problem is None]
                    for talk in talks}
        replies = self._ask(requests, seconds)
        for talk in talks:
            found, said = iter(replies[talk.number]), []
            for call in talk.calls:
                reply = Reply(error=call.problem) if call.problem is not None else next(found)
                talk.counts["calls"] += 1
                if reply.has_ended:
                    talk.counts["failures"] += 1
                    talk.close(reason=f"{call.name}: {reply.error}")
                    break
                failed = reply.error is not None
                talk.counts["failures"] += failed
                text = json.dumps({"error": reply.error}, ensure_ascii=False) if failed else reply.value
                said.append((call.name, text, reply.left_out))
            if talk.is_open:
                self._add(talk, said)

    def _add(self, talk: _Episode, said: list[tuple[str, str, int]]) -> None:
        """Add the turns of tools: name, text, and how much of it was left out already. At most half of the room is
        theirs.
        """

        def turns(longest: int) -> list[int]:
            messages: list[Message] = [{"role": "tool", "name": name, "content": _truncate(text, left_out, longest)}
                                       for name, text, left_out in said]
            return self._encoder.tool_turns(messages)

        most, longest = (self._limit - len(talk.tokens)) // 2, max(len(text) for _, text, _ in said)
        try:
            longest, ids = _fitting(turns, longest, most)
        except RowProblem as problem:
            return talk.close(reason=str(problem))
        talk.counts["cut"] += sum(left_out > 0 or len(text) > longest for _, text, left_out in said)
        if len(ids) > most:
            return talk.close()
        talk.add(ids, [0.0] * len(ids), [np.nan] * len(ids), False)
        talk.begun, talk.calls = len(talk.tokens), []
        return None

    def _score(self, talks: list[_Episode], seconds: dict[str, float]) -> None:
        """Set the rewards of environments."""
        scored = [talk for talk in talks if self._data.is_scored_by_environment and talk.reason is None]
        replies = self._ask({talk.number: [Request(SCORE, {})] for talk in scored}, seconds)
        for talk in scored:
            [reply] = replies[talk.number]
            talk.reward, talk.reason = reply.value, reply.error

    # Drawing ---------------------------------------------------------------------------------------------------------

    def _token_budget(self, talks: list[_Episode]) -> int | None:
        """Return how many tokens to draw next, the same in all processes; None if no answer in any of them is open."""
        left = [self._limit - len(talk.tokens) for talk in talks if talk.is_open]
        # Where rows of a batch are of different lengths, the longest must not outgrow `max_length`.
        free = [self._data.max_length - len(talk.prompt.ids) - len(talk.tokens) for talk in talks if talk.is_open]
        parts = self._policy.gather({self._policy.rank: (max(left), min(free)) if left else None}).values()
        found = [each for each in parts if each is not None]
        if not found:
            return None
        most, room = max(each for each, _ in found), self._limit
        while room // 2 >= most:  # of few sizes, as programs may be compiled for each
            room //= 2
        return min(room, *(each for _, each in found))

    def _draw(self, talks: list[_Episode], room: int, is_greedy: bool, seconds: dict[str, float]) -> None:
        """Draw up to `room` tokens of each, and read the calls of turns that have ended."""
        began, numbers = time.perf_counter(), None
        if not is_greedy:
            numbers = np.zeros((len(talks), room), np.float32)  # those past the end of an answer decide nothing
            for row, talk in zip(numbers, talks, strict=True):
                own = talk.numbers[len(talk.tokens) : len(talk.tokens) + room]
                row[: len(own)] = own
        drawn = self._policy.draw([[*talk.prompt.ids, *talk.tokens] for talk in talks], numbers,
                                  self._task.temperature, room, self._data.codec.stop_token_ids)
        for talk, each in zip(talks, drawn, strict=True):
            self._take(talk, each)
        seconds["drawing"] += time.perf_counter() - began

    def _take(self, talk: _Episode, drawn: SampledAnswer) -> None:
        left = self._limit - len(talk.tokens)
        talk.add(drawn.tokens[:left].tolist(), drawn.logps[:left].tolist(), drawn.entropies[:left].tolist(), True)
        if not (drawn.ended and len(drawn.tokens) <= left):
            if len(drawn.tokens) >= left or not len(drawn.tokens):
                talk.close()
            return
        talk.counts["turns"] += 1
        calls = self._calls(talk.tokens[talk.begun :]) if self._tools else []
        if not calls:
            talk.close(ended=True)
        elif talk.counts["turns"] == self._task.max_turns:
            talk.close()
        talk.calls = calls if talk.is_open else []

    def _calls(self, tokens: list[int]) -> list[Call]:
        known, [text] = ", ".join(self._tools), self._data.codec.decode_answers([tokens])
        return [call if call.problem is not None or call.name in self._tools else
                call._replace(problem=f"there is no tool {call.name}, only {known}")
                for call in read_calls(text)]

    def _answer(self, talk: _Episode) -> Answer:
        is_scored = self._data.is_scored_by_environment
        [text] = self._data.codec.decode_answers([talk.tokens[talk.begun :]])
        return Answer(
            np.array(talk.tokens, np.int32), np.array(talk.logps, np.float32), np.array(talk.entropies, np.float32),
            np.array(talk.drawn, bool), talk.ended, text, rewards={ENVIRONMENT: talk.reward} if is_scored else {},
            reasons={} if talk.reason is None else {ENVIRONMENT: talk.reason}, tools=talk.counts,
            whole=self._data.tokenizer.decode(talk.tokens))


def _truncate(text: str, left_out: int, longest: int) -> str:
    """Return the beginning of a text, with a note of what is left out."""
    kept = text[:longest]
    left_out += len(text) - len(kept)
    return f"{kept}\n[{left_out} characters left out]" if left_out else kept


def _fitting(encoded: Callable[[int], list[int]], longest: int, most: int) -> tuple[int, list[int]]:
    """Return how many characters to keep of texts for at most so many tokens, and the tokens.

    Args:
        encoded: Tokens by the number of characters.
        longest: Characters of the longest text.
        most: The tokens; there are more if those of no text do not fit.
    """
    if len(found := encoded(longest)) <= most or not longest:
        return longest, found
    found, low, high = encoded(0), 0, longest
    while len(found) <= most and high - low > 1:
        middle = (low + high) // 2
        if len(tokens := encoded(middle)) <= most:
            found, low = tokens, middle
        else:
            high = middle
    return low, found
