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


# Python's own start, and the imports of the first lines, come before any handler.
BEFORE_HANDLERS = re.compile(r"(?!.*(end_at_signals\(\)|program\(\)))", re.S)
SAID = "Interrupted before training started; nothing was written.\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_interrupted_at_any_moment_before_training(engine, number, recipe, tmp_path):
    """To the whole group, as a terminal does it. What a run says of its engine may come before."""
    arguments = [sys.executable, "train.py", "fit", *recipe(engine=engine)]
    for moment in (0.02, 0.04, 0.07, 0.1, 0.2, 0.4, 0.8, 1.5, 2):
        process = subprocess.Popen(arguments, cwd=ROOT, text=True, start_new_session=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT)
        time.sleep(moment)
        os.killpg(process.pid, number)
        said = process.communicate(timeout=60)[0]
        if moment < 1.5 and process.returncode != 130:
            assert BEFORE_HANDLERS.match(said), said
            if process.returncode == 0:  # Python's start shows some interrupts as a warning, and goes on
                assert "KeyboardInterrupt" in said
                shutil.rmtree(tmp_path / "run")
        else:
            assert process.returncode == 130 and said.endswith(SAID) and said.count("\n") <= 2, (moment, said)
        assert not (tmp_path / "run").exists()


BLOCKED = """
import hashlib
from lmmods.core.signals import raise_at_signals, watch_blocked_calls

watch_blocked_calls()
raise_at_signals("Not reached.")
print("works", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # lets other threads go on, and never comes back to Python
"""


@pytest.mark.slow
def test_a_call_that_does_not_come_back_is_ended_too():
    process = subprocess.Popen([sys.executable, "-c", BLOCKED], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    assert process.stdout.readline() == "works\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("", SAID) and process.returncode == 130


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
print("goes on")
"""


@pytest.mark.slow
def test_signals_of_a_child_are_its_own():
    # Python warns of a fork beside threads from 3.12 on, and watch_blocked_calls has one: that is what is tried here.
    process = subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING], cwd=ROOT, text=True,
                             capture_output=True, timeout=60)
    assert (process.returncode, process.stdout, process.stderr) == (0, "goes on\n", "")
