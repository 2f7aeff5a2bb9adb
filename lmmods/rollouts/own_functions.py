"""Call the user's reward functions, with the interface of TRL, in the processes of `reward_processes`."""

import asyncio
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

# Names of other arguments, so that no column of this name is passed.
RESERVED = ("prompt", "completion", "prompts", "completions", "completion_ids")


class Completion(NamedTuple):
    """Inputs of a user's reward function for one answer.

    Args:
        prompt: A string, or messages.
        text: The answer.
        ids: Token ids of the answer.
        row: The row of the prompt.
    """

    prompt: str | list[dict[str, Any]]
    text: str
    ids: list[int]
    row: dict[str, Any]


@dataclass(frozen=True)
class FunctionScorer:
    """Loads a user's function in the process that calls it.

    Args:
        path: Import path.
    """

    path: str

    def load(self) -> Callable[[list[Completion]], list[Any]]:
        """Return a function that scores answers in one call of the user's function.

        Raises:
            ImportError: The module or function does not exist.
            TypeError: It is not callable.
        """
        function = import_name(self.path)
        if not callable(function):
            raise TypeError(f"{self.path} is not a function, but {type(function).__name__}")
        return lambda answers: _score(function, answers)


def import_name(path: str) -> Any:
    """Return the object at an import path. Raises ImportError if the module or name does not exist."""
    module_name, _, name = path.rpartition(".")
    module = importlib.import_module(module_name)
    if not hasattr(module, name):
        raise ImportError(f"{module_name} has no {name}")
    return getattr(module, name)


def _score(function: Callable[..., Any], answers: list[Completion]) -> list[Any]:
    result = function(**_build_arguments(function, answers))
    if inspect.isawaitable(result):
        result = asyncio.run(wait_for(result))
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__iter__"):
        raise TypeError(f"it returned {type(result).__name__}, but must return a list of numbers")
    values = list(result)
    if len(values) != len(answers):
        raise ValueError(f"it returned {len(values)} values for {len(answers)} answers")
    return values


async def wait_for(result: Any) -> Any:
    """Await an awaitable; `asyncio.run` accepts only coroutines."""
    return await result


def _build_arguments(function: Callable[..., Any], answers: list[Completion]) -> dict[str, Any]:
    """Return the arguments of the call: all if the function has **kwargs, otherwise those that it names."""
    columns = dict.fromkeys(name for answer in answers for name in answer.row if name not in RESERVED)
    arguments = {
        "prompts": [answer.prompt for answer in answers],
        "completions": [answer.text if isinstance(answer.prompt, str) else
                        [{"role": "assistant", "content": answer.text}] for answer in answers],
        "completion_ids": [answer.ids for answer in answers],
        **{name: [answer.row.get(name) for answer in answers] for name in columns}}
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}
