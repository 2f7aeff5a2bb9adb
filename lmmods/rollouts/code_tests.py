"""Tests of programs that answers hold, each in a fresh interpreter with limits.

The limits keep a faulty program from harming the run. They are no prison for a hostile one, which may read what the
user may, and without Landlock write it, too. But no program may report its own success: that is decided here.
"""

import contextlib
import io
import json
import os
import pickle
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lmmods.rollouts import program_child
from lmmods.rollouts.asserts import Comparison, compile_test
from lmmods.rollouts.sandbox import Process

CHILD = program_child.__file__
FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
MEMORY = 2**30  # bytes that a program may allocate
FILE_SIZE = 2**24  # bytes of a file that it writes, its output too
PROGRAM, INPUT, OUTPUT = "program.py", "input", "output"  # files of a test
# Threads of libraries would take the memory, and the order in sets and dicts must not change from run to run.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LANG": "C.UTF-8",
               "PYTHONUTF8": "1"}
KEPT = ("PATH", "LD_LIBRARY_PATH")


class ProgramTest(NamedTuple):
    """A test of a program: Python code that runs after it, or what it must write for some input.

    Args:
        code: As `compile_test` returns it, with `comparisons`.
    """

    code: bytes | None = None
    comparisons: Sequence[Comparison] = ()
    input: str = ""
    output: str = ""


def share_passed(text: str, tests: Any, timeout: float, count_all: bool) -> float:
    """Return the share of the tests that the program in an answer passes.

    Args:
        tests: As in the column of a row (`read_tests`).
        timeout: Seconds that all tests may take together; those left over have failed.
        count_all: Go on after a test that failed.

    Raises:
        ValueError: The column holds no tests, or unknown ones.
    """
    found, program = read_tests(tests), program_in(text)
    deadline, passed = time.monotonic() + timeout, 0
    for test in found:
        seconds = deadline - time.monotonic()
        passes = seconds > 0 and is_passed(program, test, seconds)
        passed += passes
        if not passes and not count_all:
            break
    return passed / len(found)


def program_in(text: str) -> str:
    """Return the last fenced block of an answer, or else all of it."""
    blocks = FENCED.findall(text)
    return blocks[-1] if blocks else text


def read_tests(tests: Any) -> list[ProgramTest]:
    """Return the tests of a column: Python code, a list of such, pairs of input and output, or these as JSON.

    Raises:
        ValueError: It holds no tests, or unknown ones.
    """
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(json.JSONDecodeError):  # then it is code
            tests = json.loads(tests)
    if isinstance(tests, dict):
        if tests.get("fn_name") is not None:
            raise ValueError("tests that call a function by fn_name are not supported; write them as Python code")
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("a mapping of tests must have inputs and outputs, lists of the same length")
        tests = [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]
    found = [_read_test(each) for each in (tests if isinstance(tests, list | tuple) else [tests])]
    if not found:
        raise ValueError("there are no tests")
    return found


def _read_test(test: Any) -> ProgramTest:
    if isinstance(test, str) and test.strip():
        return ProgramTest(*compile_test(test))
    if isinstance(test, dict) and test.keys() >= {"input", "output"}:
        return ProgramTest(input=_stream(test["input"]), output=_stream(test["output"]))
    raise ValueError(f"a test is {test!r:.40}, but must be Python code, or a mapping of input and output")


def _stream(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def is_passed(program: str, test: ProgramTest, seconds: float) -> bool:
    """True if a program passes a test within a time."""
    deadline = time.monotonic() + seconds
    folder = Path(tempfile.mkdtemp())
    try:
        (folder / PROGRAM).write_bytes(program.encode(errors="surrogatepass"))
        (folder / INPUT).write_bytes(test.input.encode(errors="surrogatepass"))
        if test.code is not None:
            process = start(folder, "test", seconds)
            try:
                return _judge(process.channel, test.code, test.comparisons, deadline)
            finally:
                process.end()
        # A program that fails after its last line has still failed.
        return start(folder, "input", seconds).end(seconds) == 0 and (
            _lines((folder / OUTPUT).read_bytes().decode(errors="replace")) == _lines(test.output))
    finally:
        with contextlib.suppress(RecursionError):  # at folders that a program has nested deeply
            shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            subprocess.run(["rm", "-rf", folder], check=False, stderr=subprocess.DEVNULL)


def _judge(channel: socket.socket, code: bytes, comparisons: Sequence[Comparison], deadline: float) -> bool:
    """True if a process of `program_child` passes a test: all values are right, and the test has run to its end.

    The process is the program's, so nothing that it sends is trusted.
    """
    key, token = secrets.token_bytes(32), secrets.token_bytes(32)
    right = set[int]()
    try:
        _send(channel, _frame(key), deadline)
        if _receive(channel, deadline) != key:
            return False
        _send(channel, _frame(token) + code, deadline)
        channel.shutdown(socket.SHUT_WR)
        while (message := _receive(channel, deadline)) != token:
            number, value = _Values(io.BytesIO(message)).load()
            if not comparisons[number].holds(value):
                return False
            right.add(number)
    except Exception:  # whatever its bytes lead to
        return False
    return all(number in right for number, each in enumerate(comparisons) if each.is_required)


def _frame(message: bytes) -> bytes:
    return len(message).to_bytes(program_child.HEADER, "big") + message


def _send(channel: socket.socket, data: bytes, deadline: float) -> None:
    channel.settimeout(_left(deadline))
    channel.sendall(data)


def _left(deadline: float) -> float:
    """Return the seconds that are left. Raises TimeoutError: there are none."""
    if (seconds := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return seconds


def _receive(channel: socket.socket, deadline: float) -> bytes:
    """Return the next message. Raises OSError or EOFError: there is none in time, or it is too long."""

    def read(size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            channel.settimeout(_left(deadline))
            part = channel.recv(min(size - len(data), 2**16))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    size = int.from_bytes(read(program_child.HEADER), "big")
    if size > FILE_SIZE:
        raise OSError(f"a message of {size} bytes")
    return read(size)


class _Values(pickle.Unpickler):
    """Reads values of Python's own types, and nothing with which code could run."""

    def find_class(self, module: str, name: str) -> type:
        return {("builtins", "object"): object, ("builtins", "complex"): complex}[module, name]


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, and without empty ones at the end of all."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def start(folder: Path, way: str, seconds: float) -> Process:
    """Start the program of a folder.

    Args:
        way: What to do, as `program_child` names it.
        seconds: CPU time that it may take.
    """
    variables = {name: os.environ[name] for name in (*KEPT, *program_child.MARKS) if name in os.environ}
    with open(folder / INPUT, "rb") as given, open(folder / OUTPUT, "wb") as output:
        # -I would ignore the hash seed; the variables are given here, so nothing else is left of it but these.
        return Process(
            ["-s", "-P", "-B", CHILD, way, *map(str, (MEMORY, FILE_SIZE, int(seconds) + 1))],
            {**ENVIRONMENT, **variables, "HOME": str(folder), "TMPDIR": str(folder)}, is_outermost=False,
            cwd=folder, stdin=given, stdout=output, stderr=subprocess.DEVNULL)


def isolates() -> bool:
    """True if this system lets programs run without network, and end with all that they have started."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / INPUT).touch()
        return start(Path(name), "probe", 10).end(10) == 0
