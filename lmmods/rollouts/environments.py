"""Run the user's environments, with the interface of TRL: `reset`, methods that are tools, `get_reward`.

One process imports the module and is forked for each answer. So all environments start in the same state, one that
hangs is killed alone, and nothing that one does to its process affects another answer.
"""

import asyncio
import contextlib
import inspect
import json
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple

from lmmods.core.errors import UserError
from lmmods.recipe.trust import refuse_function
from lmmods.rollouts.own_functions import import_name, wait_for
from lmmods.rollouts.reward_processes import LOADING, Outcome, Server, attempt, receive, send, to_outcome
from lmmods.rollouts.sandbox import ENDING, begin, ends_within, how_it_ended, kill_group, process_variables

KEY = "model.environment"
ENVIRONMENT = "environment"  # name of its reward, and key of the reason if the reward is missing
RESET, SCORE = "reset", "get_reward"  # methods that are not tools
MAX_CHARACTERS = 100_000  # of a result; the rest is left out


class Facts(NamedTuple):
    """What the environments of a class offer.

    Args:
        tools: Tool schemas, [{"type": "function", "function": {...}}].
        gives_reward: True if they have a method `get_reward`.
    """

    tools: list[dict[str, Any]]
    gives_reward: bool


class Request(NamedTuple):
    """A method call.

    Args:
        method: `reset`, `get_reward` or a tool; None requests the `Facts`.
        arguments: Keyword arguments. Those that `reset` does not accept are dropped.
    """

    method: str | None
    arguments: dict[str, Any]


class Reply(NamedTuple):
    """The result of a method call.

    Args:
        value: A string from a tool, a string or None from `reset`, a number or None from `get_reward`.
        error: Why the call failed; None if it succeeded.
        has_ended: True if the environment no longer exists, because it hung or its process ended.
        num_left_out: Number of characters of the string beyond `MAX_CHARACTERS`.
    """

    value: str | float | None = None
    error: str | None = None
    has_ended: bool = False
    num_left_out: int = 0


# ---------------------------------------------------------------------------------------------------------------------
# In the processes


