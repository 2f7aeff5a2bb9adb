"""Processes that are forks of a server with the libraries loaded, so that a case costs its own work only.

Each test worker starts one server, when it first needs one; what its forks start are its forks too. JAX has not started
in it, so a fork may.
"""

import atexit
import gc
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

PRELOADED = ["lmmods.torch_engine.trainer", "lmmods.commands.setup", "jax_engine.trainer", "peft", "bitsandbytes",
             "matplotlib.figure", "transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert"]
ROOT = Path(__file__).parent.parent
SERVE = "import sys; from tests.forks import serve; serve(sys.argv[1])"
server: dict[str, str] = {}  # address of the server that this process asks
running: list["Fork"] = []


class Fork:
    """A function in its own process, with the interface of `subprocess.Popen`; its output goes to a file.

    Args:
        function: A function of a module, so that it can be pickled.
        args: Its arguments.
        output: The file; by default a new one.
        environment: Variables that differ from this process's.
    """

    def __init__(self, function: Callable, *args, output: Path | None = None, **environment: str):
        if output is None:
            handle, name = tempfile.mkstemp(prefix="fork")
            os.close(handle)
            output = Path(name)
        self.output, self.returncode = output, None
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(_find_server())
        with self._socket.makefile("wb") as request:
            pickle.dump((sys.path, os.getcwd(), {**os.environ, **environment}, str(output)), request)
            pickle.dump((function, args), request)
        self._reply = self._socket.makefile("r")
        self.pid = int(self._reply.readline())
        running.append(self)

    def wait(self, timeout: float = 300) -> int | None:
        """Return the exit status, negative for a signal; None if the process still runs after `timeout` seconds."""
        if self.returncode is None and select.select([self._socket], [], [], timeout)[0]:
            self.returncode = int(self._reply.readline())
        return self.returncode

    def poll(self) -> int | None:
        return self.wait(0)

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()

    def communicate(self, timeout: float = 300) -> str:
        """Return the output of the process, which must end in time."""
        status = self.wait(timeout)
        output = self.output.read_text()
        assert status is not None, f"No end after {timeout} seconds:\n{output}"
        return output


def end_all() -> None:
    """End the processes that a test leaves, and delete their output."""
    while running:
        fork = running.pop()
        fork.kill()
        fork.output.unlink(missing_ok=True)


def _find_server() -> str:
    """Return the server's address; start it in a process that is not one of its forks."""
    if not server:
        folder = tempfile.mkdtemp(prefix="forks")
        server["address"] = os.path.join(folder, "socket")
        # The server ends when this pipe closes, with this process.
        process = subprocess.Popen([sys.executable, "-c", SERVE, server["address"]], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, cwd=ROOT)
        assert process.stdout is not None and process.stdout.readline() == b"listening\n"
        atexit.register(shutil.rmtree, folder)
    return server["address"]


def serve(address: str) -> None:
    """Load the libraries, then fork for each request, until this process's standard input is closed.

    A connection takes one request, and returns the PID of the fork and, once it has ended, its exit status.
    """
    server["address"] = address
    wakeup, signalled = socket.socketpair()
    signalled.setblocking(False)
    signal.set_wakeup_fd(signalled.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, no signal wakes `select`
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("listening", flush=True)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    connections: dict[int, socket.socket] = {}
    while sys.stdin not in (ready := select.select([sys.stdin, listener, wakeup], [], [])[0]):
        if listener in ready:
            connection = listener.accept()[0]
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for copy in (listener, wakeup, signalled, *connections.values()):
                    copy.close()
                return _call(connection)  # and leave the program as any other, exit handlers included
            connections[pid] = connection
            connection.sendall(f"{pid}\n".encode())
        if wakeup in ready:
            wakeup.recv(4096)
        while connections and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with connections.pop(ended[0]) as connection, suppress(OSError):  # nobody waits for it any more
                connection.sendall(f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())


def _call(connection: socket.socket) -> None:
    """Call the function of a request with its own environment and output."""
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

    with connection, connection.makefile("rb") as request:
        sys.path[:], folder, environment, output = pickle.load(request)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        function, args = pickle.load(request)
    rank_zero_only.rank = _get_rank() or 0  # Lightning reads it when it is imported
    with open(output, "ab") as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(*args)


def train(*arguments: str) -> None:
    """`python train.py` with these arguments. What Lightning starts as another process is a fork too."""
    from lightning.pytorch.strategies.launchers import subprocess_script

    from lmmods.cli import main

    def start(command: list[str], env: dict[str, str], cwd: str | None) -> Fork:
        return Fork(train, *arguments, output=Path("/proc/self/fd/1").resolve(), **env)

    subprocess_script.subprocess = SimpleNamespace(Popen=start)
    sys.argv = ["train.py", *arguments]
    sys.exit(main(list(arguments)))


def environments(processes: int, devices: int | None = None) -> list[dict[str, str]]:
    """What each of so many processes finds in its environment to join the others; `devices` as of `together`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag)
    if devices is not None:
        flags += f" --xla_force_host_platform_device_count={devices}"
    joined = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    return [{"XLA_FLAGS": flags, **({**joined, "RANK": str(rank)} if processes > 1 else {})}
            for rank in range(processes)]


def together(arguments: list[str], processes: int = 1, status: int = 0, program: Callable = train,
             devices: int | None = None, **environment: str) -> list[str]:
    """What so many processes say that are started by hand and joined on this machine, and that end with this status.

    Args:
        devices: Simulated ones of JAX in each process.
    """
    forks = [Fork(program, *arguments, **{**own, **environment}) for own in environments(processes, devices)]
    said = [fork.communicate() for fork in forks]
    assert [fork.returncode for fork in forks] == [status] * processes, said
    return said
