"""One bar per phase on a terminal, plain lines elsewhere; the same in both engines."""

import sys
import time
from collections.abc import Callable

import psutil
from tqdm import tqdm


class Bar:
    """Steps, loss, tokens/s, memory and the time left.

    Args:
        enabled: False shows nothing (`trainer.enable_progress_bar`, or not the first process).
        device_memory: Peak bytes in use on the accelerator; where there is none, those of the process are shown.
    """

    def __init__(self, enabled: bool = True, device_memory: Callable[[], int | None] = lambda: None):
        self._enabled, self._device_memory = enabled, device_memory
        self._bar: tqdm | None = None
        self._started = (0, 0.0)  # step, clock
        self._total = 0

    def open(self, phase: str, total: int, initial: int = 0, unit: str = "batch", first: str = "") -> None:
        """Begin a phase; `first` is what happens before its first step is done, such as compiling."""
        self._started, self._total = (initial, time.perf_counter()), total
        if self._enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=initial, desc=phase, unit=unit, dynamic_ncols=True, postfix=first)

    def update(self, count: int | None = None, text: str = "") -> None:
        """Advance the bar.

        Args:
            count: Steps done; None adds one.
            text: Shown beside the bar; without a terminal, printed as a line.
        """
        if text and self._enabled:
            text += f"  memory {(self._device_memory() or psutil.Process().memory_info().rss) / 2**30:.1f} GiB"
        if self._bar is not None:
            if text:
                self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(1 if count is None else max(count - self._bar.n, 0))
        elif text and self._enabled:
            first, since = self._started
            left = (time.perf_counter() - since) / (count - first) * (self._total - count)
            print(f"step {count}/{self._total}  {text}  {clock(left)} left", flush=True)

    def say(self, text: str) -> None:
        if self._enabled:
            tqdm.write(text) if self._bar is not None else print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def describe(metrics: dict[str, float], prefix: str = "train/") -> str:
    """Metrics of a phase on one line."""
    shown = ("loss", "lr", "tokens_per_second") if prefix == "train/" else tuple(
        name.removeprefix(prefix) for name in metrics if name.startswith(prefix))
    label = "" if prefix == "train/" else prefix
    return "  ".join(f"{label}{name} {float(metrics[prefix + name]):.4g}" for name in shown if prefix + name in metrics)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
