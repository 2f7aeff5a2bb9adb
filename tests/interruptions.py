"""An interruption in the n-th micro-batch of a run: on torch by a callback that Lightning finds as a plugin.

`plugins/` holds the entry point by which every Trainer takes the callbacks of `callbacks`: nothing of the product is
changed, and processes that are forked from this one are interrupted at the same place.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import lightning as L

sys.path.append(str(Path(__file__).with_name("plugins")))
left = {"batches": 0}


class Interrupt(L.Callback):
    """Asks for an interruption, as Ctrl+C would."""

    def on_before_backward(self, trainer: L.Trainer, *_) -> None:
        left["batches"] -= 1
        if left["batches"] == 0:
            trainer.interruption.requested = True


def stop_at(batches: int) -> None:
    """Interrupt the runs that begin after this in so many micro-batches of all; 0 lets them run to their ends."""
    left["batches"] = batches


def callbacks() -> list[L.Callback]:
    """What Lightning adds to a trainer."""
    return [Interrupt()] if left["batches"] > 0 else []


def stop_jax_at(monkeypatch) -> Callable[[int], None]:
    """Return `stop_at` of the JAX engine, whose loop asks for each micro-batch of a step."""
    from jax_engine.trainer import Loop

    remaining, train_step = {"batches": 0}, Loop.train_step

    def interrupted(loop, batches, num_batches):
        def counted():
            for batch in batches:
                remaining["batches"] -= 1
                loop.interruption.requested |= remaining["batches"] == 0
                yield batch

        train_step(loop, counted(), num_batches)

    monkeypatch.setattr(Loop, "train_step", interrupted)
    return lambda batches: remaining.update(batches=batches)
