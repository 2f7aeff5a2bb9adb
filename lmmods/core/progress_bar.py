"""Progress of a phase: a bar on the last line of a terminal, plain lines elsewhere; the same in both engines."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

import psutil

from lmmods.core.console import say
from lmmods.core.throughput import Pace

REDRAWN = 0.1  # least seconds between two redraws of the bar
BAR_WIDTH = 20
# The expected time is printed after this many measured steps, or seconds.
STEPS_MEASURED, SECONDS_MEASURED = 10, 30.0


class Bar:
    """Steps, loss, tokens/s, memory and the time left.

    Args:
        enabled: False shows nothing (`trainer.enable_progress_bar`, or not the first process).
        device_memory: Peak bytes in use on the accelerator; without one, those of the process are shown.
        clock: Seconds; may stand still while time should not count, for example during compilation.
    """

    def __init__(self, enabled: bool = True, device_memory: Callable[[], int | None] = lambda: None,
                 clock: Callable[[], float] | None = None):
        self._enabled, self._device_memory, self._clock = enabled, device_memory, clock
        self._line = status_line() if enabled else None
        self._prints = enabled and not (self._line and is_terminal(sys.stdout))
        self._phase = self._text = ""
        self._count = self._total = 0
        self._drawn = 0.0
        self._pace = Pace(1, clock)
        self._validations: Callable[[int], int] = lambda step: 0
        self._expected = False  # True once the expected time has been printed

    def open(self, phase: str, total: int, initial: int = 0, first: str = "",
             validations: Callable[[int], int] = lambda step: 0) -> None:
        """Start a phase.

        Args:
            phase: `train`, whose steps may be printed, or another phase, counted in batches.
            total: Steps, or batches.
            initial: Number of those already done.
            first: What happens before the first is done, such as compiling.
            validations: Returns the number of validations after a step.
        """
        self._phase, self._count, self._total, self._text = phase, initial, total, first
        self._pace, self._validations = Pace(total, self._clock), validations
        self._expected = phase != "train" or not self._enabled
        self._draw()

    def update(self, count: int | None = None, text: str = "") -> None:
        """Advance the bar.

        Args:
            count: Steps done; None adds one.
            text: Shown beside the bar; without a terminal, printed as a line.
        """
        done = self._count + 1 if count is None else count
        if done > self._count:
            self._count = done
            self._pace.mark(done)
            if not self._expected:
                self._say_expected()
        if text and self._enabled:
            memory = self._device_memory() or psutil.Process().memory_info().rss
            self._text = f"{text}  memory {memory / 2**30:.1f} GiB"
            if self._prints:
                print(f"step {count}/{self._total}  {self._text}{self._time_left()}", flush=True)
        if self._line is not None and (text or time.monotonic() - self._drawn >= REDRAWN):
            self._draw()

    def pause(self) -> None:
        """Call when a validation begins."""
        self._pace.pause()

    def go_on(self) -> None:
        """Call when the validation is over."""
        self._pace.go_on()

    def say(self, text: str) -> None:
        if self._enabled:
            say(text)

    def close(self) -> None:
        if self._line is not None:
            self._line.show("")
        self._phase = ""

    def _say_expected(self) -> None:
        """Print the expected time of the run once it can be estimated."""
        steps, seconds = self._pace.measured
        left = self._pace.left(self._count, self._validations(self._count))
        if left is None or not steps or steps < STEPS_MEASURED and seconds < SECONDS_MEASURED:
            return
        self._expected = True
        to_come = self._validations(self._count)
        without = "; validations not counted, as none has run yet" if to_come and not self._pace.has_paused else ""
        say(f"Expected: about {clock(left)} for the {self._total - self._count} steps to come, at the speed of the "
            f"{steps} measured{without}.")

    def _time_left(self) -> str:
        left = self._pace.left(self._count, self._validations(self._count))
        return "" if left is None else f"  {clock(left)} left"

    def _draw(self) -> None:
        if self._line is None or not self._phase:
            return
        self._drawn = time.monotonic()
        share = min(self._count / self._total, 1.0) if self._total else 0.0
        head = f"{self._phase} {share:4.0%} {self._count}/{self._total}" if self._total else self._phase
        tail = self._time_left() + (f"  {self._text}" if self._text else "")
        width = min(BAR_WIDTH, self._line.width() - len(head) - len(tail) - 4)
        bar = f" [{'#' * round(share * width):-<{width}}]" if width >= 5 else ""
        self._line.show(head + bar + tail)


def describe(metrics: dict[str, float], prefix: str) -> str:
    """Metrics of a phase on one line."""
    return "  ".join(f"{name} {float(value):.4g}" for name, value in metrics.items() if name.startswith(prefix))


def clock(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


# ---------------------------------------------------------------------------------------------------------------------
# The last line of a terminal: it stays below all other output, whoever prints it, and never breaks a line of it.

ERASE = "\r\033[J"  # erases to the end of the screen, because a narrowed window folds the line


class StatusLine:
    """A line that is redrawn after each line printed above it.

    The cursor rests at its beginning, so that output that bypasses `Above`, such as that of a C library, overwrites it
    from the left instead of being appended.

    Args:
        terminal: Stream of the terminal.
        erases: True if another process draws such a line on the same terminal, to be overwritten by output of this one.
    """

    def __init__(self, terminal: TextIO, erases: bool = False):
        self._terminal, self._erases = terminal, erases
        self._lock = threading.RLock()  # reentrant: a signal handler may print while its own thread prints
        self._process = os.getpid()
        self._text = ""
        self._in_line = False  # True if a line above has no line end yet

    def show(self, text: str) -> None:
        """Draw `text`, cut to the current width of the window; an empty text removes the line."""
        with self._lock:
            shown, self._text = self._text, text
            if self._in_line and text and not shown:  # begun before there was a status line
                self.print("\n", self._terminal)
            elif not self._in_line and (text or shown):
                self._draw()

    def _draw(self) -> None:
        self._terminal.write(f"{ERASE}{self._text[:self.width() - 1]}\r" if self._text else ERASE)
        self._terminal.flush()

    def width(self) -> int:
        """Columns of the terminal; 80 if unknown."""
        return os.get_terminal_size(self._terminal.fileno()).columns or 80

    def print(self, text: str, stream: TextIO) -> None:
        """Write `text` above the line on `stream`, which is on the same terminal."""
        if os.getpid() != self._process:  # a fork: the line is drawn by its parent
            self._text, self._erases, self._process = "", True, os.getpid()
        with self._lock:
            if text and not self._in_line and (self._text or self._erases):
                text = ERASE + text
            stream.write(text)
            stream.flush()  # stdout and stderr share the terminal, each with its own buffer
            if text:
                self._in_line = not text.endswith(("\n", "\r"))  # tqdm's bars remove themselves by "\r"
            if not self._in_line and self._text:
                self._draw()


class Above:
    """Replacement of a stream on the terminal that writes above the status line."""

    def __init__(self, stream: TextIO, line: StatusLine):
        self._stream, self._line = stream, line

    def write(self, text: str) -> int:
        self._line.print(text, self._stream)
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def is_terminal(stream: Any) -> bool:
    """True if a stream is a terminal with cursor control."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def shows_colour(stream: Any) -> bool:
    """True if output on a stream may be coloured; see https://no-color.org."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


_line: StatusLine | None = None


def keep_last_line(erases: bool = False) -> None:
    """Make this process print above the status line, if its stderr is a terminal.

    Call it before importing libraries that keep references to the streams, such as logging ones. For arguments see
    `StatusLine`.
    """
    global _line
    if _line is not None or not is_terminal(sys.stderr):
        return
    _line = StatusLine(sys.stderr, erases)
    sys.stderr = Above(sys.stderr, _line)
    if is_terminal(sys.stdout):
        sys.stdout = Above(sys.stdout, _line)


def status_line() -> StatusLine | None:
    """The status line of this process; None without a terminal."""
    return _line
