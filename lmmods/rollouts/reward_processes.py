"""Score answers in processes that are killed when they hang.

`sandbox` starts and ends the processes; only the trainer keeps time.
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

LOADING = 120.0  # maximum seconds for importing a reward's function
WHOLE = 300.0  # maximum seconds for a call with many answers, unless the limit of one is higher
CLOSING = 5.0  # seconds in which a process may exit on its own
CHUNK = 16  # number of answers that a process gets at once
MAX_REASON = 300  # characters


class Scorer(Protocol):
    """Loads a reward's function in a process, once for equal scorers."""

    def load(self) -> Callable[[list[Any]], list[Any]]:
        """Return a function from a list of inputs, one per answer, to a list of numbers; None is a missing score."""


class Outcome(NamedTuple):
    """An answer's score, None if it is missing, and the reason if scoring failed."""

    value: float | None = None
    reason: str | None = None


@dataclass
class Batch:
    """Answers for one reward.

    Args:
        scorer: The reward.
        inputs: Input of the reward for each answer.
        limit: Maximum seconds for each answer.
        own_process: Name of the reward's own process, which gets all inputs in one call. If that call fails, it gets
            them one by one, so that only the bad ones fail. None uses the shared processes.
        lowest: Score of an answer that makes the process hang or end; None if such an answer has no score. A named
            reward gives its lowest, as no score would be better for the answer than a low one.
    """

    scorer: Scorer
    inputs: list[Any]
    limit: float
    own_process: str | None = None
    lowest: float | None = None


@dataclass(eq=False)
class _Task:
    """Inputs of a batch that a process scores.

    Args:
        batch: Index of the batch.
        indices: Indices of the inputs that are not scored yet.
        is_whole: True for one call with all inputs, False for one call each.
        is_retried: True if a first process ended before it started with them.
    """

    batch: int
    indices: deque[int]
    is_whole: bool = False
    is_retried: bool = False


# ---------------------------------------------------------------------------------------------------------------------
# In the process


def work(connection: int, lifeline: int) -> None:
    """Score answers until the connection closes.

    Args:
        connection: File descriptor of the connection to the trainer.
        lifeline: File descriptor of a pipe whose other end is open as long as the trainer lives.
    """
    begin(lifeline)
    working_folder, pid, functions = os.getcwd(), os.getpid(), {}
    trainer = Connection(connection)
    # Otherwise, processes that a function starts would keep the connection open after this process ends.
    os.set_inheritable(connection, False)
    os.register_at_fork(after_in_child=trainer.close)
    while (message := receive(trainer)) is not None:
        scorer, inputs, is_whole = message
        os.chdir(working_folder)
        key, load_error = repr(scorer), None
        if key not in functions:
            function = attempt(scorer.load)
            if isinstance(function, Outcome):
                load_error = function.reason
            else:
                functions[key] = function
        send(trainer, load_error)
        for call_inputs in ([inputs] if is_whole else [[item] for item in inputs]) if load_error is None else []:
            values = attempt(partial(functions[key], call_inputs))
            if os.getpid() != pid:  # a fork that the function has started, and that returned from it
                os._exit(0)
            send(trainer, values.reason if isinstance(values, Outcome) else [to_outcome(value) for value in values])


def receive(trainer: Connection) -> Any:
    """Return the next message; None if the connection is closed."""
    try:
        return trainer.recv()
    except EOFError:
        return None


def send(trainer: Connection, message: Any) -> None:
    """Send plain values to the trainer."""
    trainer.send_bytes(json.dumps(message).encode())  # not a pickle, which could run code in the trainer


