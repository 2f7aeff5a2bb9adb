"""Reward functions that misbehave for answers with certain words; the reward of others is their length."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

calls = []  # number of answers in each call


def _pids() -> str:
    return os.environ["HOSTILE_PIDS"]


def note(pid: int) -> None:
    """Record a process that must not survive."""
    with open(_pids(), "a") as file:
        file.write(f"{pid}\n")


def misbehave(text: str) -> None:
    word = text.split()[0]
    if word == "sleeps":
        time.sleep(1000)
    elif word == "matches":
        re.match(r"(a+)+$", "a" * 60 + "b")
    elif word == "exits":
        os._exit(3)
    elif word == "leaves":
        sys.exit("gone")
    elif word == "faults":
        ctypes.string_at(0)
    elif word == "kills":
        os.killpg(0, signal.SIGKILL)
    elif word == "eats":
        bytearray(5 * 2**30)
    elif word == "raises":
        raise LookupError("no such word\nand more")
    elif word == "closes":
        os.closerange(0, 1000)
    elif word == "closes-and-sleeps":
        os.closerange(0, 1000)
        time.sleep(1000)
    elif word == "forks-and-exits":
        if os.fork() == 0:
            note(os.getpid())
            time.sleep(1000)
        os._exit(4)


def length(completions, **_):
    for text in completions:
        misbehave(text)
    return [float(len(text)) for text in completions]


def values(completions, **_):
    return [{"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "huge": 1e300, "list": [1.0],
             "true": True, "negative": -2}.get(text, 1.0) for text in completions]


def too_few(completions, **_):
    return [1.0]


def a_number(completions, **_):
    return 1.0


def prints(completions, **_):
    print("printed by a reward")
    os.write(1, b"written by a reward\n")
    return [1.0 for _ in completions]


def moves(completions, **_):
    """Check that each call starts in the same folder, then change it."""
    here = os.getcwd() == os.environ["HOSTILE_HOME"]
    os.chdir(tempfile.mkdtemp())
    return [float(here) for _ in completions]


def returns_twice(completions, **_):
    if child := os.fork():
        note(child)
    return [float(len(text)) for text in completions]


def starts_others(completions, **_):
    """Start a grandchild in its own session, whose parent ends, and a program in another session."""
    if os.fork() == 0:
        if (child := os.fork()) == 0:
            os.setsid()
            time.sleep(1000)
        while os.getsid(child) != child:
            time.sleep(0.01)
        note(child)
        os._exit(0)
    os.wait()
    note(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True).pid)
    return [1.0 for _ in completions]


def starts_another(completions, **_):
    note(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid)
    return [1.0 for _ in completions]


def ends_later(completions, **_):
    """End the process after the call, before the next one."""
    threading.Timer(0.2, os._exit, [5]).start()
    return [1.0 for _ in completions]


def counts(completions, **_):
    calls.append(len(completions))
    if len(completions) > 1 and "raises" in completions:
        raise LookupError
    return [float(len(calls)) for _ in completions]


def arguments(prompts, completions, completion_ids, **columns):
    assert columns == {"answer": ["a", None], "other": [None, 2]}, columns
    assert prompts == ["p", [{"role": "user", "content": "q"}]], prompts
    assert completions == ["one", [{"role": "assistant", "content": "two"}]], completions
    assert completion_ids == [[1, 2], [3]], completion_ids
    return [1.0, 2.0]


def only_named(completions, answer):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


async def later(completions, **_):
    return [2.0 for _ in completions]


def order_in_sets(completions, **_):
    """Return rewards that depend on the hash seed."""
    return [float("".join({"a", "b", "c", "d", "e"}) == text) for text in completions]


not_callable = 1
