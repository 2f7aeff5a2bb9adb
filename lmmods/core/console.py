"""Console output: printed once, by the first process, with secrets redacted; notes of libraries are silenced."""

import logging
import sys
import warnings
from typing import TextIO

from lmmods.core.redaction import redact


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
        print(printable(redact(text)), file=file, flush=True)


def printable(text: str) -> str:
    """Replace characters by which data or models could control the terminal."""
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
