"""Console output: printed once, by the first process, with secrets redacted; notes of libraries are silenced."""

import logging
import os
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import parent_process
from typing import Any, TextIO

from lmmods.core.redaction import redact

ERASE = "\r\033[J"  # erases to the end of the screen, because a narrowed window folds the line
open_bars: list[Any] = []  # tqdm bars on the terminal, above which messages are printed


def say(text: str) -> None:
    """Print a line."""
    _print(text)


def warn(text: str) -> None:
    """Print a warning."""
    _print(f"warning: {text}")


def tell(text: str) -> None:
    """Print a line to stderr, for commands whose stdout is their result."""
    _print(text, sys.stderr)


def _print(text: str, file: TextIO | None = None) -> None:
    lightning = sys.modules.get("lightning.fabric.utilities.rank_zero")  # knows the rank once it is imported
    if lightning is None or lightning.rank_zero_only.rank == 0:
        stream = file or sys.stdout
        with _above_bars(stream):
            print(printable(redact(text)), file=stream, flush=True)


def _above_bars(stream: TextIO) -> AbstractContextManager[None]:
    """Remove progress bars from the terminal while a message is printed; another process's bar redraws itself."""
    if is_terminal(stream) and (parent_process() is not None or os.environ.get("LOCAL_RANK", "0") != "0"):
        stream.write(ERASE)  # a worker, or a process launched by Lightning: the first process has the bar
        return nullcontext()
    return open_bars[-1].external_write_mode(stream) if open_bars else nullcontext()


def is_terminal(stream: TextIO | None) -> bool:
    """Return True if a stream is a terminal with cursor control."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def shows_colour(stream: TextIO | None) -> bool:
    """Return True if output on a stream may be coloured; see https://no-color.org."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def printable(text: str) -> str:
    """Replace control characters, with which data or models could change the terminal."""
    return text.translate({0x1B: "␛", 0x9B: "␛"})


def quiet_libraries() -> None:
    """Silence notes of libraries that users can do nothing about; warnings about their recipe are kept.

    Call it again after importing Lightning, which sets the level of its loggers on import.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # devices, seeds, tips, "restored all states"
    # It suggests a package that would download kernels from a hub; bitsandbytes' own CPU code is used instead.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # raised inside its own calls
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")  # logged values are the same on every process
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # our loaders need few
