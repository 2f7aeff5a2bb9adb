"""Ctrl+C, SIGTERM and `--stop_at`.

Before training, signals end the program; during training the first one saves a checkpoint and ends the run, a second
one ends it at once. No module of this project is imported at the top: the program starts with `end_at_signals`.
"""

import os
import signal
import time
from typing import NoReturn

STOP_SIGNALS = signal.SIGINT, signal.SIGTERM
STATUS = 130
BEFORE = "Interrupted before training started; nothing was written."
# A launcher forwards signals that the process has received itself: within this many seconds, two count as one.
FORWARDING_SECONDS = 2.0
UNSAVED = "Nothing was saved: trainer.enable_checkpointing is false."
BLOCKED_SECONDS = 3.0  # seconds that a library call may continue after a signal, before training


def end_at_signals() -> None:
    """Make signals end the program at once, with one line.

    For the first seconds, when there is nothing to clean up and an exception could get lost in a library's import.
    """
    for signal_number in STOP_SIGNALS:
        signal.signal(signal_number, _end)


def raise_at_signals(message: str) -> None:
    """Make signals raise `Interrupted`, so that the program can clean up.

    If a library call does not return to Python, such as a rendezvous that waits for other machines,
    `watch_blocked_calls` ends the program.
    """
    def interrupt(signal_number: int, frame: object) -> None:
        _handled.append(signal_number)
        raise Interrupted(message)

    for signal_number in STOP_SIGNALS:
        signal.signal(signal_number, interrupt)


def watch_blocked_calls() -> None:
    """Start a thread that ends the program if Python does not get to handle a signal. Call once."""
    import threading

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if hasattr(os, "register_at_fork"):  # a child must not write into its parent's pipe
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def watch() -> None:
        while signal_byte := os.read(reader, 1):
            deadline = time.monotonic() + BLOCKED_SECONDS
            while signal_byte[0] in STOP_SIGNALS and not _handled:
                if time.monotonic() > deadline:
                    _end()
                time.sleep(0.05)
            _handled.clear()

    threading.Thread(target=watch, name="signals", daemon=True).start()


_handled: list[int] = []  # signals that a handler has received


def _end(*_: object) -> NoReturn:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        os.write(2, f"{BEFORE}\n".encode())
    os._exit(STATUS)


class Interrupted(BaseException):
    """Ctrl+C or SIGTERM. The message says what was saved."""


class Stopped(Interrupted):
    """The run has reached the step of `--stop_at`."""


class Interruption:
    """State of requests to stop this process: by Ctrl+C, SIGTERM, or a batch system's SIGUSR1.

    Args:
        saves: True if the run writes a checkpoint before it ends.
    """

    def __init__(self, saves: bool = True) -> None:
        self.requested = False
        self.stop_at: int | None = None  # optimiser step after which the run saves and ends
        self._is_reached = False
        self._saves = saves
        self._requested_at = 0.0

    def listen(self) -> None:
        """Install the signal handlers."""
        signal.set_wakeup_fd(-1)  # not `watch_blocked_calls`: a step may take long
        for signal_number in (*STOP_SIGNALS, signal.SIGUSR1):
            signal.signal(signal_number, self._on_signal)

    def note_step(self, step: int) -> None:
        """Check whether the run must stop after optimiser step `step`."""
        self._is_reached = self.stop_at is not None and step >= self.stop_at

    @property
    def is_due(self) -> bool:
        """True if this process has been asked to stop."""
        return self.requested or self._is_reached

    def stop(self, step: int, checkpoint: object) -> NoReturn:
        """End the run at optimiser step `step`, after `checkpoint` was written; None if the run writes none."""
        saved = f"Saved {checkpoint}; resume with --ckpt_path last." if checkpoint else UNSAVED
        if self._is_reached and not self.requested:
            raise Stopped(f"Stopped at step {step}, as set by --stop_at. {saved}")
        raise Interrupted(f"Interrupted at step {step}. {saved}")

    def _on_signal(self, _signal_number: int, _frame: object) -> None:
        if self.requested:
            if time.monotonic() - self._requested_at < FORWARDING_SECONDS:
                return
            raise Interrupted("Stopped at once; resume from the last checkpoint." if self._saves
                              else f"Stopped at once. {UNSAVED}")
        from lmmods.core.console import say

        self.requested, self._requested_at = True, time.monotonic()
        say("Interrupted: saving a checkpoint, then stopping. Again stops at once, without saving." if self._saves
            else "Interrupted: stopping after this step. Again stops at once.")
