"""Failure detection among the processes of a run: if one is lost, the others end with a message instead of waiting for
it.

Collective calls of NCCL, gloo and XLA wait for minutes for a process that is gone, or end in an error that does not
name it; before the first such call nothing detects a loss at all. Here each process keeps a connection to the first one
from its start on. The system closes it when a process dies, however it dies; if a machine or its network is gone,
keep-alive packets detect it. Once all have connected, a thread on each end sends heartbeats, so that a stopped process
is detected, too; a busy one keeps sending them.
"""

import atexit
import hashlib
import math
import os
import re
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from subprocess import Popen
from typing import Any

from lmmods.core.errors import UserError
from lmmods.core.settings import require

LOST = os.EX_TEMPFAIL if hasattr(os, "EX_TEMPFAIL") else 75  # temporary: the same command may well succeed
FAILED = 1  # another process has failed
# Seconds: GATHERING collects deaths for one message; HEARING is how long a process whose own call has failed waits to
# hear of a lost one; ENDING is how long a process may take to end when another has failed.
GATHERING, HEARING, ENDING = 0.3, 3.0, 5.0
ARRIVING = 10.0  # seconds that a process which fails at once stays to tell those that connect late
RETRYING = 0.1  # seconds between attempts to connect, and between checks of child processes
KEEP_ALIVE = 30  # seconds until the system detects a cut connection, unless a recipe sets it
BEATS = 8  # heartbeats per timeout
ALIVE = "alive"
# The first process listens on MASTER_PORT + 2; JAX's coordinator takes MASTER_PORT + 1.
PORT_DISTANCE = 2
RESOLVING = 30.0  # seconds until the name of the first machine must resolve
LAUNCHER = "LMMODS_LAUNCHER"  # environment variable: PID of the process that starts others for Lightning


@dataclass(frozen=True)
class Rendezvous:
    """Address of the first process, before any library has connected the processes of a run.

    Args:
        rank, size: Rank of this process, and their number.
        host, port: Address of the first process.
        token: Secret shared by the processes of this run, which identifies them among those of others.
        launcher: PID of the process that started this one and must outlive it, if known.
    """

    rank: int
    size: int
    host: str
    port: int
    token: str
    launcher: int | None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Rendezvous | None":
        """Read the variables set by torchrun, srun, Lightning or the user for each process; None for a single process.

        Processes of other launchers, such as MPI's, connect after their library has connected them.
        """
        def value(*names: str) -> str | None:
            return next((environment[name] for name in names if environment.get(name)), None)

        # Lightning's launcher sets LOCAL_RANK but not RANK; on the first or only machine the two are equal.
        by_lightning = "RANK" not in environment and "LOCAL_RANK" in environment and value("NODE_RANK") in (None, "0")
        by_srun = "RANK" not in environment and "SLURM_PROCID" in environment
        rank = value("RANK", *(["SLURM_PROCID"] if by_srun else ["LOCAL_RANK"] if by_lightning else []))
        size = value("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if by_srun else value("WORLD_SIZE")
        # SLURM starts process 0 on the first host of the step.
        host = value("MASTER_ADDR") or _first_host(value("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") or "")
        job = value("SLURM_JOB_ID") or ""
        # Without MASTER_PORT, Lightning under SLURM takes this port, too.
        port = value("MASTER_PORT") or (f"{15000 + int(job[-4:])}" if by_srun and job[-4:].isdigit() else None)
        if not (host and rank and rank.isdigit() and size and size.isdigit() and port and port.isdigit()):
            return None
        if int(size) < 2:
            return None
        # Equal in all processes of a run, but not in another run or a restart, which may use the same port.
        run = (host, port, size, job, *(value(name) or "" for name in (
            "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")))
        launcher = value(LAUNCHER) if by_lightning and rank != "0" else None
        if "TORCHELASTIC_RUN_ID" in environment:
            launcher = str(os.getppid())  # torchrun's agent
        token = hashlib.sha256(repr(run).encode()).hexdigest()[:32]
        return cls(int(rank), int(size), host, int(port) + PORT_DISTANCE, token, int(launcher) if launcher else None)


def _first_host(nodes: str) -> str:
    """Return the first host of SLURM's node list: `node[03-05,07],other` gives `node03`."""
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])


