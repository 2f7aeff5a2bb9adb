"""Console output: printed once, by the first process, with secrets redacted; notes of libraries are silenced."""

import logging
import sys
import warnings

from lightning.fabric.utilities.rank_zero import rank_zero_only

from lmmods.core.redaction import redact


@rank_zero_only
def say(text: str) -> None:
    """Print a line."""
    print(redact(text), flush=True)


@rank_zero_only
def warn(text: str) -> None:
    """Print a warning."""
    print(redact(f"warning: {text}"), flush=True)


@rank_zero_only
def tell(text: str) -> None:
    """Print a line to stderr, for commands whose stdout is their result."""
    print(redact(text), file=sys.stderr, flush=True)


def quiet_libraries() -> None:
    """Silence notes of libraries that users can do nothing about; warnings about their recipe stay."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # devices, tips, "restored all states"
    # Asks for a package that would fetch kernels from a hub; bitsandbytes' own CPU code is used instead.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # raised inside its own calls
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")  # what is logged is the same on every process
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # our loaders need few
