"""Interrupt a run in its n-th micro-batch: on torch with a callback that Lightning finds as a plugin.

`plugins/` has the entry point that adds the callbacks of `callbacks` to every Trainer. The product stays unchanged, and
processes forked from this one are interrupted at the same micro-batch.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import lightning as L

sys.path.append(str(Path(__file__).with_name("plugins")))
left = {"batches": 0}


class Interrupt(L.Callback):
    """Request an interruption, as Ctrl+C would."""

    def on_before_backward(self, trainer: L.Trainer, *_) -> None:
        left["batches"] -= 1
        if left["batches"] == 0:
            trainer.interruption.requested = True


def stop_at(batches: int) -> None:
    """Interrupt the runs that start from now on in the n-th micro-batch, counted over all runs; 0 never interrupts."""
    left["batches"] = batches


def callbacks() -> list[L.Callback]:
    """Return the callbacks that Lightning adds to a trainer."""
    return [Interrupt()] if left["batches"] > 0 else []


def stop_jax_at(monkeypatch) -> Callable[[int], None]:
    """Return `stop_at` for the JAX engine."""
    from jax_engine.trainer import Loop

    remaining, train_step = {"batches": 0}, Loop.train_step

    def train_interrupted(loop, batches, num_batches):
        def count_batches():
            for batch in batches:
                remaining["batches"] -= 1
                loop.interruption.requested |= remaining["batches"] == 0
                yield batch

        train_step(loop, count_batches(), num_batches)

    monkeypatch.setattr(Loop, "train_step", train_interrupted)
    return lambda batches: remaining.update(batches=batches)
