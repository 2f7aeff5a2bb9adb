"""Start, limit and end processes that run other people's code.

Each is a fresh interpreter in its own session: the parent's threads, devices, locks and descriptors are not in it, and
whatever it starts can be found and ended with it. Code that hangs may hold the interpreter's lock (a regular expression
does), so only the parent keeps time.

Programs in answers get stricter limits (`program_child`): they need no network and write only in their folder. Reward
functions and environments are the user's own and may call a server.
"""

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import wait
from typing import Any

import psutil

from lmmods.core.errors import UserError
from lmmods.rollouts.program_child import MARKS, limit

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

MEMORY = 4 * 2**30  # bytes that a process of the user's own code may allocate
ENDING = 1.0  # seconds in which a process must have ended that has closed its connection, or was killed


class Process:
    """A fresh interpreter in its own session.

    Args:
        arguments: Command line after the interpreter. The file descriptor of the process's end of `channel` is added,
            and with `is_outermost` that of the lifeline, a pipe whose other end this process holds as long as it lives.
        variables: Its environment.
        is_outermost: Add `MARKS` to the environment, by which `end` finds processes that left the session, and the
            lifeline. A program in an answer needs neither: it runs in a process that has both.
        files: Working folder and standard streams, as for `subprocess.Popen`.

    Raises:
        UserError: The system is Windows, which has neither the limits nor groups of processes to kill.
    """

    def __init__(self, arguments: list[str], variables: dict[str, str], is_outermost: bool = True,
                 **files: Any) -> None:
        if sys.platform == "win32":
            raise UserError("answers are scored in processes that Windows cannot limit and end; train in WSL 2 there")
        self.channel, theirs = socket.socketpair()
        descriptors, self._lifeline, self._mark = [theirs.detach()], None, None
        if is_outermost:
            reader, self._lifeline = os.pipe()
            descriptors.append(reader)
            self._mark = secrets.token_hex(16)
            variables = {**variables, **dict.fromkeys(MARKS, self._mark)}
        try:
            self._process = subprocess.Popen(
                [sys.executable, *arguments, *map(str, descriptors)], pass_fds=descriptors, start_new_session=True,
                env=variables, **files)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self.pid = self._process.pid

    def end(self, seconds: float = 0.0) -> int | None:
        """End the process and all that it has started, at once, or after it had some seconds to end by itself.

        Returns:
            Its status, negative for a signal; None if it did not end by itself.
        """
        is_ended = False
        try:
            is_ended = ends_within(self.pid, seconds)
        finally:  # also when interrupted
            # Before `wait` frees the number of the group for others.
            kill_group(self.pid)
            if self._mark is not None:
                _kill_marked(self._mark)
            status = self._process.wait()
            self.channel.close()
            if self._lifeline is not None:
                os.close(self._lifeline)
        return status if is_ended else None


def ends_within(pid: int, seconds: float) -> bool:
    """True if a child ends by itself within some seconds. It is not waited for, so its number stays its own."""
    try:
        file = os.pidfd_open(pid)
    except (AttributeError, OSError):  # other systems, Linux before 5.3, or no such process
        deadline = time.monotonic() + seconds
        with contextlib.suppress(psutil.NoSuchProcess):  # where this process ignores SIGCHLD
            while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.01)
        return True
    try:
        return bool(wait([file], seconds))
    finally:
        os.close(file)


def kill_group(pid: int) -> None:
    """Kill the processes of a group by the number of its leader."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS forbids it for a group of the dead
        os.killpg(pid, signal.SIGKILL)


def how_it_ended(status: int | None) -> str:
    """Return in words how a process ended: its status, negative for a signal; None if it did not do so by itself."""
    if status is None:
        return "closed the connection to the trainer"
    how = f"by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"with status {status}"
    return f"ended its process {how}"


def _kill_marked(mark: str) -> None:
    """Kill the processes with a mark in their environment, which those have that left the session, too."""
    deadline, is_left = time.monotonic() + ENDING, True
    while is_left and time.monotonic() < deadline:
        is_left = False
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # it ended meanwhile, or is another user's
                if any(process.environ().get(name) == mark for name in MARKS):
                    process.kill()
                    is_left = True


def process_variables(folder: str) -> dict[str, str]:
    """Return the environment of processes whose temporary files are in a folder."""
    # Sets and dicts have the same order in each process, and after a resume.
    return {"PYTHONHASHSEED": "0", **os.environ, "TMPDIR": folder}


def begin(lifeline: int) -> None:
    """Limit this process's memory. Kill it and the process group that it leads when the lifeline's other end closes.

    Linux sends the signal by itself. A thread, as elsewhere, does not run while C code holds the interpreter's lock, as
    a regular expression does.
    """
    os.set_inheritable(lifeline, False)
    limit(MEMORY)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        if select.select([lifeline], [], [], 0)[0]:  # it closed before
            os.killpg(0, signal.SIGKILL)
    else:
        def kill() -> None:
            wait([lifeline])
            os.killpg(0, signal.SIGKILL)

        threading.Thread(target=kill, name="parent", daemon=True).start()
