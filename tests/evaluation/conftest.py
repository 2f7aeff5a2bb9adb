"""A clock that passes as a test says."""

import pytest


class Clock:
    """Stands in for `time`: a millisecond passes at each look, and what a test says."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock by which both engines measure training."""
    from lmmods.core import throughput

    clock = Clock()
    monkeypatch.setattr("lmmods.core.throughput.time", clock)
    monkeypatch.setattr("jax_engine.trainer.compile_clock", lambda: throughput.now)  # the other leaves real seconds out
    return clock
