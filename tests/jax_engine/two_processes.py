"""A run in two processes on this machine."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def with_two(arguments: list[str], program: tuple[str, ...] = ("train.py",)) -> list[str]:
    """Run a command in two processes joined on this machine; what each said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2",
                   "XLA_FLAGS": flags}
    processes = [subprocess.Popen([sys.executable, *program, *arguments], cwd=ROOT, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, env={**environment, "RANK": str(rank)})
                 for rank in range(2)]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    return said
