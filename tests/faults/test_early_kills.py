"""Processes that are killed or interrupted while they load their libraries, long before they train."""

import os
import re
import shutil
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


def start_run(arguments: list[str], **environment: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "train.py", "fit", *arguments], cwd=ROOT, text=True,
                            env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_for(condition, seconds: float = 60):
    """Wait until `condition` is true and return its value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError("timeout")


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_kill_before_training_ends_the_other_process_started_by_hand(engine, lost, recipe):
    arguments = recipe(engine=engine, trainer__strategy="ddp", trainer__devices=2 if engine == "torch" else 1)
    processes = [start_run(arguments, **environment, LOCAL_RANK=str(rank), NODE_RANK="0")
                 for rank, environment in enumerate(environments(2))]
    wait_for(lambda: is_connected(processes[0].pid, processes[1].pid))
    processes[lost].kill()
    killed = time.monotonic()
    output = processes[1 - lost].communicate(timeout=30)[0]
    processes[lost].communicate()
    assert processes[1 - lost].returncode == 75 and time.monotonic() - killed < 10, output
    assert f"error: Lost process {lost} on {socket.gethostname()} (PID {processes[lost].pid})" in output


def is_connected(first: int, second: int) -> bool:
    """Return whether the second process has a connection to a listening port of the first."""
    ports = {connection.laddr.port for connection in psutil.Process(first).net_connections()
             if connection.status == "LISTEN"}
    return any(connection.status == "ESTABLISHED" and connection.raddr and connection.raddr.port in ports
               for connection in psutil.Process(second).net_connections())


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["at once", "connected"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_kill_before_training_ends_the_other_process_started_by_lightning(lost, moment, recipe):
    first = start_run(recipe(trainer__strategy="ddp", trainer__devices=2))
    second = wait_for(lambda: next((child for child in psutil.Process(first.pid).children()
                                    if not is_gone(child) and "train.py" in " ".join(child.cmdline())), None))
    if moment == "connected":
        wait_for(lambda: is_connected(first.pid, second.pid))
    os.kill((first.pid, second.pid)[lost], signal.SIGKILL)
    if lost == 0:
        wait_for(lambda: is_gone(second), 15)
        assert f"PID {first.pid}) is gone" in (output := first.communicate()[0]) or "Lost process 0" in output
    else:
        output = first.communicate(timeout=15)[0]
        assert first.returncode == 75
        assert f"error: Lost process 1 on {socket.gethostname()} (PID {second.pid})" in output


# No handler is installed during Python's own start and the first imports.
BEFORE_HANDLERS = re.compile(r"(?!.*(end_at_signals\(\)|program\(\)))", re.S)
MESSAGE = "Interrupted before training started; nothing was written.\n"


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_signal_before_training_ends_the_run_with_status_130(engine, signum, recipe, tmp_path):
    """Signal the whole process group, as a terminal does. A line about the engine may be printed before."""
    arguments = [sys.executable, "train.py", "fit", *recipe(engine=engine)]
    for moment in (0.02, 0.04, 0.07, 0.1, 0.2, 0.4, 0.8, 1.5, 2):
        process = subprocess.Popen(arguments, cwd=ROOT, text=True, start_new_session=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT)
        time.sleep(moment)
        os.killpg(process.pid, signum)
        output = process.communicate(timeout=60)[0]
        if moment < 1.5 and process.returncode != 130:
            assert BEFORE_HANDLERS.match(output), output
            if process.returncode == 0:  # Python's start prints some interrupts as a warning and continues
                assert "KeyboardInterrupt" in output
                shutil.rmtree(tmp_path / "run")
        else:
            assert process.returncode == 130 and output.endswith(MESSAGE) and output.count("\n") <= 2, (moment, output)
        assert not (tmp_path / "run").exists()


BLOCKED = """
import hashlib
from lmmods.core.signals import raise_at_signals, watch_blocked_calls

watch_blocked_calls()
raise_at_signals("Not reached.")
print("started", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # releases the GIL and never returns
"""


@pytest.mark.slow
def test_a_signal_ends_a_blocked_call():
    process = subprocess.Popen([sys.executable, "-c", BLOCKED], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    assert process.stdout.readline() == "started\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("", MESSAGE) and process.returncode == 130


FORKING = """
import os, signal, sys, time
from lmmods.core.signals import raise_at_signals, watch_blocked_calls

watch_blocked_calls()
raise_at_signals("Not reached.")
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(30)
time.sleep(0.3)
os.kill(child, signal.SIGTERM)
time.sleep(0.3)
os.kill(child, signal.SIGKILL)
time.sleep(4)
print("continues")
"""


@pytest.mark.slow
def test_signals_to_a_forked_child_do_not_end_the_parent():
    # From Python 3.12 on, a fork in a process with threads warns. watch_blocked_calls has a thread on purpose.
    process = subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING], cwd=ROOT, text=True,
                             capture_output=True, timeout=60)
    assert (process.returncode, process.stdout, process.stderr) == (0, "continues\n", "")
