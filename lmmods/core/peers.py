"""The processes of a run watch each other: where one is lost, the others end with a message instead of waiting for it.

Collective calls of NCCL, gloo and XLA wait for minutes for a process that is gone, or end in an error that does not
name it. Here each process keeps a connection to the first one, which the system closes when a process dies, however it
dies; where a machine or its network is gone, the system finds out by keep-alive packets. A thread on each end says now
and then that it lives, so one that is stopped is found out, too; a process that is busy for long goes on saying it.
"""

import math
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lmmods.core.errors import UserError
from lmmods.core.settings import require

LOST = os.EX_TEMPFAIL  # exit status 75: the same command may well succeed
FAILED = 1  # another process has ended with an error
# Seconds: in which processes that die are told of together; that a process whose own call has failed waits to hear
# whether another one is lost; that one has to end by itself when another has failed.
GATHERING, HEARING, ENDING = 0.3, 3.0, 10.0
BEATS = 8  # signs of life in the time in which there must be one
ALIVE = "alive"


class Line:
    """A connection of the first process and another one, which say words, each on a line.

    Args:
        name: Of the process at the other end; empty until it has said who it is.
    """

    def __init__(self, connection: socket.socket, timeout: int, name: str = ""):
        self.connection, self.name, self._received = connection, name, b""
        self.num_silent = 0  # beats since it said something; those during which this process was stopped do not count
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Half the time silence, then four packets in the other half; not all systems have all of these options.
        for option, value in (("TCP_KEEPIDLE", timeout // 2), ("TCP_KEEPINTVL", timeout // 8), ("TCP_KEEPCNT", 4),
                              ("TCP_USER_TIMEOUT", 1000 * timeout)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), max(value, 1))

    def send(self, word: str) -> None:
        with suppress(OSError):  # it is gone, as `receive` tells
            self.connection.sendall(f"{word}\n".encode())

    def end(self, deadline: float) -> None:
        """Say no more, and read until the other end has heard all and ends, too, or until then (`time.monotonic`).

        A connection that is closed while words are unread is reset, and what it has not passed on yet is lost.
        """
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while (left := deadline - time.monotonic()) > 0:
                self.connection.settimeout(left)
                if not self.connection.recv(4096):
                    break

    def receive(self) -> list[str] | None:
        """Words said since the last call, which waits for some; None at the end of the connection."""
        try:
            received = self.connection.recv(4096)
        except OSError:  # reset, or silent for too long
            return None
        self.num_silent = 0
        *words, self._received = (self._received + received).split(b"\n")
        return [word.decode(errors="replace") for word in words] if received else None