class Connection:
    """A connection between the first process and another one; messages are words, one per line.

    Args:
        connection: The socket.
        timeout: Seconds after which the system detects that the other machine is gone.
    """

    def __init__(self, connection: socket.socket, timeout: int):
        self.socket, self._received = connection, b""
        self.name = ""  # of the process at the other end, once it has introduced itself
        self.is_alive = False  # True once it sends heartbeats
        self.num_silent = 0  # own beats since its last one, so that times when this process was stopped do not count
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.set_timeout(timeout)

    def set_timeout(self, timeout: int) -> None:
        """Set keep-alive: silence for half the time, then four probes. Not all systems have all of these options."""
        # TCP_USER_TIMEOUT, in milliseconds, limits how long sent data may stay unacknowledged: keep-alive probes only
        # an idle connection.
        for option, value in (("TCP_KEEPIDLE", timeout // 2), ("TCP_KEEPINTVL", timeout // 8), ("TCP_KEEPCNT", 4),
                              ("TCP_USER_TIMEOUT", 1000 * timeout)):
            if hasattr(socket, option):
                with suppress(OSError):  # the other end is gone, which `receive` reports
                    self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), max(value, 1))

    def send(self, word: str) -> None:
        with suppress(OSError):  # the other end is gone, which `receive` reports
            self.socket.sendall(f"{word}\n".encode())

    def end(self, deadline: float) -> None:
        """Stop sending, and read until the other end has received everything and closes, or until `deadline`
        (`time.monotonic`).

        Closing a connection with unread data resets it, and data not delivered yet would be lost.
        """
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            while (left := deadline - time.monotonic()) > 0:
                self.socket.settimeout(left)
                if not self.socket.recv(4096):
                    break

    def receive(self) -> list[str] | None:
        """Wait for words and return them; None at the end of the connection."""
        try:
            received = self.socket.recv(4096)
        except OSError:  # reset, or silent for too long
            return None
        self.num_silent = 0
        # What follows the last line break is the start of a word, kept for the next call.
        *words, self._received = (self._received + received).split(b"\n")
        return [word.decode(errors="replace") for word in words] if received else None


