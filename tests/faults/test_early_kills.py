"""Processes that are killed while they load their libraries, long before any of these has connected them."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.forks import environments

ROOT = Path(__file__).parents[2]


def started(arguments: list[str], **environment: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "train.py", "fit", *arguments], cwd=ROOT, text=True,
                            env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_for(condition, seconds: float = 60):
    """What `condition` returns as soon as it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("It did not come.")


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_one_of_two_started_by_hand(engine, lost, recipe):
    arguments = recipe(engine=engine, trainer__strategy="ddp", trainer__devices=2 if engine == "torch" else 1)
    processes = [started(arguments, **own, LOCAL_RANK=str(rank), NODE_RANK="0")
                 for rank, own in enumerate(environments(2))]
    wait_for(lambda: connections(processes[0].pid, processes[1].pid))
    processes[lost].kill()
    killed = time.monotonic()
    said = processes[1 - lost].communicate(timeout=30)[0]
    processes[lost].communicate()
    assert processes[1 - lost].returncode == 75 and time.monotonic() - killed < 10, said
    assert f"error: Lost process {lost} on {socket.gethostname()} (PID {processes[lost].pid})" in said


def connections(first: int, second: int) -> bool:
    """Whether a process is connected to one that listens."""
    ports = {each.laddr.port for each in psutil.Process(first).net_connections() if each.status == "LISTEN"}
    return any(each.status == "ESTABLISHED" and each.raddr and each.raddr.port in ports
               for each in psutil.Process(second).net_connections())


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["at once", "connected"])
@pytest.mark.parametrize("lost", [0, 1])
def test_one_of_two_started_by_lightning(lost, moment, recipe):
    first = started(recipe(trainer__strategy="ddp", trainer__devices=2))
    second = wait_for(lambda: next((child for child in psutil.Process(first.pid).children()
                                    if not is_gone(child) and "train.py" in " ".join(child.cmdline())), None))
    if moment == "connected":
        wait_for(lambda: connections(first.pid, second.pid))
    os.kill((first.pid, second.pid)[lost], signal.SIGKILL)
    if lost == 0:
        wait_for(lambda: is_gone(second), 15)
        assert f"PID {first.pid}) is gone" in (said := first.communicate()[0]) or "Lost process 0" in said
    else:
        said = first.communicate(timeout=15)[0]
        assert first.returncode == 75
        assert f"error: Lost process 1 on {socket.gethostname()} (PID {second.pid})" in said
