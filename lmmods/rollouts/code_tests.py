"""Test the programs in answers, each in a fresh interpreter with limits.

The limits keep a faulty program from harming the run. They do not contain a hostile one: it can read what the user can
read, and without Landlock also write it. But no program can report its own success: that is decided here.
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
MEMORY = 2**30  # maximum bytes that a program may allocate
FILE_SIZE = 2**24  # maximum bytes of each file that it writes, including its output
PROGRAM, INPUT, OUTPUT = "program.py", "input", "output"  # files of a test
# Library threads would use up the memory; the order of sets must not change from run to run.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LANG": "C.UTF-8",
               "PYTHONUTF8": "1"}
INHERITED_VARIABLES = ("PATH", "LD_LIBRARY_PATH")


class ProgramTest(NamedTuple):
    """A test of a program: Python code that runs after it, or the output that it must write for an input.

    Args:
        code: Compiled code from `compile_test`, together with `comparisons`; None for a test of input and output.
    """

    code: bytes | None = None
    comparisons: Sequence[Comparison] = ()
    input: str = ""
    output: str = ""


def run_tests(text: str, tests: Any, timeout: float, count_all: bool) -> float:
    """Return the fraction of the tests that the program in an answer passes.

    Args:
        tests: Value of the row's column of tests (see `read_tests`).
        timeout: Seconds for all tests together; tests that have not run by then fail.
        count_all: Continue after a failed test.

    Raises:
        ValueError: The column has no tests, or tests in an unknown form.
    """
    program_tests, program = read_tests(tests), extract_program(text)
    deadline, num_passed = time.monotonic() + timeout, 0
    for test in program_tests:
        seconds = deadline - time.monotonic()
        has_passed = seconds > 0 and is_passed(program, test, seconds)
        num_passed += has_passed
        if not has_passed and not count_all:
            break
    return num_passed / len(program_tests)


def extract_program(text: str) -> str:
    """Return the last fenced code block of an answer, or the whole answer if there is none."""
    blocks = FENCED.findall(text)
    return blocks[-1] if blocks else text


def read_tests(tests: Any) -> list[ProgramTest]:
    """Return the tests in a column: Python code, a list of such code, pairs of input and output, or these as JSON.

    Raises:
        ValueError: The column has no tests, or tests in an unknown form.
    """
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(json.JSONDecodeError):  # then it is Python code
            tests = json.loads(tests)
    if isinstance(tests, dict):
        if tests.get("fn_name") is not None:
            raise ValueError("tests that call a function by fn_name are not supported. Write them as Python code")
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("a mapping of tests must have inputs and outputs, two lists of the same length")
        tests = [{"input": text, "output": expected} for text, expected in zip(inputs, outputs, strict=True)]
    program_tests = [_read_test(test) for test in (tests if isinstance(tests, list | tuple) else [tests])]
    if not program_tests:
        raise ValueError("the list of tests is empty")
    return program_tests


def _read_test(test: Any) -> ProgramTest:
    if isinstance(test, str) and test.strip():
        return ProgramTest(*compile_test(test))
    if isinstance(test, dict) and test.keys() >= {"input", "output"}:
        return ProgramTest(input=_join_lines(test["input"]), output=_join_lines(test["output"]))
    raise ValueError(f"a test is {test!r:.40}, but must be Python code, or a mapping of input and output")


def _join_lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def is_passed(program: str, test: ProgramTest, seconds: float) -> bool:
    """Return whether a program passes a test within some seconds."""
    deadline = time.monotonic() + seconds
    folder = Path(tempfile.mkdtemp())
    try:
        (folder / PROGRAM).write_bytes(program.encode(errors="surrogatepass"))
        (folder / INPUT).write_bytes(test.input.encode(errors="surrogatepass"))
        if test.code is not None:
            process = start_program(folder, "test", seconds)
            try:
                return _judge(process.channel, test.code, test.comparisons, deadline)
            finally:
                process.end()
        # A program that fails after writing the right output has still failed.
        return start_program(folder, "input", seconds).end(seconds) == 0 and (
            _split_lines((folder / OUTPUT).read_bytes().decode(errors="replace")) == _split_lines(test.output))
    finally:
        with contextlib.suppress(RecursionError):  # raised for folders that a program has nested deeply
            shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            subprocess.run(["rm", "-rf", folder], check=False, stderr=subprocess.DEVNULL)


def _judge(channel: socket.socket, code: bytes, comparisons: Sequence[Comparison], deadline: float) -> bool:
    """Return whether a process of `program_child` passes a test: all values match, and the test has run to its end.

    The program runs in that process, so nothing that it sends is trusted.
    """
    key, token = secrets.token_bytes(32), secrets.token_bytes(32)
    matched = set[int]()
    try:
        _send(channel, _frame(key), deadline)
        if _receive(channel, deadline) != key:
            return False
        _send(channel, _frame(token) + code, deadline)
        channel.shutdown(socket.SHUT_WR)
        while (message := _receive(channel, deadline)) != token:
            index, value = _Values(io.BytesIO(message)).load()
            if not comparisons[index].holds(value):
                return False
            matched.add(index)
    except Exception:  # the bytes are the program's, so they can raise anything
        return False
    return all(index in matched for index, comparison in enumerate(comparisons) if comparison.is_required)


def _frame(message: bytes) -> bytes:
    return len(message).to_bytes(program_child.HEADER, "big") + message


def _send(channel: socket.socket, data: bytes, deadline: float) -> None:
    channel.settimeout(_seconds_left(deadline))
    channel.sendall(data)


def _seconds_left(deadline: float) -> float:
    """Return the seconds until the deadline. Raises TimeoutError if it has passed."""
    if (seconds := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return seconds


def _receive(channel: socket.socket, deadline: float) -> bytes:
    """Return the next message. Raises OSError or EOFError if none arrives in time or it is too long."""

    def read(size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            channel.settimeout(_seconds_left(deadline))
            chunk = channel.recv(min(size - len(data), 2**16))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)

    size = int.from_bytes(read(program_child.HEADER), "big")
    if size > FILE_SIZE:
        raise OSError(f"a message of {size} bytes")
    return read(size)


class _Values(pickle.Unpickler):
    """Reads values of Python's own types; pickles that could run code are an error."""

    def find_class(self, module: str, name: str) -> type:
        return {("builtins", "object"): object, ("builtins", "complex"): complex}[module, name]


def _split_lines(text: str) -> list[str]:
    """Split a text into lines, without trailing white space and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def start_program(folder: Path, mode: str, seconds: float) -> Process:
    """Start the program in a folder.

    Args:
        mode: Mode of `program_child`: test, input or probe.
        seconds: Maximum CPU time.
    """
    variables = {name: os.environ[name] for name in (*INHERITED_VARIABLES, *program_child.MARKS) if name in os.environ}
    with open(folder / INPUT, "rb") as program_input, open(folder / OUTPUT, "wb") as program_output:
        # -I would ignore the hash seed. These flags do the rest of what it does: the environment is set here.
        return Process(
            ["-s", "-P", "-B", CHILD, mode, *map(str, (MEMORY, FILE_SIZE, int(seconds) + 1))],
            {**ENVIRONMENT, **variables, "HOME": str(folder), "TMPDIR": str(folder)}, is_outermost=False,
            cwd=folder, stdin=program_input, stdout=program_output, stderr=subprocess.DEVNULL)


def can_isolate() -> bool:
    """Return whether this system can run programs without network and end all processes that they start."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / INPUT).touch()
        return start_program(Path(folder), "probe", 10).end(10) == 0