class Peers:
    """The other processes of a run, watched by a thread. Use `Peers.current`."""

    _current: "Peers | None" = None

    def __init__(self) -> None:
        self._rank, self._token = 0, secrets.token_hex(16)
        self._timeout: int | None = None  # seconds without a heartbeat, once all have connected
        self._listener: socket.socket | None = None  # of the first process
        self._addresses: list[tuple[str, int]] = []  # of the first process, until this one has connected to it
        self._connections: list[Connection] = []
        self._known: set[str] = set()  # names of processes that have introduced themselves
        self._children: dict[int, Popen] = {}  # by rank, until they have connected
        self._launched_by: int | None = None
        self._lost: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._ending = threading.Lock()
        self._has_left = self._has_failed = self._others_take_leave = False
        self._fails = threading.Event()
        self._is_connected = threading.Event()  # to the first process, or this is the first and knows all others
        self._num_others = 0  # if the environment says so
        self._waits_until = -math.inf  # `time.monotonic`, for others to connect
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        if hasattr(os, "register_at_fork"):
            _instances.add(self)

    @classmethod
    def current(cls) -> "Peers":
        """Return the peers of the command that this process runs."""
        if cls._current is None or cls._current._has_left:
            cls._current = cls()
        return cls._current

    def begin(self) -> None:
        """Start watching, if the environment defines how the processes of this run find each other.

        Raises:
            UserError: The environment is inconsistent.
        """
        check_environment()
        point = Rendezvous.from_environment()
        if point is None or self._thread.is_alive():
            return
        check_address(point.host, point.port - PORT_DISTANCE)
        self._rank, self._token, self._launched_by = point.rank, point.token, point.launcher
        self._num_others = point.size - 1
        if point.rank == 0:
            self._listen(point.port)
        else:
            self._addresses = [(point.host, point.port)]
        self._thread.start()
        if point.launcher is None:  # a launcher sees how this process ends
            atexit.register(self._wait_for_late_processes)

    def watch_children(self, processes: dict[int, Popen]) -> None:
        """Watch child processes by rank until they have connected: one may die in its first moments, too."""
        self._children = processes
        if not self._thread.is_alive():
            self._thread.start()

    def connect_all(self, rank: int, size: int, broadcast: Callable[[Any], Any], timeout: int | None) -> None:
        """Connect the processes that have not found each other yet, and expect heartbeats from now on.

        A collective call: every process must make it.

        Args:
            rank: Rank of this process, of `size`.
            broadcast: Broadcasts the argument of the first process to all.
            timeout: Seconds without a heartbeat after which a process is lost; None disables watching. The death of a
                process is detected at once if its machine is alive.
        """
        if size == 1 or timeout is None:
            self._leave("done")
            return
        self._rank, self._timeout = rank, timeout
        # Connections from `begin` have the default keep-alive, and have not announced heartbeats yet.
        for connection in list(self._connections):
            connection.set_timeout(timeout)
            if connection.name:
                connection.send(ALIVE)
        if rank == 0:
            if self._listener is None:
                self._listen(0)
            # Collective: every process takes part, also one that is connected already.
            assert self._listener is not None
            broadcast((socket.gethostname(), self._listener.getsockname()[1], self._token))
        else:
            host, port, token = broadcast(None)
            if not self._is_connected.is_set():
                self._token = token
                # The host name may not resolve on other machines, where MASTER_ADDR does.
                hosts = dict.fromkeys((os.environ.get("MASTER_ADDR") or host, host))
                self._addresses = [(name, port) for name in hosts]
        if not self._thread.is_alive():
            self._thread.start()
        if rank and not self._is_connected.wait(timeout):
            _print_error(f"warning: process {rank} cannot reach port {port} of {host}. It will not notice when another "
                         "process is lost.")

    @contextmanager
    def end_together(self) -> Iterator[None]:
        """Wrap a command: report to the others how this process ends.

        If a call fails because another process is lost, this one ends as the others do.
        """
        try:
            yield
        except BaseException as error:
            if self._is_watching and isinstance(error, Exception) and not isinstance(error, UserError):
                for signum in (signal.SIGINT, signal.SIGTERM):  # from a launcher that has noticed the loss first
                    signal.signal(signum, signal.SIG_IGN)
                self._fails.set()
                time.sleep(HEARING)  # `_watch` ends this process meanwhile if another one is lost or has failed
            self._leave("done" if isinstance(error, SystemExit) and not error.code else "failed")
            raise
        self._leave("done")

    @classmethod
    def end_alone(cls) -> bool:
        """At the end of the program: True if it has failed, so that the others do not shut down together with it.

        The first process, on which the libraries of the others depend, waits here until these have ended: they have
        been notified, and take `ENDING` at most.
        """
        peers = cls._current
        if peers is None or not peers._has_failed or peers._others_take_leave:
            return False
        if peers._rank == 0 and peers._thread.is_alive():
            peers._thread.join(ENDING + HEARING)
        return True

    @property
    def _is_watching(self) -> bool:
        return self._thread.is_alive() and not self._has_left

    def _leave(self, word: str) -> None:
        with self._ending:
            if self._has_left:
                return
            if word == "failed" and self._num_others and self._launched_by is None:
                # Processes that have not connected yet would otherwise wait for this one in their library.
                self._waits_until = time.monotonic() + ARRIVING
            self._has_failed, self._has_left = word == "failed", True
        self._fails.set()
        for connection in list(self._connections):
            if connection.name or self._rank:  # the first process must introduce itself before
                connection.send(word)

    def _wait_for_late_processes(self) -> None:
        """At exit after a failure, wait for late processes to connect and hear of it."""
        self._is_connected.wait(max(self._waits_until - time.monotonic(), 0))

    # Connecting ------------------------------------------------------------------------------------------------------

    def _listen(self, port: int) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        for candidate in dict.fromkeys((port, 0)):  # the port may be in use; `connect_all` then broadcasts another one
            with suppress(OSError, OverflowError):
                self._listener = socket.create_server(("", candidate), family=family, backlog=1024,
                                                      dualstack_ipv6=both)
                self._selector.register(self._listener, selectors.EVENT_READ)
                return

    def _connect(self) -> None:
        """Try to connect to the first process, which may not listen yet; called again later."""
        timeout = self._timeout or KEEP_ALIVE
        for address in self._addresses:
            with suppress(OSError, OverflowError):
                connection = Connection(socket.create_connection(address, timeout), timeout)
                connection.send(f"{self._token} {_name(self._rank)}")
                if self._has_failed:
                    connection.send("failed")
                return self._add(connection)

    def _add(self, connection: Connection) -> None:
        self._connections.append(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _remove(self, connection: Connection) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    # Watching, in a thread -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        next_beat, next_attempt = 0.0, 0.0
        # Until this process has left, all others have closed their ends, and no late one is awaited.
        while not self._has_left or self._connections or self._awaits_late_processes:
            must_connect = not self._connections and (not self._has_left or self._awaits_late_processes)
            if self._addresses and must_connect and time.monotonic() >= next_attempt:
                self._connect()
                next_attempt = time.monotonic() + RETRYING
            # The listener is registered without data, connections with themselves.
            for key, _ in self._selector.select(self._select_timeout(next_beat)):
                if key.data is None:
                    assert self._listener is not None
                    self._add(Connection(self._listener.accept()[0], self._timeout or KEEP_ALIVE))
                else:
                    self._receive_from(key.data)
            if self._timeout is not None and time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._timeout / BEATS
                self._beat()
            self._check_children()
            if self._launched_by is not None and _is_gone(self._launched_by):
                self._end(LOST, UserError(
                    f"The process that started this one (PID {self._launched_by}) is gone, so this process exits. "
                    "--ckpt_path auto resumes from the last checkpoint."))
            # The first process sees every death: it waits until no more come, so that one message names them all.
            if self._lost and (self._rank or not self._selector.select(GATHERING)):
                self._end(LOST, UserError(
                    f"Lost process {', '.join(self._lost)}: killed, or its machine cannot be reached. The other "
                    "processes exit. --ckpt_path auto resumes from the last checkpoint."))
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()

    @property
    def _awaits_late_processes(self) -> bool:
        return time.monotonic() < self._waits_until and not self._is_connected.is_set()

    def _select_timeout(self, next_beat: float) -> float:
        """Return the seconds to wait for messages."""
        if self._lost:
            return GATHERING
        until_beat = math.inf if self._timeout is None else max(next_beat - time.monotonic(), 0)
        # `select` cannot wait for children, the launcher and the next attempt to connect, so these are polled.
        must_poll = self._timeout is None or self._children or self._launched_by is not None or not self._connections
        return min(until_beat, RETRYING) if must_poll else until_beat

    def _check_children(self) -> None:
        for rank, process in list(self._children.items()):
            status, name = process.poll(), f"{rank} on {socket.gethostname()} (PID {process.pid})"
            # Neither dead nor connected: check again later.
            if status is None and name not in self._known:
                continue
            del self._children[rank]  # its connection reports from now on
            # Below 0: killed by a signal. Above: it failed.
            if name not in self._known and status is not None and status < 0:
                self._lost.append(name)
            elif name not in self._known and status:
                self._end(FAILED, UserError(f"Process {name} failed, so this process exits."))

    def _beat(self) -> None:
        """Send a heartbeat, and count those that others have missed."""
        known = [connection for connection in self._connections if connection.name]
        for connection in known:
            connection.send(ALIVE)
            connection.num_silent += connection.is_alive
        if silent := [connection.name for connection in known if connection.num_silent > BEATS]:
            self._end(LOST, UserError(
                f"No heartbeat from process {', '.join(silent)} for {self._timeout} seconds: it or its machine has "
                "stopped or hangs. The other processes exit. Kill it if it still exists; --ckpt_path auto resumes from "
                "the last checkpoint."))

    def _receive_from(self, connection: Connection) -> None:
        words = connection.receive()
        for word in words or ():
            # The first word introduces the other end; whoever lacks the token does not belong to this run.
            if not connection.name:
                token, _, name = word.partition(" ")
                if token != self._token or not name:
                    return self._remove(connection)
                self._introduce(connection, name)
            elif word == ALIVE:
                connection.is_alive = True
            elif word == "done":
                self._others_take_leave = True
                return self._remove(connection)
            elif word == "failed":
                # It may end now, so its silence is not a loss.
                connection.is_alive = False
                self._wait_for_own_failure()
                return self._end(FAILED, UserError(f"Process {connection.name} failed, so this process "
                                                   "exits."))
            elif word.isdigit():
                # An exit status: the other end has reported a loss or failure and ended at once, see `_end`.
                self._end(int(word))
            else:
                return self._remove(connection)  # it does not speak as this version does
        # Closed without a word about how it ends: if it is one of the run, it is dead.
        if words is None:
            self._remove(connection)
            self._lost += [connection.name] if connection.name else []

    def _introduce(self, connection: Connection, name: str) -> None:
        connection.name = name
        self._known.add(name)
        if self._rank == 0:
            connection.send(f"{self._token} {_name(0)}")
            if self._has_failed:
                connection.send("failed")
            if len(self._known) >= self._num_others:
                self._is_connected.set()
        else:
            self._addresses = []
            self._is_connected.set()
        if self._timeout is not None:
            connection.send(ALIVE)

    def _wait_for_own_failure(self) -> None:
        """Wait briefly for this process to fail itself: an error that all processes meet is best reported by each."""
        timeout = self._timeout or KEEP_ALIVE
        # Runs in the watching thread, so heartbeats must be sent here meanwhile.
        for _ in range(math.ceil(ENDING * BEATS / timeout)):
            if self._fails.wait(min(timeout / BEATS, ENDING)):
                break
            self._beat()

    def _end(self, status: int, error: UserError | None = None) -> None:
        """End this process at once, unless it is about to end; `error` is printed."""
        with self._ending:
            if self._has_left:
                return
            for connection in self._connections:
                connection.send(str(status))
            if error is not None:
                _print_error(f"error: {error}")
            with suppress(OSError):
                sys.stdout.flush()
            deadline = time.monotonic() + GATHERING
            for connection in self._connections:
                connection.end(deadline)
            # Not sys.exit: this is a thread, and the main thread may hang in a collective call.
            os._exit(status)

    def _close_copies(self) -> None:
        """In a fork: close its copies of the sockets, which would keep the connections of a dead process open."""
        for copy in (self._listener, *(connection.socket for connection in self._connections)):
            if copy is not None:
                copy.close()
        self._selector.close()


_instances: "weakref.WeakSet[Peers]" = weakref.WeakSet()


def _close_all_copies() -> None:
    for peers in _instances:
        peers._close_copies()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all_copies)


