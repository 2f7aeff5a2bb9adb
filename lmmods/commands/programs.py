"""Commands of this program, started by another one of its commands."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen

import lmmods
from lmmods.commands.trust import FLAG, is_trusted

TRAIN = Path(lmmods.__path__[0]).parent / "train.py"
# As one types it: a package that is installed has no train.py beside it, but the script `lmmods`.
TYPED = ("python", "train.py") if TRAIN.exists() else ("lmmods",)


def command(arguments: list[str]) -> list[str]:
    """This program with these arguments, to be started."""
    program = TRAIN if TRAIN.exists() else sys.argv[0]
    return [sys.executable, str(program), *arguments, *([FLAG, "true"] if is_trusted() else [])]


@contextmanager
def started(arguments: list[str], log: Path, keeps: tuple[int, ...] = ()) -> Iterator[Popen]:
    """A process of this program with these arguments, which is asked to end where the block is left before its end.

    Args:
        log: File that gets all it prints, behind what is there.
        keeps: Open files that it holds as long as it lives.
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
    """The last message `error: …` in a log, or else its last line."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it printed nothing"])[-1]
