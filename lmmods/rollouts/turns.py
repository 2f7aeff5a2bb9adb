"""Sample answers of several turns: the model calls an environment's tools, reads the results, and continues.

Token ids are only appended, so text that the model sampled is never tokenised again. A tool's result is encoded as the
chat template writes it between two assistant turns.
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
from lmmods.rollouts.environments import ENVIRONMENT, KEY, MAX_CHARACTERS, RESET, SCORE, Environments, Reply, Request
from lmmods.rollouts.policy import Policy, SampledAnswer
from lmmods.rollouts.rollout import Answer

MAX_ENVIRONMENTS = 256  # at the same time; each is a process
UNKNOWN = "unknown"  # tool name of a call that has none

# ---------------------------------------------------------------------------------------------------------------------
# Calls in the text of a turn: <tool_call>{"name": ..., "arguments": {...}}</tool_call> in Hermes' and Qwen's templates;
# JSON alone, with `parameters` for `arguments`, in Llama 3.1's; a list of JSON calls in Mistral's.

TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
MARKS = ("<|python_tag|>", "[TOOL_CALLS]")  # precede calls that are JSON alone
THOUGHT = "</think>"
ARGUMENTS = ("arguments", "parameters")
FORM = 'a call must be {"name": ..., "arguments": {...}}'


class Call(NamedTuple):
    """A tool call.

    Args:
        problem: Why it cannot be executed; None if it can.
    """

    name: str
    arguments: dict[str, Any]
    problem: str | None = None


def read_calls(text: str) -> list[Call]:
    """Return the tool calls in the text of a turn. A call that cannot be read has a problem."""
    text = text.rpartition(THOUGHT)[2]
    if TAGGED.search(text):
        return [_parse_call(part) for part in TAGGED.findall(text)]
    is_marked = any(mark in text for mark in MARKS)
    for mark in MARKS:
        text = text.replace(mark, "")
    if not text.strip().startswith(("{", "[")):
        return [Call(UNKNOWN, {}, FORM)] if is_marked else []
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [Call(UNKNOWN, {}, f"{FORM}, in JSON: {error}")] if is_marked else []
    values = value if isinstance(value, list) else [value]
    # Other JSON is an answer, not a call.
    if not is_marked and not (values and all(map(_is_call, values))):
        return []
    return [_to_call(item) for item in values] or [Call(UNKNOWN, {}, FORM)]


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and "name" in value and any(key in value for key in ARGUMENTS)


def _parse_call(text: str) -> Call:
    try:
        return _to_call(json.loads(text))
    except (ValueError, RecursionError) as error:
        return Call(UNKNOWN, {}, f"{FORM}, in JSON: {error}")


def _to_call(value: Any) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call(UNKNOWN, {}, FORM)
    arguments = next((value[key] for key in ARGUMENTS if key in value), {})
    if isinstance(arguments, str):  # OpenAI's API has them as JSON
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
    """An answer while it grows.

    Args:
        index: Index of the environment that serves this answer.
        prompt: The prompt, with the text that `reset` returned.
        uniforms: [max_new_tokens] random numbers in [0, 1) that determine the tokens; None is greedy.
        tokens: All tokens after the prompt; `logps`, `entropies` and `is_sampled` have one value for each.
        turn_start: Position of the current turn's first token.
        calls: Calls of the last turn that have no result yet.
        is_open: True while the answer may get more tokens.
        ended: True if the answer ends with an end token.
        reason: Why the environment failed; None if it did not.
        reward: Reward from the environment; None if missing.
        counts: Numbers of turns, calls, failed calls and truncated results.
    """

    index: int
    prompt: Prompt
    uniforms: np.ndarray | None
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    turn_start: int = 0
    calls: list[Call] = field(default_factory=list)
    is_open: bool = True
    ended: bool = False
    reason: str | None = None
    reward: float | None = None
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("turns", "calls", "failures", "cut"), 0))

    def add(self, tokens: Sequence[int], logps: Sequence[float], entropies: Sequence[float], is_sampled: bool) -> None:
        self.tokens += tokens
        self.logps += logps
        self.entropies += entropies
        self.is_sampled += [is_sampled] * len(tokens)

    def close(self, ended: bool = False, reason: str | None = None) -> None:
        self.is_open, self.ended, self.reason, self.calls = False, ended, reason, []


def read_environment_facts(task: GRPOFields) -> dict[str, Any]:
    """Return what prompts must know about the environment, as arguments of `PromptData.connect`.

    Raises:
        UserError: As in `Environments`; an environment cannot be created, a method cannot be a tool, or nothing gives
            a reward.
    """
    names = [reward.name for reward in read_rewards(task.rewards or [])]
    with Environments(task.environment, task.reward_timeout, 1) as environments:
        facts = environments.read_facts()
    if not (names or facts.gives_reward):
        raise UserError(f"{KEY}: {task.environment} has no method {SCORE}, and model.rewards is empty. Set a reward, "
                        "for example [{name: exact_match}].")
    if facts.gives_reward and ENVIRONMENT in names:
        raise UserError(f"model.rewards[{names.index(ENVIRONMENT)}] is named {ENVIRONMENT}, like the reward of the "
                        "environment. Set its key label to another name.")
    return {"tools": facts.tools, "is_scored_by_environment": facts.gives_reward}


class Turns:
    """Samples answers that use environments. All methods are collective calls.

    Args:
        task: Settings of the task.
        data: The prompts, set up.
        policy: The network in training.

    Raises:
        UserError: The environment is not trusted or cannot be imported, or the chat template writes tool calls in an
            unsupported way.
    """

    def __init__(self, task: GRPOFields, data: PromptData, policy: Policy) -> None:
        self._task, self._data, self._policy = task, data, policy
        self._limit, self._encoder = task.max_new_tokens, data.codec.prompt_encoder("messages")
        self._tools = [tool["function"]["name"] for tool in data.codec.model.tools]
        if self._tools:
            self._check_template()
        self._environments = Environments(task.environment, task.reward_timeout, task.reward_processes)

    def close(self) -> None:
        """End the environments."""
        self._environments.close()

    def _check_template(self) -> None:
        name, arguments = self._tools[0], {"word": "a"}
        try:
            written = self._encoder.tool_call(name, arguments)
        except RowProblem as problem:
            raise UserError(f"{KEY} has tools, but {problem}") from problem
        end_pattern = re.compile(rf"(?:{self._encoder.text.control_pattern.pattern})\s*\Z")
        if read_calls(end_pattern.sub("", written)) != [Call(name, arguments)]:
            raise UserError(f"{KEY} has tools, but the chat template writes a tool call as {written!r}, which is not "
                            "supported. Set data.template to a Jinja file that writes it as "
                            '<tool_call>{"name": ..., "arguments": {...}}</tool_call> or as JSON alone.')

    def answer(self, prompts: list[Prompt], size: int, uniforms: np.ndarray | None, seconds: dict[str, float]
               ) -> tuple[list[Prompt], list[Answer]]:
        """Sample `size` answers to each prompt.

        Args:
            uniforms: [prompts * size, max_new_tokens] numbers in [0, 1) that determine the tokens; None is greedy.
            seconds: Seconds for each part; `drawing` and `tools` are increased.

        Returns:
            The prompts with the text that `reset` returned, and the answers, prompt by prompt.
        """
        num_prompts = max(MAX_ENVIRONMENTS // size, 1)
        max_prompts = max(self._policy.gather({self._policy.rank: len(prompts)}).values())
        reset_prompts, answers = [], []
        for start in range(0, max_prompts, num_prompts):
            batch = prompts[start : start + num_prompts]
            episodes = [_Episode(index, prompt, None if uniforms is None else uniforms[start * size + index])
                        for index, prompt in enumerate(prompt for prompt in batch for _ in range(size))]
            try:
                reset_prompts += self._reset(episodes, size, seconds)
                while (budget := self._token_budget(episodes)) is not None:
                    self._sample_turns([episode for episode in episodes if episode.is_open], budget, uniforms is None,
                                       seconds)
                    self._execute_calls([episode for episode in episodes if episode.calls], seconds)
                self._score(episodes, seconds)
            finally:
                for episode in episodes:
                    self._environments.end(episode.index)
            answers += [self._to_answer(episode) for episode in episodes]
        return reset_prompts, answers

    # Environments ----------------------------------------------------------------------------------------------------

    def _call_environments(self, requests: dict[int, list[Request]], seconds: dict[str, float]
                           ) -> dict[int, list[Reply]]:
        """Call methods of environments. Processes that sample the same answers get the same replies."""
        rank, num_ranks, start = self._policy.rank, self._policy.num_ranks, time.perf_counter()
        replies = self._environments.ask(requests)
        seconds["tools"] = seconds.get("tools", 0.0) + time.perf_counter() - start
        shared = self._policy.gather({index * num_ranks + rank: reply_list for index, reply_list in replies.items()})
        return {index: shared[index * num_ranks + rank] for index in requests}

    def _reset(self, episodes: list[_Episode], size: int, seconds: dict[str, float]) -> list[Prompt]:
        """Call `reset`; return the prompts with the returned texts, which must be equal for all answers to a prompt."""
        requests = {episode.index: [Request(RESET, episode.prompt.row)] for episode in episodes}
        replies = self._call_environments(requests, seconds)
        reset_prompts = []
        for start in range(0, len(episodes), size):
            prompts: dict[str | None, Prompt] = {}  # by the returned text
            for episode in episodes[start : start + size]:
                [reply] = replies[episode.index]
                text = reply.value or None
                if reply.error is not None:
                    episode.close(reason=f"{RESET}: {reply.error}")
                elif prompts and text not in prompts:
                    episode.close(reason=f"{RESET} returned another text than for an earlier answer to the prompt")
                else:
                    try:
                        if text not in prompts:
                            prompts[text] = self._extend_prompt(episode.prompt, text, reply.num_left_out)
                    except RowProblem as problem:
                        episode.close(reason=f"{RESET}: {problem}")
                    else:
                        episode.prompt = prompts[text]
            reset_prompts.append(next(iter(prompts.values()), episodes[start].prompt))
        return reset_prompts

    def _extend_prompt(self, prompt: Prompt, text: str | None, num_left_out: int) -> Prompt:
        if num_left_out:
            raise RowProblem(f"it returned {len(text) + num_left_out} characters, but {MAX_CHARACTERS} are allowed")
        return prompt if text is None else self._data.codec.prompt_with(prompt, text)

    def _execute_calls(self, episodes: list[_Episode], seconds: dict[str, float]) -> None:
        """Execute the calls of the last turns, and append the results."""
        requests = {
            episode.index: [Request(call.name, call.arguments) for call in episode.calls if call.problem is None]
            for episode in episodes}
        replies = self._call_environments(requests, seconds)
        for episode in episodes:
            call_replies, results = iter(replies[episode.index]), []
            for call in episode.calls:
                reply = Reply(error=call.problem) if call.problem is not None else next(call_replies)
                episode.counts["calls"] += 1
                if reply.has_ended:
                    episode.counts["failures"] += 1
                    episode.close(reason=f"{call.name}: {reply.error}")
                    break
                has_failed = reply.error is not None
                episode.counts["failures"] += has_failed
                text = json.dumps({"error": reply.error}, ensure_ascii=False) if has_failed else reply.value
                results.append((call.name, text, reply.num_left_out))
            if episode.is_open:
                self._add_results(episode, results)

    def _add_results(self, episode: _Episode, results: list[tuple[str, str, int]]) -> None:
        """Append tool results (name, text, characters left out). They get at most half of the remaining tokens."""

        def encode(num_characters: int) -> list[int]:
            messages: list[Message] = [
                {"role": "tool", "name": name, "content": _truncate(text, num_left_out, num_characters)}
                for name, text, num_left_out in results]
            return self._encoder.tool_turns(messages)

        max_tokens, num_characters = (self._limit - len(episode.tokens)) // 2, max(len(text) for _, text, _ in results)
        try:
            num_characters, ids = _fit_characters(encode, num_characters, max_tokens)
        except RowProblem as problem:
            return episode.close(reason=str(problem))
        episode.counts["cut"] += sum(num_left_out > 0 or len(text) > num_characters
                                     for _, text, num_left_out in results)
        if len(ids) > max_tokens:
            return episode.close()
        episode.add(ids, [0.0] * len(ids), [np.nan] * len(ids), False)
        episode.turn_start, episode.calls = len(episode.tokens), []
        return None

    def _score(self, episodes: list[_Episode], seconds: dict[str, float]) -> None:
        """Set the rewards that environments give."""
        scorable = [episode for episode in episodes if self._data.is_scored_by_environment and episode.reason is None]
        replies = self._call_environments({episode.index: [Request(SCORE, {})] for episode in scorable}, seconds)
        for episode in scorable:
            [reply] = replies[episode.index]
            episode.reward, episode.reason = reply.value, reply.error

    # Sampling --------------------------------------------------------------------------------------------------------

    def _token_budget(self, episodes: list[_Episode]) -> int | None:
        """Return how many tokens to sample next, equal in all processes; None if no answer is open in any of them."""
        open_episodes = [episode for episode in episodes if episode.is_open]
        remaining = [self._limit - len(episode.tokens) for episode in open_episodes]
        # If a batch has prompts of different lengths, the longest must stay within `max_length`.
        free = [self._data.max_length - len(episode.prompt.ids) - len(episode.tokens) for episode in open_episodes]
        limits = self._policy.gather({self._policy.rank: (max(remaining), min(free)) if remaining else None}).values()
        open_limits = [limit for limit in limits if limit is not None]
        if not open_limits:
            return None
        max_remaining, budget = max(limit for limit, _ in open_limits), self._limit
        while budget // 2 >= max_remaining:  # few different sizes, as JAX compiles a program for each
            budget //= 2
        return min(budget, *(limit for _, limit in open_limits))

    def _sample_turns(self, episodes: list[_Episode], budget: int, is_greedy: bool, seconds: dict[str, float]) -> None:
        """Sample up to `budget` tokens for each answer, and read the calls of turns that have ended."""
        start, uniforms = time.perf_counter(), None
        if not is_greedy:
            uniforms = np.zeros((len(episodes), budget), np.float32)  # numbers past the end of an answer are not used
            for row, episode in zip(uniforms, episodes, strict=True):
                remaining = episode.uniforms[len(episode.tokens) : len(episode.tokens) + budget]
                row[: len(remaining)] = remaining
        sampled = self._policy.draw([[*episode.prompt.ids, *episode.tokens] for episode in episodes], uniforms,
                                    self._task.temperature, budget, self._data.codec.stop_token_ids)
        for episode, answer in zip(episodes, sampled, strict=True):
            self._append_sampled(episode, answer)
        seconds["drawing"] += time.perf_counter() - start

    def _append_sampled(self, episode: _Episode, sampled: SampledAnswer) -> None:
        num_left = self._limit - len(episode.tokens)
        episode.add(sampled.tokens[:num_left].tolist(), sampled.logps[:num_left].tolist(),
                    sampled.entropies[:num_left].tolist(), True)
        if not (sampled.ended and len(sampled.tokens) <= num_left):
            if len(sampled.tokens) >= num_left or not len(sampled.tokens):
                episode.close()
            return
        episode.counts["turns"] += 1
        calls = self._read_calls(episode.tokens[episode.turn_start :]) if self._tools else []
        if not calls:
            episode.close(ended=True)
        elif episode.counts["turns"] == self._task.max_turns:
            episode.close()
        episode.calls = calls if episode.is_open else []

    def _read_calls(self, tokens: list[int]) -> list[Call]:
        names, [text] = ", ".join(self._tools), self._data.codec.decode_answers([tokens])
        return [call if call.problem is not None or call.name in self._tools else
                call._replace(problem=f"there is no tool {call.name}, only {names}")
                for call in read_calls(text)]

    def _to_answer(self, episode: _Episode) -> Answer:
        is_scored = self._data.is_scored_by_environment
        [text] = self._data.codec.decode_answers([episode.tokens[episode.turn_start :]])
        return Answer(
            np.array(episode.tokens, np.int32), np.array(episode.logps, np.float32),
            np.array(episode.entropies, np.float32), np.array(episode.is_sampled, bool), episode.ended, text,
            rewards={ENVIRONMENT: episode.reward} if is_scored else {},
            reasons={} if episode.reason is None else {ENVIRONMENT: episode.reason}, tools=episode.counts,
            full_text=self._data.tokenizer.decode(episode.tokens))


def _truncate(text: str, num_left_out: int, max_characters: int) -> str:
    """Return the start of a text, with a note of how much is left out."""
    start = text[:max_characters]
    num_left_out += len(text) - len(start)
    return f"{start}\n[{num_left_out} characters left out]" if num_left_out else start


def _fit_characters(encode: Callable[[int], list[int]], max_characters: int, max_tokens: int) -> tuple[int, list[int]]:
    """Return how many characters of each text fit into `max_tokens`, and the tokens. Even 0 characters may not fit.

    Args:
        encode: Returns the tokens of the texts truncated to a number of characters.
        max_characters: Length of the longest text in characters.
        max_tokens: Maximum number of tokens.
    """
    if len(ids := encode(max_characters)) <= max_tokens or not max_characters:
        return max_characters, ids
    ids, low, high = encode(0), 0, max_characters
    while len(ids) <= max_tokens and high - low > 1:
        middle = (low + high) // 2
        if len(candidate := encode(middle)) <= max_tokens:
            ids, low = candidate, middle
        else:
            high = middle
    return low, ids
