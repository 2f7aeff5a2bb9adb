"""The fastest batch size that fits, by steps measured in processes of their own.

Only sizes that divide the rows of an optimiser step are tried, with gradient accumulation making up for the rest, so
that every step of the run stays what it was.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmmods.core.errors import UserError

GAIN = 1.03  # a larger batch must be so much faster to be worth its memory
# Counted in micro-batches of training: they change with the number of rows in one.
COUNTED = ("limit_train_batches", "overfit_batches")
EVALUATED = ("limit_val_batches", "limit_test_batches", "limit_predict_batches")


@dataclass(frozen=True)
class Measured:
    """A step with a batch size.

    Args:
        tokens_per_second: Real tokens, with the longest rows; 0 where it did not fit.
        memory: GiB at its peak.
        room: GiB that there are for it.
        problem: Why it does not fit; empty where it does.
    """

    batch_size: int
    tokens_per_second: float = 0.0
    memory: float = 0.0
    room: float = math.inf
    problem: str = ""


class Sizes:
    """Batch sizes that leave a recipe's steps as they are, and what each changes in it.

    Args:
        recipe: Parsed.
    """

    def __init__(self, recipe: Any) -> None:
        trainer, data = recipe.trainer, recipe.data.init_args
        self.now: int = data.batch_size
        self._rows: int = data.batch_size * trainer.accumulate_grad_batches
        self._counts = {f"trainer.{key}": trainer[key] for key in COUNTED
                        if isinstance(trainer.get(key), int) and trainer[key]}
        limited = any(isinstance(trainer.get(key), int) and trainer[key] for key in EVALUATED)
        self._eval_size = self.now if limited and data.get("eval_batch_size") is None else None

    def all(self) -> list[int]:
        """Sizes in rising order; the recipe's own is among them."""
        return [size for size in range(1, self._rows + 1) if self._rows % size == 0
                and all(count * self.now % size == 0 for count in self._counts.values())]

    def accumulated(self, size: int) -> int:
        """Micro-batches of a step."""
        return self._rows // size

    def changes(self, size: int) -> dict[str, int]:
        """The keys of the recipe that a size sets, with their values."""
        if size == self.now:
            return {}
        counts = {key: count * self.now // size for key, count in self._counts.items()}
        kept = {"data.init_args.eval_batch_size": self._eval_size} if self._eval_size else {}
        return {"data.init_args.batch_size": size,
                "trainer.accumulate_grad_batches": self.accumulated(size), **counts, **kept}


def search(sizes: list[int], now: int, measure: Callable[[int], Measured]) -> list[Measured]:
    """Measure sizes from `now` on: doubled while that fits and is faster, halved until it fits, then what lies between.

    Args:
        sizes: In rising order. One that would need more than there is, by the last two that fitted, is not measured.

    Returns:
        What was measured, in that order.
    """
    tried: dict[int, Measured] = {}

    def fits(size: int) -> bool:
        if size not in tried:
            tried[size] = _too_large(size, tried) or measure(size)
        return not tried[size].problem

    def faster(size: int, than: int) -> bool:
        return tried[size].tokens_per_second >= GAIN * tried[than].tokens_per_second

    low, high = now, None  # the largest that fits, the smallest that does not
    while not fits(low):
        high = low
        smaller = [size for size in sizes if size <= low // 2] or [size for size in sizes if size < low]
        if not smaller:
            return list(tried.values())
        low = smaller[-1]
    grows = high is None
    while grows and (larger := [size for size in sizes if size >= 2 * low] or [size for size in sizes if size > low]):
        if not fits(larger[0]):
            high = larger[0]
            break
        low, grows = (larger[0], True) if faster(larger[0], low) else (low, False)
    while high is not None and (between := [size for size in sizes if low < size < high]):
        middle = between[len(between) // 2]
        if fits(middle):
            low = middle
        else:
            high = middle
    return list(tried.values())


def best(tried: list[Measured]) -> Measured:
    """The fastest that fits; of those about as fast the smallest. Raises UserError: none fits."""
    fitting = sorted((each for each in tried if not each.problem), key=lambda each: each.batch_size)
    if not fitting:
        smallest = min(tried, key=lambda each: each.batch_size)
        raise UserError(f"Not even a batch of {smallest.batch_size} fits ({smallest.problem}). Lower data.max_length, "
                        "set model.gradient_checkpointing, or train an adapter on a quantised base.")
    fastest = max(each.tokens_per_second for each in fitting)
    return next(each for each in fitting if GAIN * each.tokens_per_second >= fastest)


def _too_large(size: int, tried: dict[int, Measured]) -> Measured | None:
    """What a size would need by a straight line through the two largest that fitted; None where that is little."""
    fitting = sorted((each for each in tried.values() if not each.problem), key=lambda each: each.batch_size)[-2:]
    if len(fitting) < 2:
        return None
    first, last = fitting
    slope = (last.memory - first.memory) / (last.batch_size - first.batch_size)
    needed = last.memory + slope * (size - last.batch_size)
    if size < last.batch_size or needed <= last.room:
        return None
    return Measured(size, 0.0, needed, last.room, f"would need about {needed:.1f} of {last.room:.1f} GiB")
