"""A clock that stands while programs are traced and compiled, so that no speed and no time left counts that."""

from functools import cache

from jax import monitoring

from lmmods.core import throughput

# Durations of tracing, lowering and compiling (or fetching from the cache on disk), which may lie within one another.
MAKING = "/jax/core/compile/"


class CompileClock:
    """Seconds of the clock by which training is timed, but for those in which this process made programs."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = [(float("-inf"), 0.0)]  # begin, seconds of all up to this one

    def __call__(self) -> float:
        return throughput.now() - self._spans[-1][1]

    def note(self, event: str, seconds: float, **_: object) -> None:
        """Called at the end of what is timed; what lies within it was told before."""
        if not event.startswith(MAKING):
            return
        begin = throughput.now() - seconds
        while self._spans[-1][0] >= begin:
            self._spans.pop()
        self._spans.append((begin, self._spans[-1][1] + seconds))


@cache
def compile_clock() -> CompileClock:
    """The one of this process, which listens from now on."""
    clock = CompileClock()
    monitoring.register_event_duration_secs_listener(clock.note)
    return clock
