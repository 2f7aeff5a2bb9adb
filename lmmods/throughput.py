"""Speed of training proper, in both engines: what is counted, against what a device can do."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

# Peak dense bf16 FLOP/s of one device, from the vendors' data sheets; other devices get no train/mfu.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12,
              "4090": 165e12, "3090": 71e12, "V100": 125e12, "T4": 65e12}


class Stopwatch:
    """Seconds of training proper: evaluation and saving are left out."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def lap(self) -> float:
        """Seconds since the last lap."""
        self.stop()
        seconds, self._seconds = self._seconds, 0.0
        self.start()
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.stop()
        yield
        self.start()


def peak_flops(device_name: str) -> float | None:
    """Peak bf16 FLOP/s of a known GPU, by the name its driver gives."""
    return next((flops for known, flops in PEAK_FLOPS.items() if known in device_name), None)