def attempt(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or an `Outcome` with the reason if it failed; `sys.exit` counts as a failure."""
    try:
        return call()
    except BaseException as error:
        return Outcome(reason=_reason(error))


def _reason(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return f"took more than {MEMORY // 2**30} GiB of memory"
    line = first_line(error)
    reason = line if isinstance(error, Unscorable) else f"{type(error).__name__}: {line}".removesuffix(": ")
    return reason[:MAX_REASON]


def to_outcome(value: Any) -> Outcome:
    """Convert a value that a function has returned; numbers of libraries count as numbers."""
    if value is None:
        return Outcome()
    if isinstance(value, str | bytes):
        return Outcome(reason=f"returned {value!r}, which is not a number"[:MAX_REASON])
    number = attempt(lambda: float(value))
    if isinstance(number, Outcome):
        return Outcome(reason=f"returned {type(value).__name__}, which is not a number")
    # Rewards are stored in float32, whose maximum this is.
    return Outcome(number) if abs(number) < 3.4e38 else Outcome(reason=f"returned {number}")


# ---------------------------------------------------------------------------------------------------------------------
# In the trainer


class Server(Process):
    """A process that runs a function of this project, which answers messages.

    Args:
        function: Import path of `function(connection, lifeline)`, with the file descriptors of `Process`.
        variables: Environment variables.
    """

    def __init__(self, function: str, variables: dict[str, str]) -> None:
        module, _, name = function.rpartition(".")
        code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import {name}; {name}(*map(int, sys.argv[1:]))"
        # Its prints go to stderr, as commands print their results on stdout.
        super().__init__(["-c", code], variables, stdin=subprocess.DEVNULL, stdout=2)
        self.connection = Connection(self.channel.detach())

    def end(self, seconds: float = 0.0) -> str:
        """End the process as in `Process`; return how it ended."""
        self.connection.close()
        return how_it_ended(super().end(seconds))


class _Worker(Server):
    """A process that scores answers, with its current task."""

    def __init__(self, variables: dict[str, str]) -> None:
        super().__init__("lmmods.rollouts.reward_processes.work", variables)
        self.task: _Task | None = None
        self.is_loaded, self.deadline = False, 0.0

    def give(self, scorer: Scorer, inputs: list[Any], task: _Task) -> None:
        """Send a task. Raises OSError if the process has ended."""
        self.connection.send_bytes(pickle.dumps((scorer, inputs, task.is_whole)))
        self.task, self.is_loaded, self.deadline = task, False, time.monotonic() + LOADING


class RewardProcesses:
    """Processes that score answers. They start when they are first needed.

    Args:
        count: Number of shared processes, for batches without their own process.
    """

    def __init__(self, count: int) -> None:
        # Shared processes by index, others by the name of their reward.
        self._count, self._processes = count, dict[int | str, _Worker]()
        self._folder = tempfile.TemporaryDirectory(prefix="lmmods-rewards-", ignore_cleanup_errors=True)
        self._variables = process_variables(self._folder.name)

    def load(self, scorers: dict[str, Scorer]) -> dict[str, str | None]:
        """Load each reward in its own process; return by name why that failed, or None if it succeeded."""
        outcomes = self.run([Batch(scorer, [], 0.0, name) for name, scorer in scorers.items()])
        return {name: failed[0].reason if failed else None for name, failed in zip(scorers, outcomes, strict=True)}

    def run(self, batches: list[Batch]) -> list[list[Outcome]]:
        """Return the outcomes of each batch, in the order of its inputs."""
        outcomes = [[Outcome() for _ in batch.inputs] for batch in batches]
        queue = deque(_split_into_tasks(batches))
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
                        limit = _seconds_for(batch, task) if process.is_loaded else LOADING
                        self._drop(name)
                        _fail(task, f"took longer than {limit:g} s", batches, outcomes, queue, process.is_loaded)
        except BaseException:  # their results would be taken for results of the next call
            for name in self._busy:
                self._drop(name)
            raise
        return outcomes

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that have started."""
        return [process.pid for process in self._processes.values()]

    def close(self) -> None:
        """End all processes and everything that they have started."""
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
        """Give tasks to idle processes."""
        for task in list(queue):
            own_process = batches[task.batch].own_process
            names = range(self._count) if own_process is None else [own_process]
            name = next((candidate for candidate in names if candidate not in self._busy), None)
            if name is not None:
                queue.remove(task)
                self._give(name, task, batches[task.batch])

    def _give(self, name: int | str, task: _Task, batch: Batch) -> None:
        inputs = [batch.inputs[index] for index in task.indices]
        if name in self._processes:
            try:
                return self._processes[name].give(batch.scorer, inputs, task)
            except OSError:  # it ended after its last task, because of a function's leftovers
                self._drop(name)
        self._processes[name] = _Worker(self._variables)
        self._processes[name].give(batch.scorer, inputs, task)

    def _receive(self, name: int | str, batches: list[Batch], outcomes: list[list[Outcome]],
                 queue: deque[_Task]) -> None:
        """Receive a message: the reward is loaded, the reason why it is not, or outcomes."""
        process = self._processes[name]
        task, batch = process.task, batches[process.task.batch]
        try:
            message = json.loads(process.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            reason = self._drop(name, ENDING)
            if process.is_loaded or task.is_retried:
                return _fail(task, reason, batches, outcomes, queue, process.is_loaded)
            task.is_retried = True  # leftovers of an earlier call may have ended the process
            return queue.appendleft(task)
        if isinstance(message, str) and (task.is_whole or not process.is_loaded):
            process.task = None
            return _fail(task, message, batches, outcomes, queue, process.is_loaded)
        if process.is_loaded:
            for fields in [(None, message)] if isinstance(message, str) else message:
                outcomes[task.batch][task.indices.popleft()] = Outcome(*fields)
        process.is_loaded, process.deadline = True, time.monotonic() + _seconds_for(batch, task)
        if not task.indices:
            process.task = None


def _split_into_tasks(batches: Iterable[Batch]) -> list[_Task]:
    tasks = []
    for batch_index, batch in enumerate(batches):
        indices = range(len(batch.inputs))
        if batch.own_process is not None:
            tasks.append(_Task(batch_index, deque(indices), is_whole=len(indices) > 1))
        else:
            tasks += [_Task(batch_index, deque(indices[start:start + CHUNK])) for start in indices[::CHUNK]]
    return tasks


def _seconds_for(batch: Batch, task: _Task) -> float:
    """Return the maximum seconds until the task's next message."""
    return min(batch.limit * len(task.indices), max(batch.limit, WHOLE)) if task.is_whole else batch.limit


def _fail(task: _Task, reason: str, batches: list[Batch], outcomes: list[list[Outcome]], queue: deque[_Task],
          is_loaded: bool) -> None:
    """Store the reason of a failure for the task's first answer, or for all answers if the reward is not loaded.

    The remaining answers are scored one by one.
    """
    batch_outcomes = outcomes[task.batch]
    if not is_loaded:
        for index in task.indices:
            batch_outcomes[index] = Outcome(reason=f"cannot be loaded: {reason}")
        task.indices.clear()
        if not batches[task.batch].inputs:  # it was only to be loaded
            batch_outcomes.append(Outcome(reason=reason))
    elif not task.is_whole:
        batch_outcomes[task.indices.popleft()] = Outcome(batches[task.batch].lowest, reason)
    if task.indices:
        queue.appendleft(_Task(task.batch, task.indices))
