"""Progress of a phase: tqdm's bar on a terminal, plain lines elsewhere; the same in both engines."""

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

import psutil
from tqdm import tqdm

from lmmods.core.console import ERASE, is_terminal, open_bars, say
from lmmods.core.throughput import Pace

# The expected time is printed after this many measured steps, or seconds.
STEPS_MEASURED, SECONDS_MEASURED = 10, 30.0
COLUMNS, ROWS = 80, 24  # of a terminal of unknown size: it reports 0, for which tqdm would show nothing


class Bar:
    """Steps, loss, tokens/s, memory and the time left.

    Args:
        enabled: False shows nothing (`trainer.enable_progress_bar`, or not the first process).
        device_memory: Returns the peak bytes in use on the accelerator; None shows the process's memory instead.
        clock: Returns seconds; may stop while time should not count, for example during compilation.
    """

    def __init__(self, enabled: bool = True, device_memory: Callable[[], int | None] = lambda: None,
                 clock: Callable[[], float] | None = None):
        self._enabled, self._device_memory, self._clock = enabled, device_memory, clock
        self._has_bar = enabled and is_terminal(sys.stderr)
        self._prints_lines = enabled and not (self._has_bar and is_terminal(sys.stdout))
        self._bar: tqdm | None = None
        self._text = ""
        self._count = self._total = 0
        self._pace = Pace(1, clock)
        self._validations: Callable[[int], int] = lambda step: 0
        self._is_estimate_done = False  # True once the expected time has been printed, or if it is not needed

    def open(self, phase: str, total: int, initial: int = 0, first: str = "",
             validations: Callable[[int], int] = lambda step: 0) -> None:
        """Start a phase.

        Args:
            phase: `train`, whose steps may be printed, or another phase, counted in batches.
            total: Number of steps, or batches.
            initial: Number of steps already done.
            first: Text to show before the first step is done, such as "compiling".
            validations: Returns the number of validations after a step.
        """
        self.close()
        self._count, self._total, self._text = initial, total, first
        self._pace, self._validations = Pace(total, self._clock), validations
        self._is_estimate_done = phase != "train" or not self._enabled
        if self._has_bar:
            counts = "{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}" if total else "{desc}{postfix}"
            self._bar = TerminalBar(desc=phase, total=total, initial=initial, postfix=first, bar_format=counts,
                                    leave=False, miniters=1, nrows=ROWS)
            open_bars.append(self._bar)

    def update(self, count: int | None = None, text: str = "") -> None:
        """Advance the bar.

        Args:
            count: Number of steps done; None adds one.
            text: Text next to the bar; without a terminal, it is printed as a line.
        """
        done = self._count + 1 if count is None else count
        if done > self._count:
            self._count = done
            self._pace.mark(done)
            if not self._is_estimate_done:
                self._print_estimate()
        if text and self._enabled:
            memory = self._device_memory() or psutil.Process().memory_info().rss
            self._text = f"{text}  memory {memory / 2**30:.1f} GiB"
            if self._prints_lines:
                print(f"step {count}/{self._total}  {self._text}{self._format_time_left()}", flush=True)
        if self._bar is not None:
            texts = filter(None, [self._format_time_left().strip(), self._text])
            self._bar.set_postfix_str("  ".join(texts), refresh=False)
            self._bar.update(self._count - self._bar.n)
            if text:
                self._bar.refresh()

    def note(self, text: str) -> None:
        """Show a text on the terminal until the next step."""
        if self._bar is not None:
            self._bar.set_postfix_str(text)

    def pause(self) -> None:
        """Call when a validation starts."""
        self._pace.pause()

    def resume(self) -> None:
        """Call when the validation is over."""
        self._pace.resume()

    def say(self, text: str) -> None:
        if self._enabled:
            say(text)

    def close(self) -> None:
        if self._bar is not None:
            open_bars.remove(self._bar)
            self._bar.close()
            self._bar = None

    def _print_estimate(self) -> None:
        """Print the expected time of the run once it can be estimated."""
        steps, seconds = self._pace.measured
        seconds_left = self._pace.left(self._count, self._validations(self._count))
        if seconds_left is None or not steps or steps < STEPS_MEASURED and seconds < SECONDS_MEASURED:
            return
        self._is_estimate_done = True
        is_incomplete = self._validations(self._count) and not self._pace.has_paused
        note = "; validations not counted, as none has run yet" if is_incomplete else ""
        say(f"Expected: about {clock(seconds_left)} for the remaining {self._total - self._count} steps, from "
            f"{steps} measured steps{note}.")

    def _format_time_left(self) -> str:
        seconds_left = self._pace.left(self._count, self._validations(self._count))
        return "" if seconds_left is None else f"  {clock(seconds_left)} left"


class TerminalBar(tqdm):
    """A tqdm bar that follows the width of the window and is erased as a whole.

    The cursor rests at the start of the line, so that a longer line of other code, such as a C library's, replaces
    the bar instead of being appended to it.
    """

    monitor_interval = 0  # no thread: each step updates the bar

    @staticmethod
    def status_printer(file: TextIO) -> Callable[[str], None]:
        def show(text: str) -> None:
            # tqdm pads with blanks instead, which wrap if the window has become narrower.
            file.write(f"{ERASE}{text}\r" if text else ERASE)
            file.flush()

        return show

    @property
    def format_dict(self) -> dict[str, Any]:
        columns = os.get_terminal_size(self.fp.fileno()).columns or COLUMNS
        return {**super().format_dict, "ncols": columns - 1}


def describe(metrics: dict[str, float], prefix: str) -> str:
    """Return the metrics of a phase on one line."""
    return "  ".join(f"{name} {float(value):.4g}" for name, value in metrics.items() if name.startswith(prefix))


def clock(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
