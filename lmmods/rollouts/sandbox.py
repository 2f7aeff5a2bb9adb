"""Start, limit and end processes that run other people's code.

Each process is a fresh interpreter in its own session. It has none of the parent's threads, devices, locks and
descriptors, and everything that it starts can be found and ended. Code that hangs may hold the interpreter's lock, as a
regular expression does, so only the parent keeps time.

Programs in answers have stricter limits (`program_child`): no network, and writing only in their folder. Reward
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

MEMORY = 4 * 2**30  # maximum bytes that a process with the user's code may allocate
ENDING = 1.0  # seconds in which a process must end after it has closed its connection or was killed


class Process:
    """A fresh interpreter in its own session.

    Args:
        arguments: Command line after the interpreter. The process's file descriptor of `channel` is appended, and with
            `is_outermost` the one of the lifeline, a pipe whose other end is open as long as this process lives.
        variables: Environment variables.
        is_outermost: Add the lifeline, and `MARKS` to the environment, by which `end` finds processes that left the
            session. A program in an answer needs neither: the process that starts it has both.
        files: Working folder and standard streams, as in `subprocess.Popen`.

    Raises:
        UserError: The system is Windows, which has neither these limits nor process groups.
    """

    def __init__(self, arguments: list[str], variables: dict[str, str], is_outermost: bool = True,
                 **files: Any) -> None:
        if sys.platform == "win32":
            raise UserError("answers are scored in processes that Windows cannot limit and end. Train in WSL 2")
        self.channel, remote = socket.socketpair()
        descriptors, self._lifeline, self._mark = [remote.detach()], None, None
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
        """End the process and everything that it has started. It has `seconds` to exit on its own.

        Returns:
            Its exit status, negative for a signal; None if it did not exit on its own.
        """
        has_exited = False
        try:
            has_exited = ends_within(self.pid, seconds)
        finally:  # also when interrupted
            # Before `wait`, which frees the id of the group for others.
            kill_group(self.pid)
            if self._mark is not None:
                _kill_marked(self._mark)
            status = self._process.wait()
            self.channel.close()
            if self._lifeline is not None:
                os.close(self._lifeline)
        return status if has_exited else None


def ends_within(pid: int, seconds: float) -> bool:
    """Return whether a child exits on its own within some seconds. It is not reaped, so its id stays its own."""
    try:
        file = os.pidfd_open(pid)
    except (AttributeError, OSError):  # another system, Linux before 5.3, or the process does not exist
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
    """Kill the processes of a group, given the id of its leader."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS forbids it if all have ended
        os.killpg(pid, signal.SIGKILL)


def how_it_ended(status: int | None) -> str:
    """Describe how a process ended.

    Args:
        status: Exit status, negative for a signal; None if it did not exit on its own.
    """
    if status is None:
        return "closed the connection to the trainer"
    how = f"by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"with status {status}"
    return f"ended its process {how}"


def _kill_marked(mark: str) -> None:
    """Kill all processes with a mark in their environment, which processes that left the session also have."""
    deadline, may_remain = time.monotonic() + ENDING, True
    while may_remain and time.monotonic() < deadline:
        may_remain = False
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
                if any(process.environ().get(name) == mark for name in MARKS):
                    process.kill()
                    may_remain = True


def process_variables(folder: str) -> dict[str, str]:
    """Return environment variables for processes with temporary files in a folder."""
    # The hash seed gives sets the same order in each process and after a resume.
    return {"PYTHONHASHSEED": "0", **os.environ, "TMPDIR": folder}


def begin(lifeline: int) -> None:
    """Limit this process's memory, and have its process group killed when the lifeline's other end closes.

    On Linux the kernel sends the signal. Elsewhere a thread does, which waits while C code, such as a regular
    expression, holds the interpreter's lock.
    """
    os.set_inheritable(lifeline, False)
    limit(MEMORY)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        if select.select([lifeline], [], [], 0)[0]:  # it was closed before
            os.killpg(0, signal.SIGKILL)
    else:
        def kill() -> None:
            wait([lifeline])
            os.killpg(0, signal.SIGKILL)

        threading.Thread(target=kill, name="parent", daemon=True).start()