def check_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Raise UserError if a variable by which the processes of a run find each other is not a number, or too large."""
    for name in ("MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK"):
        value = environment.get(name) or "0"
        if not (value.isdecimal() and value.isascii() and int(value) < 2**16):
            raise UserError(f"The environment variable {name} is {value!r}, but must be an integer below 65536. "
                            "torchrun and srun set it; unset it for a run without them.")


def check_address(host: str, port: int, patience: float = RESOLVING) -> None:
    """Raise UserError if the host name does not resolve. On machines that start together, names may take a while.

    Args:
        patience: Seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.getaddrinfo(host, port)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline or isinstance(error, UnicodeError):
                raise cannot_meet(host, port, getattr(error, "strerror", None) or str(error)) from error
        time.sleep(1)


def cannot_meet(host: str | None, port: int | str | None, reason: str) -> UserError:
    """Build the error for processes of a run that do not find each other."""
    return UserError(f"The processes of this run cannot meet at {host}, port {port}: {reason.rstrip('.')}. Set "
                     "MASTER_ADDR to an address of process 0's machine that all of them reach, and MASTER_PORT to the "
                     "first of three free ports there; use the same values in all processes (docs/cluster.md).")


def check_timeout(timeout: int | None) -> None:
    """Raise UserError for a timeout that is too short to be sure of a heartbeat."""
    require(timeout is None or timeout >= 2, "trainer.heartbeat_timeout", timeout, "2 or more seconds, or null")


def _is_gone(launcher: int) -> bool:
    """Return True if the process that started this one, directly or through another, is dead."""
    # The system replaces a dead parent, so this one is alive. With another parent there may be a process in between:
    # look up the launcher itself. A zombie is dead, but not reaped.
    if os.getppid() == launcher:
        return False
    import psutil

    with suppress(psutil.NoSuchProcess):
        return psutil.Process(launcher).status() == psutil.STATUS_ZOMBIE
    return True


def _name(rank: int) -> str:
    return f"{rank} on {socket.gethostname()} (PID {os.getpid()})"


def _print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
