"""Ctrl+C and SIGTERM: the first saves a checkpoint and ends the run, a second one ends it at once."""

import signal
import time
from typing import Any

from lmmods.core.console import say

# A launcher forwards signals that the process received itself too: within so many seconds they count as one.
FORWARDING_SECONDS = 2.0
UNSAVED = "Nothing was saved: trainer.enable_checkpointing is false."


class Interrupted(BaseException):
    """Ctrl+C or SIGTERM. The message says what was saved."""


class Interruption:
    """Whether this process has been asked to stop: by Ctrl+C, SIGTERM, or the SIGUSR1 of a batch system.

    Args:
        saves: Whether the run writes a checkpoint before it ends.
    """

    def __init__(self, saves: bool = True) -> None:
        self.requested = False
        self._saves = saves
        self._when = 0.0

    def listen(self) -> None:
        """Install the signal handlers."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.requested:
            if time.monotonic() - self._when < FORWARDING_SECONDS:
                return
            raise Interrupted("Stopped at once; the last checkpoint is the one to resume from." if self._saves
                              else f"Stopped at once. {UNSAVED}")
        self.requested, self._when = True, time.monotonic()
        say("\nInterrupted: saving a checkpoint, then stopping. Once more stops at once, without saving." if self._saves
            else "\nInterrupted: stopping after this step. Once more stops at once.")


def stop(step: int, checkpoint: Any) -> None:
    """End the run at optimiser step `step`, after `checkpoint` was written; None where the run writes none."""
    raise Interrupted(f"Interrupted at step {step}. " + (
        f"Saved {checkpoint}; go on with --ckpt_path last." if checkpoint else UNSAVED))
