"""Processes that score answers, and are killed where one hangs.

`sandbox` starts and ends them; only the trainer keeps time.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol

from lmmods.core.errors import first_line
from lmmods.rollouts.named_rewards import Unscorable
from lmmods.rollouts.sandbox import ENDING, MEMORY, Process, begin, how_it_ended, process_variables

LOADING = 120.0  # seconds until the function of a reward must be imported
WHOLE = 300.0  # seconds that a call with many answers may take, if that is less than their own limits come to
CLOSING = 5.0  # seconds that a process may take to end by itself
PIECE = 16  # answers that are handed to a process at once
LONGEST = 300  # characters of a reason


class Scorer(Protocol):
    """What is sent to a process to score answers there. Equal ones are loaded once."""

    def load(self) -> Callable[[list[Any]], list[Any]]:
        """Return a function from inputs, one an answer, to as many numbers; None for what has no number."""


class Outcome(NamedTuple):
    """Score of an answer; None if the reward does not apply. If it has failed for a reason, the lowest of its batch."""

    value: float | None = None
    reason: str | None = None


@dataclass
class Batch:
    """Answers for one reward.

    Args:
        scorer: The reward.
        inputs: What it needs of each answer.
        limit: Seconds for each.
        own: Name of the process that it has for itself; None shares the others with all such batches. Such a reward is
            called with all inputs at once; if that fails, with one after the other, so that only the bad ones fail.
        lowest: Value of an answer at which the process hangs or ends; None if it has none. Where only the answer can be
            the cause, it must not pay: in place of a bad value, none at all would.
    """

    scorer: Scorer
    inputs: list[Any]
    limit: float
    own: str | None = None
    lowest: float | None = None


@dataclass(eq=False)
class _Task:
    """Places of inputs of a batch that a process scores: in one call if `whole`, else one by one.

    Args:
        is_retried: The process has ended before it began with them, and this is another one.
    """

    batch: int
    places: deque[int]
    whole: bool = False
    is_retried: bool = False


# ---------------------------------------------------------------------------------------------------------------------
# In the process


def work(connection: int, lifeline: int) -> None:
    """Score answers until the connection closes.

    Args:
        connection: File descriptor of the end of a connection to the trainer.
        lifeline: That of a pipe whose other end the trainer holds as long as it lives.
    """
    begin(lifeline)
    home, pid, loaded = os.getcwd(), os.getpid(), {}
    trainer = Connection(connection)
    # What a function starts must not hold the connection open when this process ends.
    os.set_inheritable(connection, False)
    os.register_at_fork(after_in_child=trainer.close)
    while (message := receive(trainer)) is not None:
        scorer, inputs, whole = message
        os.chdir(home)
        key, failure = repr(scorer), None
        if key not in loaded:
            found = attempt(scorer.load)
            if isinstance(found, Outcome):
                failure = found.reason
            else:
                loaded[key] = found
        send(trainer, failure)
        for part in ([inputs] if whole else [[each] for each in inputs]) if failure is None else []:
            values = attempt(partial(loaded[key], part))
            if os.getpid() != pid:  # a fork that the function has made, and that returned from it
                os._exit(0)
            send(trainer, values.reason if isinstance(values, Outcome) else [outcome(value) for value in values])


def receive(trainer: Connection) -> Any:
    """Return the next message, which is never None; None if the connection is closed."""
    try:
        return trainer.recv()
    except EOFError:
        return None


def send(trainer: Connection, message: Any) -> None:
    """Send plain values to the trainer."""
    trainer.send_bytes(json.dumps(message).encode())  # nothing that code could be in


def attempt(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the outcome of one that failed; `sys.exit` is a failure like others."""
    try:
        return call()
    except BaseException as error:
        return Outcome(reason=_reason(error))


