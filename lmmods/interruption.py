"""Ctrl+C and SIGTERM: a checkpoint is saved and the run ends; a second one ends it at once."""

import signal
import time
from typing import Any

from lmmods.console import say

# Launchers pass on signals that the process has also had itself; within so many seconds they are the same one.
PASSED_ON = 2.0


class Interrupted(BaseException):
    """Ctrl+C or SIGTERM. The message says what was saved."""


class Interruption:
    """Whether this process has been asked to stop: by Ctrl+C, SIGTERM, or the SIGUSR1 of a batch system."""

    def __init__(self) -> None:
        self.requested = False
        self._when = 0.0

    def listen(self) -> None:
        """From now on the signals are noted here."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.requested:
            if time.monotonic() - self._when < PASSED_ON:
                return
            raise Interrupted("Stopped at once; the last checkpoint is the one to resume from.")
        self.requested, self._when = True, time.monotonic()
        say("\nInterrupted: saving a checkpoint, then stopping. Once more stops at once, without saving.")


def stop(step: int, checkpoint: Any) -> None:
    """End the run after `checkpoint` was written at optimiser step `step`."""
    raise Interrupted(f"Interrupted at step {step}. Saved {checkpoint}; go on with --ckpt_path last.")
