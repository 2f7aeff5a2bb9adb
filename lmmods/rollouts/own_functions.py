"""Reward functions of the user's own, called as TRL calls them; they run in the processes of `reward_processes`."""

import asyncio
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

# Columns whose names the arguments have, or that they stand for.
TAKEN = ("prompt", "completion", "prompts", "completions", "completion_ids")


class Completion(NamedTuple):
    """What a function sees of an answer.

    Args:
        prompt: Text, or messages.
        text: The answer.
        ids: Its tokens.
        row: The row of its prompt.
    """

    prompt: str | list[dict[str, Any]]
    text: str
    ids: list[int]
    row: dict[str, Any]


@dataclass(frozen=True)
class FunctionScorer:
    """Loads a function, in the process that calls it.

    Args:
        path: Its import path.
    """

    path: str

    def load(self) -> Callable[[list[Completion]], list[Any]]:
        """Return a function that scores answers with one call of the user's.

        Raises:
            ImportError: There is no such module or function.
            TypeError: It cannot be called.
        """
        function = import_name(self.path)
        if not callable(function):
            raise TypeError(f"{self.path} is no function, but {type(function).__name__}")
        return lambda answers: _score(function, answers)


def import_name(path: str) -> Any:
    """Return what an import path names. Raises ImportError: There is no such module or name."""
    module, _, name = path.rpartition(".")
    imported = importlib.import_module(module)
    if not hasattr(imported, name):
        raise ImportError(f"{module} has no {name}")
    return getattr(imported, name)


def _score(function: Callable[..., Any], answers: list[Completion]) -> list[Any]:
    result = function(**_arguments(function, answers))
    if inspect.isawaitable(result):
        result = asyncio.run(wait_for(result))
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__iter__"):
        raise TypeError(f"it returned {type(result).__name__}, but must return a list of numbers")
    values = list(result)
    if len(values) != len(answers):
        raise ValueError(f"it returned {len(values)} values for {len(answers)} answers")
    return values


async def wait_for(result: Any) -> Any:
    """Await what a function returned, which may be no coroutine."""
    return await result


def _arguments(function: Callable[..., Any], answers: list[Completion]) -> dict[str, Any]:
    """Return the arguments of the call: all columns if the function takes any, else those that it names."""
    columns = dict.fromkeys(name for answer in answers for name in answer.row if name not in TAKEN)
    given = {
        "prompts": [answer.prompt for answer in answers],
        "completions": [answer.text if isinstance(answer.prompt, str) else
                        [{"role": "assistant", "content": answer.text}] for answer in answers],
        "completion_ids": [answer.ids for answer in answers],
        **{name: [answer.row.get(name) for answer in answers] for name in columns}}
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return given
    named = {each.name for each in parameters}
    return {name: value for name, value in given.items() if name in named}
