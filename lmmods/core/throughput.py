"""Training speed on both engines: tokens per second, without evaluation and saving."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def now() -> float:
    """Return the seconds of the clock that times training."""
    return time.perf_counter()


class Stopwatch:
    """Seconds of training, without evaluation and saving."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or now
        self._seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        self._since = self._clock()

    def stop(self) -> None:
        self._seconds = self.seconds()
        self._since = None

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._seconds + (0.0 if self._since is None else self._clock() - self._since)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.stop()
        yield
        self.start()


class Laps:
    """Speed between two log entries, over exactly the steps whose time was measured."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._begin = self._end = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Count steps.

        Args:
            num_tokens: Number of their real tokens.
            seconds: Stopwatch time when the device had finished the last step.
        """
        self._num_tokens += num_tokens
        self._end = seconds

    def tokens_per_second(self) -> float:
        """Return the speed of the steps counted since the last call."""
        speed = self._num_tokens / (self._end - self._begin)
        self._num_tokens, self._begin = 0, self._end
        return speed


class Pace:
    """Estimate of a phase's remaining time, from the steps measured so far.

    The first step of the process is excluded: it is slower than the others. Validations are timed separately; all other
    work between steps (saving, samples) counts as part of the steps.

    Args:
        total: Number of steps in the phase.
        clock: Returns seconds.
    """

    def __init__(self, total: int, clock: Callable[[], float] | None = None) -> None:
        self._total = total
        self._clock = clock or now
        self._first: tuple[int, float] | None = None  # (step, clock) at the start of the measurement
        self._latest = (0, 0.0)
        self._paused = 0.0  # seconds of pauses so far
        self._pauses: list[float] = []
        self._since = 0.0

    def mark(self, step: int) -> None:
        """Record that `step` steps are done."""
        # The clock without validations.
        self._latest = step, self._clock() - self._paused
        # Measurement starts after the first step, which compiles and allocates.
        self._first = self._first or self._latest

    def pause(self) -> None:
        """Call when a validation starts."""
        self._since = self._clock()

    def resume(self) -> None:
        """Call when the validation is over."""
        self._pauses.append(self._clock() - self._since)
        self._paused += self._pauses[-1]

    @property
    def has_paused(self) -> bool:
        """True if a validation has been timed."""
        return bool(self._pauses)

    @property
    def measured(self) -> tuple[int, float]:
        """Steps measured, and their total seconds."""
        first, latest = self._first or self._latest, self._latest
        return latest[0] - first[0], latest[1] - first[1]

    def left(self, step: int, validations: int) -> float | None:
        """Return the seconds from `step` to the end; None as long as no step has been measured.

        Args:
            validations: Number of remaining validations.
        """
        steps, seconds = self.measured
        if not steps:
            return None
        # Until one has been timed, remaining validations count as free.
        validation_seconds = sum(self._pauses) / len(self._pauses) if self._pauses else 0.0
        return seconds / steps * (self._total - step) + validation_seconds * validations
