"""Processes that are forks of a server with the libraries loaded, so that a case costs its own work only.

Each test worker starts one server, when it first needs one; what its forks start are its forks too. JAX has not started
in it, so a fork may.
"""

import atexit
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

PRELOADED = ["lmmods.torch_engine.trainer", "lmmods.commands.setup", "jax_engine.trainer", "peft", "bitsandbytes",
             "transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert"]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOADED)
SERVER = forkserver._forkserver
RUNNING: list["Fork"] = []


class Fork:
    """A function in a process of its own, with what a `subprocess.Popen` has; its output goes to a file.

    Args:
        function: One of a module, so that it can be pickled.
        args: Its arguments.
        output: The file; by default a new one.
        environment: What differs from this process's.
    """

    def __init__(self, function: Callable, *args, output: Path | None = None, **environment: str):
        if output is None:
            handle, name = tempfile.mkstemp(prefix="fork")
            os.close(handle)
            output = Path(name)
        self.output = output
        SERVER.ensure_running()
        self.process = CONTEXT.Process(target=_run,
                                       args=(function, args, {**os.environ, **environment}, output,
                                             SERVER._forkserver_address))
        self.process.start()
        self.pid = self.process.pid
        RUNNING.append(self)

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 300) -> int | None:
        self.process.join(timeout)
        return self.returncode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def communicate(self, timeout: float = 300) -> str:
        """What the process has said by its end, which must come in time."""
        ended = self.wait(timeout) is not None
        said = self.output.read_text()
        assert ended, f"No end after {timeout} seconds:\n{said}"
        return said


def end_all() -> None:
    """End the processes that a test leaves, and delete their output."""
    while RUNNING:
        fork = RUNNING.pop()
        fork.kill()
        fork.output.unlink(missing_ok=True)


def _run(function: Callable, args: tuple, environment: dict[str, str], output: Path, server: str) -> None:
    # Python would start a server of this process's own, and import all libraries again, for what it starts itself.
    SERVER._forkserver_address, SERVER.ensure_running = server, lambda: None
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

    os.environ.clear()
    os.environ.update(environment)
    rank_zero_only.rank = _get_rank() or 0  # Lightning reads it when it is imported
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        function(*args)
    finally:
        atexit._run_exitfuncs()  # forks of multiprocessing leave them out; JAX takes leave of other processes in one


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
