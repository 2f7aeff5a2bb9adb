"""How far a phase is: a bar on the last line of a terminal, plain lines elsewhere; the same in both engines."""

import sys
import time
from collections.abc import Callable

import psutil

from lmmods.core.console import say
from lmmods.core.terminal import is_terminal, status_line
from lmmods.core.throughput import Pace

REDRAWN = 0.1  # seconds between two pictures of the bar
BAR_WIDTH = 20
# The expected time is said when so many steps have been measured, or so many seconds.
STEPS_MEASURED, SECONDS_MEASURED = 10, 30.0


class Bar:
    """Steps, loss, tokens/s, memory and the time left.

    Args:
        enabled: False shows nothing (`trainer.enable_progress_bar`, or not the first process).
        device_memory: Peak bytes in use on the accelerator; where there is none, those of the process are shown.
        clock: Seconds; it may stand while the time left should not count, as while programs are compiled.
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
        self._expected = False  # whether the expected time has been said

    def open(self, phase: str, total: int, initial: int = 0, first: str = "",
             validations: Callable[[int], int] = lambda step: 0) -> None:
        """Begin a phase.

        Args:
            phase: `train`, whose steps may be printed, or what is done batch by batch.
            total: Steps, or batches.
            initial: Those done before.
            first: What happens before the first is done, such as compiling.
            validations: How many validations are to come after a step.
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
        """A validation begins."""
        self._pace.pause()

    def go_on(self) -> None:
        """The validation is over."""
        self._pace.go_on()

    def say(self, text: str) -> None:
        if self._enabled:
            say(text)

    def close(self) -> None:
        if self._line is not None:
            self._line.show("")
        self._phase = ""

    def _say_expected(self) -> None:
        """Once it is measured, how long the run will take."""
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
    """Hours, minutes and seconds."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
