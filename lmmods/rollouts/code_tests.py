"""Tests of programs that answers hold, each in a fresh interpreter with limits.

The limits keep a faulty program from harming the run. They are no prison for a hostile one, which may read and write
what the user may.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from lmmods.rollouts import program_child

CHILD = program_child.__file__
FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
MEMORY = 2**30  # bytes that a program may allocate
FILE_SIZE = 2**24  # bytes of a file that it writes, its output too
PROGRAM, TEST, INPUT, OUTPUT = "program.py", "test.py", "input", "output"  # files of a test
# Threads of libraries would take the memory, and the order in sets and dicts must not change from run to run.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LANG": "C.UTF-8",
               "PYTHONUTF8": "1"}
KEPT = ("PATH", "LD_LIBRARY_PATH", "TMPDIR")


class ProgramTest(NamedTuple):
    """A test of a program: Python code that runs after it, or what it must write for some input."""

    code: str | None = None
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
        return ProgramTest(code=test)
    if isinstance(test, dict) and test.keys() >= {"input", "output"}:
        return ProgramTest(None, _stream(test["input"]), _stream(test["output"]))
    raise ValueError(f"a test is {test!r:.40}, but must be Python code, or a mapping of input and output")


def _stream(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def is_passed(program: str, test: ProgramTest, seconds: float) -> bool:
    """True if a program passes a test within a time."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for file, text in ((PROGRAM, program), (TEST, test.code), (INPUT, test.input)):
            (folder / file).write_bytes((text or "").encode(errors="surrogatepass"))
        status, said = run_program(folder, "test" if test.code is not None else "input", seconds)
        if test.code is not None:
            return said == program_child.PASSED
        # A program that fails after its last line has still failed.
        return status == 0 and _lines((folder / OUTPUT).read_bytes().decode(errors="replace")) == _lines(test.output)


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, and without empty ones at the end of all."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def run_program(folder: Path, way: str, seconds: float) -> tuple[int, bytes]:
    """Run the program of a folder, and end it with all that it has started.

    Args:
        way: What to do, as `program_child` names it.
        seconds: Time after which it is killed.

    Returns:
        Its exit status, negative if a signal ended it, and what the process reported.
    """
    reader, writer = os.pipe()
    variables = {name: os.environ[name] for name in (*KEPT, *program_child.MARKS) if name in os.environ}
    limits = map(str, (writer, MEMORY, FILE_SIZE, int(seconds) + 1))
    try:
        with open(folder / INPUT, "rb") as given, open(folder / OUTPUT, "wb") as output:
            # -I would ignore the hash seed; the variables are given here, so nothing else is left of it but these.
            process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-B", CHILD, way, *limits], cwd=folder, stdin=given, stdout=output,
                stderr=subprocess.DEVNULL, pass_fds=(writer,), start_new_session=True,
                env={**ENVIRONMENT, **variables, "HOME": str(folder)})
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.set_blocking(reader, False)  # what it started elsewhere may hold the other end open
        with contextlib.suppress(BlockingIOError):
            return process.returncode, os.read(reader, 100)
        return process.returncode, b""
    finally:
        os.close(reader)
        os.close(writer)


def isolates() -> bool:
    """True if this system lets programs run without network, and end with all that they have started."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / INPUT).touch()
        return run_program(Path(name), "probe", 10)[1] == program_child.PASSED
