"""Ctrl+C and SIGTERM: the first saves a checkpoint and ends the run, a second one ends it at once; and `--stop_at`."""

import signal
import time
from typing import Any, NoReturn

from lmmods.core.console import say

# A launcher forwards signals that the process received itself too: within so many seconds they count as one.
FORWARDING_SECONDS = 2.0
UNSAVED = "Nothing was saved: trainer.enable_checkpointing is false."


class Interrupted(BaseException):
    """Ctrl+C or SIGTERM. The message says what was saved."""


class Stopped(Interrupted):
    """The run stands where `--stop_at` has said that it stops."""


class Interruption:
    """Whether this process has been asked to stop: by Ctrl+C, SIGTERM, or the SIGUSR1 of a batch system.

    Args:
        saves: Whether the run writes a checkpoint before it ends.
    """

    def __init__(self, saves: bool = True) -> None:
        self.requested = False
        self.stop_at: int | None = None  # optimiser step after which the run saves and ends
        self._is_reached = False
        self._saves = saves
        self._when = 0.0

    def listen(self) -> None:
        """Install the signal handlers."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def note_step(self, step: int) -> None:
        """Look whether the run, which goes on behind optimiser step `step`, was to stop there."""
        self._is_reached = self.stop_at is not None and step >= self.stop_at

    @property
    def is_due(self) -> bool:
        """Whether this process wants to stop."""
        return self.requested or self._is_reached

    def stop(self, step: int, checkpoint: Any) -> NoReturn:
        """End the run at optimiser step `step`, after `checkpoint` was written; None where the run writes none."""
        saved = f"Saved {checkpoint}; go on with --ckpt_path last." if checkpoint else UNSAVED
        if self._is_reached and not self.requested:
            raise Stopped(f"Stopped at step {step}, as --stop_at says. {saved}")
        raise Interrupted(f"Interrupted at step {step}. {saved}")

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.requested:
            if time.monotonic() - self._when < FORWARDING_SECONDS:
                return
            raise Interrupted("Stopped at once; the last checkpoint is the one to resume from." if self._saves
                              else f"Stopped at once. {UNSAVED}")
        self.requested, self._when = True, time.monotonic()
        say("Interrupted: saving a checkpoint, then stopping. Once more stops at once, without saving." if self._saves
            else "Interrupted: stopping after this step. Once more stops at once.")
