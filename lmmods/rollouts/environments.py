"""Environments of the user's own, called as TRL calls them: `reset`, methods that are tools, `get_reward`.

A process imports the module and is forked for each answer. So environments all begin in the same state, one that hangs
is killed without the others, and what one does to its process reaches no other answer.
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
from lmmods.rollouts.reward_processes import LOADING, Outcome, Server, attempt, outcome, receive, send
from lmmods.rollouts.sandbox import ENDING, begin, ends_within, how_it_ended, kill_group, process_variables

KEY = "model.environment"
ENVIRONMENT = "environment"  # name of its reward, and of why an answer has none
RESET, SCORE = "reset", "get_reward"  # methods that are no tools
LONGEST = 100_000  # characters of a text that are handed on


class Facts(NamedTuple):
    """What environments of a class offer.

    Args:
        tools: Specifications of the tools, [{"type": "function", "function": {...}}].
        scores: True if they give a reward.
    """

    tools: list[dict[str, Any]]
    scores: bool


class Request(NamedTuple):
    """A call of a method.

    Args:
        method: `reset`, `get_reward` or a tool; None asks for the `Facts`.
        arguments: By name; for `reset` those that it does not take are left out.
    """

    method: str | None
    arguments: dict[str, Any]


class Reply(NamedTuple):
    """What a call gave.

    Args:
        value: A text, or None of `reset`; of `get_reward` a number or None.
        error: Why it failed; None if it did not.
        has_ended: True if the environment is gone, because it hung or its process ended.
        left_out: Characters of the text beyond `LONGEST`.
    """

    value: str | float | None = None
    error: str | None = None
    has_ended: bool = False
    left_out: int = 0


# ---------------------------------------------------------------------------------------------------------------------
# In the processes


def serve(connection: int, lifeline: int) -> None:
    """Import what makes environments, then fork for each of them, and end the forks, until the connection closes.

    Args:
        connection: As of `Server`. The import path comes first; then None for a fork, whose connection follows and
            whose id is sent back, or the id of a fork to end and the seconds that it may take to do so by itself.
        lifeline: As of `Server`.
    """
    begin(lifeline)
    trainer = Connection(connection)
    os.set_inheritable(connection, False)
    make = attempt(partial(_import, receive(trainer)))
    if isinstance(make, Outcome):
        return send(trainer, make.reason)
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
            # Opened anew: a pipe that is open kills one group of processes, and each fork is a group.
            begin(os.open(f"/dev/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK))
            _serve(Connection(handle), make)
            os._exit(0)
        os.close(handle)
        send(trainer, pid)
    return None


def _end(pid: int, seconds: float) -> str:
    """End a fork and its group; return how it ended."""
    by_itself = ends_within(pid, seconds)
    kill_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)  # it may not have made its group yet
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return how_it_ended(status if by_itself else None)


def _import(path: str) -> Callable[[], Any]:
    made = import_name(path)
    if not callable(made):
        raise TypeError(f"it is no class or function, but {type(made).__name__}")
    return made


def _serve(trainer: Connection, make: Callable[[], Any]) -> None:
    """Call the methods of an environment until the connection closes."""
    pid = os.getpid()
    os.register_at_fork(after_in_child=trainer.close)
    random.seed(0)  # a fork has another state otherwise
    environment: Any = None
    with asyncio.Runner() as runner:
        while (request := receive(trainer)) is not None:
            if environment is None:
                environment = attempt(make)
            if isinstance(environment, Outcome):
                reply = {"error": environment.reason}
            elif request.method is None:
                facts = attempt(partial(_facts, environment))
                reply = {"error": facts.reason} if isinstance(facts, Outcome) else {"value": facts}
            else:
                reply = _reply(partial(_result, environment, request, runner), request.method)
            if os.getpid() != pid:  # a fork that a method has made, and that returned from it
                os._exit(0)
            send(trainer, reply)


def _facts(environment: Any) -> tuple[list[dict[str, Any]], bool]:
    from transformers.utils import get_json_schema

    methods = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    if RESET not in methods:
        raise TypeError(f"{type(environment).__name__} has no method {RESET}")
    tools = []
    for name in methods:
        if not name.startswith("_") and name not in (RESET, SCORE):
            try:
                tools.append(get_json_schema(getattr(environment, name)))
            except Exception as error:  # of several kinds, which transformers does not name
                raise TypeError(f"{name} cannot be a tool: {error}") from error
    return tools, SCORE in methods


def _result(environment: Any, request: Request, runner: asyncio.Runner) -> Any:
    method, given = getattr(environment, request.method), request.arguments
    if request.method == RESET:
        parameters = inspect.signature(method).parameters.values()
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            given = {name: value for name, value in given.items() if name in {each.name for each in parameters}}
    result = method(**given)
    return runner.run(wait_for(result)) if inspect.isawaitable(result) else result


def _reply(call: Callable[[], Any], method: str) -> dict[str, Any]:
    result = attempt(call)
    if isinstance(result, Outcome):
        return {"error": result.reason}
    if method == SCORE:
        found = outcome(result)
        return {"value": found.value, "error": found.reason}
    if method == RESET and result is None:
        return {}
    if method == RESET and not isinstance(result, str):
        return {"error": f"{RESET} returned {type(result).__name__}, but must return a text or None"}
    text = attempt(partial(_text, result))
    if isinstance(text, Outcome):
        return {"error": text.reason}
    return {"value": text[:LONGEST], "left_out": max(len(text) - LONGEST, 0)}


def _text(result: Any) -> str:
    if not isinstance(result, str):
        try:
            result = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            result = str(result)
    return result.encode("utf-8", "replace").decode()  # half characters


# ---------------------------------------------------------------------------------------------------------------------
# In the trainer


class _Environment(NamedTuple):
    connection: Connection
    pid: int


class Environments:
    """The environments of answers, by number. Each is made by its first request, in a process of its own.

    Args:
        path: Import path of a class, or of a function without arguments.
        timeout: Seconds that a call may take; the first one makes the environment, too.
        count: How many are called at once.

    Raises:
        UserError: It is not trusted, or cannot be imported.
    """

    def __init__(self, path: str, timeout: float, count: int) -> None:
        refuse_function(KEY, path)
        self._path, self._timeout, self._count = path, timeout, count
        self._open, self._is_closed = dict[int, _Environment](), False
        self._folder = tempfile.TemporaryDirectory(prefix="lmmods-environments-", ignore_cleanup_errors=True)
        self._first = Server("lmmods.rollouts.environments.serve", process_variables(self._folder.name))
        try:
            self._first.connection.send(path)
            is_late = not self._first.connection.poll(LOADING)
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
        """Ids of the processes."""
        return [self._first.pid, *(each.pid for each in self._open.values())]

    def facts(self) -> Facts:
        """Return what the environments offer. Raises UserError: one cannot be made, or a method cannot be a tool."""
        [reply] = self.ask({-1: [Request(None, {})]}, LOADING)[-1]
        self.end(-1)
        if reply.error is not None:
            raise UserError(f"{KEY}: {self._path}: {reply.error}")
        return Facts(*reply.value)

    def ask(self, requests: Mapping[int, list[Request]], timeout: float | None = None) -> dict[int, list[Reply]]:
        """Call methods of environments, those of each in turn.

        Args:
            requests: By the number of the environment.
            timeout: Seconds for each in place of the usual ones.

        Returns:
            The replies to the requests of each, up to one that ended it.
        """
        limit = self._timeout if timeout is None else timeout
        waiting, replies = deque(number for number in requests if requests[number]), {key: [] for key in requests}
        deadlines: dict[int, float] = {}
        try:
            while waiting or deadlines:
                while waiting and len(deadlines) < self._count:
                    self._send(waiting.popleft(), requests, replies, deadlines, limit)
                if not deadlines:
                    continue
                soonest = min(deadlines.values()) - time.monotonic()
                wait([self._open[number].connection for number in deadlines], max(soonest, 0.0))
                for number in list(deadlines):
                    if self._open[number].connection.poll():
                        self._receive(number, requests, replies, deadlines, limit)
                    elif deadlines[number] <= time.monotonic():
                        del deadlines[number]
                        self.end(number)
                        replies[number].append(Reply(error=f"took longer than {limit:g} s", has_ended=True))
        except BaseException:  # their replies must not be taken for those to later requests
            for number in deadlines:
                self.end(number)
            raise
        return replies

    def _send(self, number: int, requests: Mapping[int, list[Request]], replies: dict[int, list[Reply]],
              deadlines: dict[int, float], limit: float) -> None:
        """Send the next request to an environment, which is forked if there is none."""
        if number not in self._open:
            self._open[number] = self._fork()
        try:
            self._open[number].connection.send(requests[number][len(replies[number])])
            deadlines[number] = time.monotonic() + limit
        except OSError:
            replies[number].append(Reply(error=self.end(number, ENDING), has_ended=True))

    def _receive(self, number: int, requests: Mapping[int, list[Request]], replies: dict[int, list[Reply]],
                 deadlines: dict[int, float], limit: float) -> None:
        del deadlines[number]
        try:
            replies[number].append(Reply(**json.loads(self._open[number].connection.recv_bytes())))
        except (EOFError, OSError, ValueError, TypeError):
            replies[number].append(Reply(error=self.end(number, ENDING), has_ended=True))
        else:
            if len(replies[number]) < len(requests[number]):
                self._send(number, requests, replies, deadlines, limit)

    def end(self, number: int, seconds: float = 0.0) -> str:
        """End an environment, at once or after it had some seconds to do so by itself; return how it ended."""
        if number not in self._open:
            return ""
        environment = self._open.pop(number)
        environment.connection.close()
        return self._request((environment.pid, seconds))

    def close(self, seconds: float = 0.0) -> str:
        """End all processes and what they have started, at once or after the first had some seconds to end by itself.

        Returns:
            How the first one ended; empty if that is known.
        """
        if self._is_closed:
            return ""
        self._is_closed = True
        for environment in self._open.values():
            environment.connection.close()
        self._open.clear()
        how = self._first.end(seconds)  # and the forks
        self._folder.cleanup()
        return how

    def _fork(self) -> _Environment:
        ours, theirs = Pipe()
        with theirs:
            return _Environment(ours, self._request((None, 0.0), theirs.fileno()))

    def _request(self, message: Any = None, handle: int | None = None) -> Any:
        """Send a message, if any, to the first process, and return its next one. Raises UserError if it has ended."""
        try:
            if message is not None:
                self._first.connection.send(message)
            if handle is not None:
                send_handle(self._first.connection, handle, self._first.pid)
            return json.loads(self._first.connection.recv_bytes())
        except (EOFError, OSError) as error:
            how = self.close(ENDING)
            raise UserError(f"{KEY}: {self._path} {how}, of which all environments are forks.") from error