def _reason(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return f"took more than {MEMORY // 2**30} GiB of memory"
    line = first_line(error)
    return (line if isinstance(error, Unscorable) else f"{type(error).__name__}: {line}".removesuffix(": "))[:LONGEST]


def outcome(value: Any) -> Outcome:
    """Check a value that a function has returned; numbers of libraries count as numbers."""
    if value is None:
        return Outcome()
    if isinstance(value, str | bytes):
        return Outcome(reason=f"returned {value!r}, which is no number"[:LONGEST])
    number = attempt(lambda: float(value))
    if isinstance(number, Outcome):
        return Outcome(reason=f"returned {type(value).__name__}, which is no number")
    # In float32, as which rewards are kept.
    return Outcome(number) if abs(number) < 3.4e38 else Outcome(reason=f"returned {number}")


# ---------------------------------------------------------------------------------------------------------------------
# In the trainer


class Server(Process):
    """A process that answers messages with a function of this project.

    Args:
        function: Import path of `function(connection, lifeline)`, with file descriptors as of `Process`.
        variables: Its environment.
    """

    def __init__(self, function: str, variables: dict[str, str]) -> None:
        module, _, name = function.rpartition(".")
        start = f"import sys; sys.path[:] = {sys.path!r}; from {module} import {name}; {name}(*map(int, sys.argv[1:]))"
        # What it prints goes to stderr: commands have results on stdout.
        super().__init__(["-c", start], variables, stdin=subprocess.DEVNULL, stdout=2)
        self.connection = Connection(self.channel.detach())

    def end(self, seconds: float = 0.0) -> str:
        """End the process as `Process` does; return how it ended."""
        self.connection.close()
        return how_it_ended(super().end(seconds))


class _Worker(Server):
    """A process that scores answers, with the task that it has."""

    def __init__(self, variables: dict[str, str]) -> None:
        super().__init__("lmmods.rollouts.reward_processes.work", variables)
        self.task: _Task | None = None
        self.is_loaded, self.deadline = False, 0.0

    def give(self, scorer: Scorer, inputs: list[Any], task: _Task) -> None:
        """Hand over a task. Raises OSError if the process has ended."""
        self.connection.send_bytes(pickle.dumps((scorer, inputs, task.whole)))
        self.task, self.is_loaded, self.deadline = task, False, time.monotonic() + LOADING


class RewardProcesses:
    """Processes that score answers. They start when they are first needed.

    Args:
        count: How many share the batches that have none of their own.
    """

    def __init__(self, count: int) -> None:
        # By number those that are shared, by the name of the reward the others.
        self._count, self._processes = count, dict[int | str, _Worker]()
        self._folder = tempfile.TemporaryDirectory(prefix="lmmods-rewards-", ignore_cleanup_errors=True)
        self._variables = process_variables(self._folder.name)

    def load(self, scorers: dict[str, Scorer]) -> dict[str, str | None]:
        """Load rewards, each in its own process, by its name; return why that failed, or None if it did not."""
        found = self.run([Batch(scorer, [], 0.0, own) for own, scorer in scorers.items()])
        return {own: outcomes[0].reason if outcomes else None for own, outcomes in zip(scorers, found, strict=True)}

    def run(self, batches: list[Batch]) -> list[list[Outcome]]:
        """Score answers; each list has the order of its inputs, whichever process was faster."""
        outcomes = [[Outcome() for _ in batch.inputs] for batch in batches]
        queue = deque(_tasks(batches))
        try:
            while queue or self._busy:
                self._hand_out(queue, batches)
                soonest = min(process.deadline for process in self._busy.values())
                wait([process.connection for process in self._busy.values()], max(0.0, soonest - time.monotonic()))
                for name, process in self._busy.items():
                    if process.connection.poll():
                        self._receive(name, batches, outcomes, queue)
                    elif process.deadline <= time.monotonic():
                        task, batch = process.task, batches[process.task.batch]
                        limit = _limit(batch, task) if process.is_loaded else LOADING
                        self._drop(name)
                        _fail(task, f"took longer than {limit:g} s", batches, outcomes, queue, process.is_loaded)
        except BaseException:  # what they are at must not be taken for answers of the next call
            for name in self._busy:
                self._drop(name)
            raise
        return outcomes

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that have started."""
        return [each.pid for each in self._processes.values()]

    def close(self) -> None:
        """End all processes, and what they have started."""
        for process in self._processes.values():
            process.connection.close()
        for name in list(self._processes):
            self._drop(name, CLOSING)
        self._folder.cleanup()

    @property
    def _busy(self) -> dict[int | str, _Worker]:
        return {name: process for name, process in self._processes.items() if process.task is not None}

    def _drop(self, name: int | str, seconds: float = 0.0) -> str:
        return self._processes.pop(name).end(seconds)

    def _hand_out(self, queue: deque[_Task], batches: list[Batch]) -> None:
        """Give tasks to the processes that are free."""
        for task in list(queue):
            own = batches[task.batch].own
            names = range(self._count) if own is None else [own]
            name = next((each for each in names if each not in self._busy), None)
            if name is not None:
                queue.remove(task)
                self._give(name, task, batches[task.batch])

    def _give(self, name: int | str, task: _Task, batch: Batch) -> None:
        inputs = [batch.inputs[place] for place in task.places]
        if name in self._processes:
            try:
                return self._processes[name].give(batch.scorer, inputs, task)
            except OSError:  # it ended after its last task, by what a function has left in it
                self._drop(name)
        self._processes[name] = _Worker(self._variables)
        self._processes[name].give(batch.scorer, inputs, task)

    def _receive(self, name: int | str, batches: list[Batch], outcomes: list[list[Outcome]],
                 queue: deque[_Task]) -> None:
        """Take a message: that the reward is loaded, or why not, or outcomes."""
        process = self._processes[name]
        task, batch = process.task, batches[process.task.batch]
        try:
            message = json.loads(process.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            reason = self._drop(name, ENDING)
            if process.is_loaded or task.is_retried:
                return _fail(task, reason, batches, outcomes, queue, process.is_loaded)
            task.is_retried = True  # what an earlier call has left in the process may have ended it
            return queue.appendleft(task)
        if isinstance(message, str) and (task.whole or not process.is_loaded):
            process.task = None
            return _fail(task, message, batches, outcomes, queue, process.is_loaded)
        if process.is_loaded:
            for value in [(None, message)] if isinstance(message, str) else message:
                outcomes[task.batch][task.places.popleft()] = Outcome(*value)
        process.is_loaded, process.deadline = True, time.monotonic() + _limit(batch, task)
        if not task.places:
            process.task = None


def _tasks(batches: Iterable[Batch]) -> list[_Task]:
    tasks = []
    for number, batch in enumerate(batches):
        places = range(len(batch.inputs))
        if batch.own is not None:
            tasks.append(_Task(number, deque(places), whole=len(places) > 1))
        else:
            tasks += [_Task(number, deque(places[start:start + PIECE])) for start in places[::PIECE]]
    return tasks


def _limit(batch: Batch, task: _Task) -> float:
    """Seconds for what is asked for next."""
    return min(batch.limit * len(task.places), max(batch.limit, WHOLE)) if task.whole else batch.limit


def _fail(task: _Task, reason: str, batches: list[Batch], outcomes: list[list[Outcome]], queue: deque[_Task],
          is_loaded: bool) -> None:
    """Note why a task failed: for its first answer, or for all if the reward is not even loaded. What is left is scored
    one by one.
    """
    found = outcomes[task.batch]
    if not is_loaded:
        for place in task.places:
            found[place] = Outcome(reason=f"cannot be loaded: {reason}")
        task.places.clear()
        if not batches[task.batch].inputs:  # there was nothing else to do
            found.append(Outcome(reason=reason))
    elif not task.whole:
        found[task.places.popleft()] = Outcome(batches[task.batch].lowest, reason)
    if task.places:
        queue.appendleft(_Task(task.batch, task.places))
