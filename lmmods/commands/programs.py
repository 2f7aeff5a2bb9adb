"""Start this program from one of its commands."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen

import lmmods
from lmmods.recipe.trust import FLAG, is_trusted

TRAIN = Path(lmmods.__path__[0]).parent / "train.py"
# As the user types it: an installed package has the script `lmmods` instead of train.py.
TYPED = ("python", "train.py") if TRAIN.exists() else ("lmmods",)


def command(arguments: list[str]) -> list[str]:
    """Return the command line that starts this program with these arguments."""
    program = TRAIN if TRAIN.exists() else sys.argv[0]
    return [sys.executable, str(program), *arguments, *([FLAG, "true"] if is_trusted() else [])]


@contextmanager
def run_program(arguments: list[str], log: Path, keeps: tuple[int, ...] = ()) -> Iterator[Popen]:
    """Run this program with these arguments, and terminate it at the end of the context if it still runs.

    Args:
        log: File that its output is appended to.
        keeps: File descriptors that the process inherits and keeps open.
    """
    with open(log, "ab") as file:
        process = Popen(command(arguments), stdin=DEVNULL, stdout=file, stderr=STDOUT, pass_fds=keeps)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def last_error(log: Path) -> str:
    """Return the last `error: …` message in a log, or else its last line."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it printed nothing"])[-1]
