"""Fork test processes from a server that has loaded the libraries, so that they need not load them again.

Each test worker starts one server when it first needs it; processes that its forks start are forks of the same server.
The server does not start JAX, so that forks can.
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
server: dict[str, str] = {}  # address of the server that this process uses
running: list["Fork"] = []
outcome = {"succeeded": False}  # of a fork


class Fork:
    """Run a function in a forked process, with the interface of `subprocess.Popen`; its output goes to a file.

    Args:
        function: Function of a module, as it is pickled.
        args: Its arguments.
        output: Output file. Default: a new one.
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
        """Return the output of the process; fail if it does not end in time."""
        status = self.wait(timeout)
        output = self.output.read_text()
        assert status is not None, f"Still running after {timeout} seconds:\n{output}"
        return output


def end_all() -> None:
    """Kill the processes that a test leaves behind, and delete their output."""
    while running:
        fork = running.pop()
        fork.kill()
        fork.output.unlink(missing_ok=True)


def _find_server() -> str:
    """Return the server's address. Start it if neither this process nor a parent has."""
    if not server:
        folder = tempfile.mkdtemp(prefix="forks")
        server["address"] = os.path.join(folder, "socket")
        # The pipe closes with this process, which ends the server.
        process = subprocess.Popen([sys.executable, "-c", SERVE, server["address"]], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, cwd=ROOT)
        assert process.stdout is not None and process.stdout.readline() == b"listening\n"
        atexit.register(shutil.rmtree, folder)
    return server["address"]


def serve(address: str) -> None:
    """Load the libraries, then fork for each request until standard input is closed.

    Each connection carries one request. The reply is the PID of the fork and, once it has ended, its exit status.
    """
    server["address"] = address
    atexit.register(_skip_teardown)  # first, so that it runs after all other exit handlers
    wakeup, signalled = socket.socketpair()
    signalled.setblocking(False)
    signal.set_wakeup_fd(signalled.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)  # signals wake `select` only with a handler
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
                return _call(connection)  # exit like any program, with exit handlers
            connections[pid] = connection
            connection.sendall(f"{pid}\n".encode())
        if wakeup in ready:
            wakeup.recv(4096)
        while connections and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with connections.pop(ended[0]) as connection, suppress(OSError):  # the client may have gone
                connection.sendall(f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())


def _call(connection: socket.socket) -> None:
    """Call the function of a request in the requested environment, with output to the requested file."""
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

    with connection, connection.makefile("rb") as request:
        sys.path[:], folder, environment, output = pickle.load(request)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        function, args = pickle.load(request)
    rank_zero_only.rank = _get_rank() or 0  # Lightning read it at import
    _keep_compiled_programs()
    with open(output, "ab") as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        function(*args)
    except SystemExit as end:
        outcome["succeeded"] = not end.code
        raise
    outcome["succeeded"] = True


def _skip_teardown() -> None:
    """End a fork that succeeded: to delete all modules of the libraries would take it most of a second."""
    if outcome["succeeded"]:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _keep_compiled_programs() -> None:
    """Let every process write its compiled programs to JAX's cache, as on CPUs each needs programs of its own.

    JAX writes those of the first process only, so the others would compile for 40 seconds in each test.
    """
    from jax._src import compiler, distributed

    class State:
        process_id = 0

        def __getattr__(self, name: str) -> object:
            return getattr(distributed.global_state, name)

    compiler.distributed = SimpleNamespace(global_state=State())


def train(*arguments: str) -> None:
    """Run `python train.py` with these arguments. Processes that Lightning starts are forks too."""
    from lightning.pytorch.strategies.launchers import subprocess_script

    from lmmods.cli import main

    def start(command: list[str], env: dict[str, str], cwd: str | None) -> Fork:
        return Fork(train, *arguments, output=Path("/proc/self/fd/1").resolve(), **env)

    subprocess_script.subprocess = SimpleNamespace(Popen=start)
    sys.argv = ["train.py", *arguments]
    sys.exit(main(list(arguments)))


def environments(processes: int, devices: int | None = None) -> list[dict[str, str]]:
    """Return the environment variables with which each of N processes joins the others. `devices`: see `together`."""
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
    """Run N joined processes on this machine, check that all exit with `status`, and return their outputs.

    Args:
        devices: Number of simulated JAX devices per process.
    """
    forks = [Fork(program, *arguments, **{**variables, **environment})
             for variables in environments(processes, devices)]
    outputs = [fork.communicate() for fork in forks]
    assert [fork.returncode for fork in forks] == [status] * processes, outputs
    return outputs