def serve(connection: int, lifeline: int) -> None:
    """Import the environment class, then start and end a fork for each environment until the connection closes.

    Args:
        connection: See `Server`. The first message is the import path. Each later one is a pair (pid, seconds): None
            starts a fork, whose connection follows and whose id is sent back; an id ends that fork, which has these
            seconds to exit on its own.
        lifeline: See `Server`.
    """
    begin(lifeline)
    trainer = Connection(connection)
    os.set_inheritable(connection, False)
    factory = attempt(partial(_import, receive(trainer)))
    if isinstance(factory, Outcome):
        return send(trainer, factory.reason)
    send(trainer, None)
    while (message := receive(trainer)) is not None:
        pid, seconds = message
        if pid is not None:
            send(trainer, _end(pid, seconds))
            continue
        handle = recv_handle(trainer)
        pid = os.fork()
        if not pid:
            trainer.close()
            os.setsid()
            # Opened again, as an open pipe signals only one process group, and each fork is a group.
            begin(os.open(f"/dev/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK))
            _serve(Connection(handle), factory)
            os._exit(0)
        os.close(handle)
        send(trainer, pid)
    return None


def _end(pid: int, seconds: float) -> str:
    """End a fork and its process group; return how it ended."""
    has_exited = ends_within(pid, seconds)
    kill_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)  # it may not have created its group yet
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return how_it_ended(status if has_exited else None)


def _import(path: str) -> Callable[[], Any]:
    factory = import_name(path)
    if not callable(factory):
        raise TypeError(f"it is not a class or function, but {type(factory).__name__}")
    return factory


def _serve(trainer: Connection, factory: Callable[[], Any]) -> None:
    """Call the methods of an environment until the connection closes."""
    pid = os.getpid()
    os.register_at_fork(after_in_child=trainer.close)
    random.seed(0)  # Python reseeds it in every fork
    environment: Any = None
    with asyncio.Runner() as runner:
        while (request := receive(trainer)) is not None:
            if environment is None:
                environment = attempt(factory)
            if isinstance(environment, Outcome):
                reply = {"error": environment.reason}
            elif request.method is None:
                facts = attempt(partial(_read_facts, environment))
                reply = {"error": facts.reason} if isinstance(facts, Outcome) else {"value": facts}
            else:
                reply = _build_reply(partial(_call_method, environment, request, runner), request.method)
            if os.getpid() != pid:  # a fork that a method has started, and that returned from it
                os._exit(0)
            send(trainer, reply)


def _read_facts(environment: Any) -> tuple[list[dict[str, Any]], bool]:
    from transformers.utils import get_json_schema

    methods = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    if RESET not in methods:
        raise TypeError(f"{type(environment).__name__} has no method {RESET}")
    tools = []
    for name in methods:
        if not name.startswith("_") and name not in (RESET, SCORE):
            try:
                tools.append(get_json_schema(getattr(environment, name)))
            except Exception as error:  # transformers does not document which
                raise TypeError(f"{name} cannot be a tool: {error}") from error
    return tools, SCORE in methods


def _call_method(environment: Any, request: Request, runner: asyncio.Runner) -> Any:
    method, arguments = getattr(environment, request.method), request.arguments
    if request.method == RESET:
        parameters = inspect.signature(method).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            accepted = {parameter.name for parameter in parameters}
            arguments = {name: value for name, value in arguments.items() if name in accepted}
    result = method(**arguments)
    return runner.run(wait_for(result)) if inspect.isawaitable(result) else result


def _build_reply(call: Callable[[], Any], method: str) -> dict[str, Any]:
    result = attempt(call)
    if isinstance(result, Outcome):
        return {"error": result.reason}
    if method == SCORE:
        score = to_outcome(result)
        return {"value": score.value, "error": score.reason}
    if method == RESET and result is None:
        return {}
    if method == RESET and not isinstance(result, str):
        return {"error": f"{RESET} returned {type(result).__name__}, but must return a string or None"}
    text = attempt(partial(_to_text, result))
    if isinstance(text, Outcome):
        return {"error": text.reason}
    return {"value": text[:MAX_CHARACTERS], "num_left_out": max(len(text) - MAX_CHARACTERS, 0)}


def _to_text(result: Any) -> str:
    if not isinstance(result, str):
        try:
            result = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            result = str(result)
    return result.encode("utf-8", "replace").decode()  # a lone surrogate is not valid UTF-8


# ---------------------------------------------------------------------------------------------------------------------
# In the trainer


class _Environment(NamedTuple):
    connection: Connection
    pid: int


class Environments:
    """Environments by index, one for each answer. The first request to an index starts its process.

    Args:
        path: Import path of a class, or of a function without arguments.
        timeout: Maximum seconds for a call. The first call also creates the environment.
        max_parallel: Maximum number of environments that are called at the same time.

    Raises:
        UserError: The class is not trusted, or cannot be imported.
    """

    def __init__(self, path: str, timeout: float, max_parallel: int) -> None:
        refuse_function(KEY, path)
        self._path, self._timeout, self._max_parallel = path, timeout, max_parallel
        self._environments, self._is_closed = dict[int, _Environment](), False
        self._folder = tempfile.TemporaryDirectory(prefix="lmmods-environments-", ignore_cleanup_errors=True)
        self._server = Server("lmmods.rollouts.environments.serve", process_variables(self._folder.name))
        try:
            self._server.connection.send(path)
            is_late = not self._server.connection.poll(LOADING)
            reason = f"it took longer than {LOADING:g} s" if is_late else self._request()
            if reason is not None:
                raise UserError(f"{KEY}: {path} cannot be imported: {reason}")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Environments":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids; the first one is forked for the others."""
        return [self._server.pid, *(environment.pid for environment in self._environments.values())]

    def read_facts(self) -> Facts:
        """Return what environments offer. Raises UserError if one cannot be created or a method cannot be a tool."""
        [reply] = self.ask({-1: [Request(None, {})]}, LOADING)[-1]
        self.end(-1)
        if reply.error is not None:
            raise UserError(f"{KEY}: {self._path}: {reply.error}")
        return Facts(*reply.value)

    def ask(self, requests: Mapping[int, list[Request]], timeout: float | None = None) -> dict[int, list[Reply]]:
        """Call methods of several environments at the same time, and those of one environment in order.

        Args:
            requests: Requests by the index of the environment.
            timeout: Maximum seconds for a call. Default: the timeout of the environments.

        Returns:
            Replies by the index of the environment; if it ended, none follows that reply.
        """
        limit = self._timeout if timeout is None else timeout
        waiting, replies = deque(index for index in requests if requests[index]), {index: [] for index in requests}
        deadlines: dict[int, float] = {}
        try:
            while waiting or deadlines:
                while waiting and len(deadlines) < self._max_parallel:
                    self._send(waiting.popleft(), requests, replies, deadlines, limit)
                if not deadlines:
                    continue
                soonest = min(deadlines.values()) - time.monotonic()
                wait([self._environments[index].connection for index in deadlines], max(soonest, 0.0))
                for index in list(deadlines):
                    if self._environments[index].connection.poll():
                        self._receive(index, requests, replies, deadlines, limit)
                    elif deadlines[index] <= time.monotonic():
                        del deadlines[index]
                        self.end(index)
                        replies[index].append(Reply(error=f"took longer than {limit:g} s", has_ended=True))
        except BaseException:  # a pending reply would be taken for the reply to a later request
            for index in deadlines:
                self.end(index)
            raise
        return replies

    def _send(self, index: int, requests: Mapping[int, list[Request]], replies: dict[int, list[Reply]],
              deadlines: dict[int, float], limit: float) -> None:
        """Send the next request to an environment; start its fork if there is none."""
        if index not in self._environments:
            self._environments[index] = self._fork()
        try:
            self._environments[index].connection.send(requests[index][len(replies[index])])
            deadlines[index] = time.monotonic() + limit
        except OSError:
            replies[index].append(Reply(error=self.end(index, ENDING), has_ended=True))

    def _receive(self, index: int, requests: Mapping[int, list[Request]], replies: dict[int, list[Reply]],
                 deadlines: dict[int, float], limit: float) -> None:
        del deadlines[index]
        try:
            replies[index].append(Reply(**json.loads(self._environments[index].connection.recv_bytes())))
        except (EOFError, OSError, ValueError, TypeError):
            replies[index].append(Reply(error=self.end(index, ENDING), has_ended=True))
        else:
            if len(replies[index]) < len(requests[index]):
                self._send(index, requests, replies, deadlines, limit)

    def end(self, index: int, seconds: float = 0.0) -> str:
        """End an environment and return how it ended. It has `seconds` to exit on its own."""
        if index not in self._environments:
            return ""
        environment = self._environments.pop(index)
        environment.connection.close()
        return self._request((environment.pid, seconds))

    def close(self, seconds: float = 0.0) -> str:
        """End all processes and everything that they have started. The first has `seconds` to exit on its own.

        Returns:
            How the first process ended; empty if it was closed before.
        """
        if self._is_closed:
            return ""
        self._is_closed = True
        for environment in self._environments.values():
            environment.connection.close()
        self._environments.clear()
        how = self._server.end(seconds)  # and the forks
        self._folder.cleanup()
        return how

    def _fork(self) -> _Environment:
        local, remote = Pipe()
        with remote:
            return _Environment(local, self._request((None, 0.0), remote.fileno()))

    def _request(self, message: Any = None, handle: int | None = None) -> Any:
        """Send a message, if any, to the first process and return its reply. Raises UserError if it has ended."""
        try:
            if message is not None:
                self._server.connection.send(message)
            if handle is not None:
                send_handle(self._server.connection, handle, self._server.pid)
            return json.loads(self._server.connection.recv_bytes())
        except (EOFError, OSError) as error:
            how = self.close(ENDING)
            raise UserError(f"{KEY}: {self._path} {how}, so no environment can start. Check its code and the memory of "
                            "this machine, then resume from the last checkpoint.") from error