class Peers:
    """The other processes of a run.

    Args:
        timeout: Seconds without a sign of life after which a process is lost; None watches nobody. Processes that die
            on machines that live are missed at once.
    """

    def __init__(self, timeout: int | None):
        require(timeout is None or timeout >= 2, "trainer.heartbeat_timeout", timeout, "2 or more seconds, or null")
        self._timeout = timeout
        self._rank, self._key = 0, ""
        self._listener: socket.socket | None = None  # of the first process
        self._lines: list[Line] = []
        self._lost: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._ending = threading.Lock()
        self._has_left, self._fails = False, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)

    def meet(self, rank: int, size: int, share: Callable[[Any], Any]) -> None:
        """Connect the processes and begin to watch. All of them must call this at the same place.

        Args:
            rank: Of this process, of `size`.
            share: Gives all processes what the first one passes to it.
        """
        if size == 1 or self._timeout is None:
            return
        self._rank = rank
        if rank == 0:
            self._listen(size)
            share((socket.gethostname(), self._listener.getsockname()[1], self._key))
        else:
            self._connect(*share(None))
        self._thread.start()

    @contextmanager
    def end_together(self) -> Iterator[None]:
        """Around a command: the others hear how this process ends. Where a call fails because another process is lost,
        this one ends as the others do."""
        try:
            yield
        except BaseException as error:
            if self._thread.is_alive() and isinstance(error, Exception) and not isinstance(error, UserError):
                for number in (signal.SIGINT, signal.SIGTERM):  # of a launcher that has missed the process first
                    signal.signal(number, signal.SIG_IGN)
                self._fails.set()
                time.sleep(HEARING)  # if another process is lost or has failed, `_watch` ends this one meanwhile
            self._leave("failed")
            raise
        self._leave("done")

    def _leave(self, word: str) -> None:
        with self._ending:
            self._has_left = True
        self._fails.set()
        for line in list(self._lines):
            line.send(word)

    # Meeting ---------------------------------------------------------------------------------------------------------

    def _listen(self, size: int) -> None:
        both = socket.has_dualstack_ipv6()
        self._listener = socket.create_server(("", 0), family=socket.AF_INET6 if both else socket.AF_INET,
                                              backlog=size, dualstack_ipv6=both)
        self._key = secrets.token_hex(16)  # others, too, may find the port
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _connect(self, host: str, port: int, key: str) -> None:
        problem: OSError | None = None
        for name in dict.fromkeys((os.environ.get("MASTER_ADDR") or host, host)):
            try:
                line = Line(socket.create_connection((name, port), self._timeout), self._timeout, f"0 on {host}")
            except OSError as error:
                problem = error
                continue
            line.connection.settimeout(None)
            line.send(f"{key} {self._rank} on {socket.gethostname()} (PID {os.getpid()})")
            return self._add(line)
        _tell(f"warning: process {self._rank} cannot reach port {port} of {host} ({problem}). It will not hear of it "
              "when another process is lost.")

    def _add(self, line: Line) -> None:
        self._lines.append(line)
        self._selector.register(line.connection, selectors.EVENT_READ, line)

    def _remove(self, line: Line) -> None:
        self._lines.remove(line)
        self._selector.unregister(line.connection)
        line.connection.close()

    # Watching, in a thread -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        next_beat = 0.0
        while self._lines or self._listener:
            wait = GATHERING if self._lost else max(next_beat - time.monotonic(), 0)
            for key, _ in self._selector.select(wait):
                if key.data is None:
                    self._add(Line(self._listener.accept()[0], self._timeout))
                else:
                    self._hear(key.data)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._timeout / BEATS
                self._beat()
            if self._lost and (self._rank or not self._selector.select(GATHERING)):
                self._end(LOST, UserError(
                    f"Lost process {', '.join(self._lost)}: killed, or its machine cannot be reached. The other "
                    "processes end, too. --ckpt_path auto goes on from the last checkpoint."))

    def _beat(self) -> None:
        """Say that this process lives, and count how long others have not."""
        known = [line for line in self._lines if line.name]
        for line in known:
            line.send(ALIVE)
            line.num_silent += 1
        if silent := [line.name for line in known if line.num_silent > BEATS]:
            self._end(LOST, UserError(
                f"No sign of life of process {', '.join(silent)} for {self._timeout} seconds: it is stopped or hangs, "
                "or its machine does. The other processes end, too. End it where it is still there; --ckpt_path auto "
                "goes on from the last checkpoint."))

    def _hear(self, line: Line) -> None:
        words = line.receive()
        for word in words or ():
            if not line.name:
                key, _, line.name = word.partition(" ")
                if key != self._key:
                    return self._remove(line)
            elif word == ALIVE:
                continue
            elif word == "done":
                return self._remove(line)
            elif word == "failed":
                self._remove(line)
                for _ in range(math.ceil(ENDING * BEATS / self._timeout)):  # it may be a mistake that all find
                    if self._fails.wait(min(self._timeout / BEATS, ENDING)):
                        break
                    self._beat()
                self._end(FAILED, UserError(f"Process {line.name} has ended with an error, so this one ends, too."))
            else:
                self._end(int(word))
        if words is None:
            self._remove(line)
            self._lost += [line.name] if line.name else []

    def _end(self, status: int, error: UserError | None = None) -> None:
        """End this process where it stands, unless it is about to; `error` says why, if the first has not yet."""
        with self._ending:
            if self._has_left:
                return
            for line in self._lines:
                line.send(str(status))
            if error is not None:
                _tell(f"error: {error}")
            with suppress(OSError):
                sys.stdout.flush()
            deadline = time.monotonic() + GATHERING
            for line in self._lines:
                line.end(deadline)
            os._exit(status)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
