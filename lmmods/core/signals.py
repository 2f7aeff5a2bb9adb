"""Ctrl+C and SIGTERM: before training they end the program; in training the first saves a checkpoint and ends the run,
a second one ends it at once; and `--stop_at`.

Nothing of ours is imported here at the top: the program begins with `end_at_signals`.
"""

import os
import signal
import time
from typing import Any, NoReturn

ASKED = signal.SIGINT, signal.SIGTERM
STATUS = 130
BEFORE = "Interrupted before training began; nothing was written."
# A launcher forwards signals that the process received itself too: within so many seconds they count as one.
FORWARDING_SECONDS = 2.0
UNSAVED = "Nothing was saved: trainer.enable_checkpointing is false."
BLOCKED = 3.0  # seconds that a call into a library may go on after a signal, before training


def end_at_signals() -> None:
    """From now on they end the program where it stands, with one line: for its first seconds, in which it has nothing
    to put in order, and an exception could get lost in a library that is being imported."""
    for number in ASKED:
        signal.signal(number, _end)


def raise_at_signals(message: str) -> None:
    """From now on they raise `Interrupted`, so that what has begun is put in order.

    Where a call into a library does not come back to Python, as a rendezvous that waits for other machines, the program
    ends all the same.
    """
    def interrupt(number: int, frame: Any) -> None:
        _taken.append(number)
        raise Interrupted(message)

    for number in ASKED:
        signal.signal(number, interrupt)


def watch_blocked_calls() -> None:
    """Let a thread end the program where a signal comes and Python does not get to its handler. Once in a program."""
    import threading

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if hasattr(os, "register_at_fork"):  # signals of a child are its own
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def watch() -> None:
        while number := os.read(reader, 1):
            deadline = time.monotonic() + BLOCKED
            while number[0] in ASKED and not _taken:
                if time.monotonic() > deadline:
                    _end()
                time.sleep(0.05)
            _taken.clear()

    threading.Thread(target=watch, name="signals", daemon=True).start()


_taken: list[int] = []  # signals that a handler has seen


def _end(*_: Any) -> NoReturn:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        os.write(2, f"{BEFORE}\n".encode())
    os._exit(STATUS)


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
        signal.set_wakeup_fd(-1)  # a step may take long
        for number in (*ASKED, signal.SIGUSR1):
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
        from lmmods.core.console import say

        self.requested, self._when = True, time.monotonic()
        say("Interrupted: saving a checkpoint, then stopping. Once more stops at once, without saving." if self._saves
            else "Interrupted: stopping after this step. Once more stops at once.")
