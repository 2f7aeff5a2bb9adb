"""Fixtures for odd recipes: runs that end after two micro-batches, start no processes and change no global settings."""

import os

import pytest
import torch

from lmmods.core.signals import Interrupted


@pytest.fixture
def short_runs(monkeypatch):
    """Interrupt each run in its second micro-batch, or before it starts other processes."""
    import jax

    from jax_engine.trainer import Loop
    from lmmods.torch_engine.callbacks.run_events import StartReport
    from lmmods.torch_engine.compat.lightning import WatchedLauncher

    def refuse_processes(*_, **__):
        raise Interrupted("Other processes would be started here.")

    count = {"batches": 0}

    def on_before_backward(callback, trainer, *_):
        count["batches"] += 1
        trainer.interruption.requested = count["batches"] >= 2

    train_step = Loop.train_step

    def train_step_counting(loop, batches, num_batches):
        def interrupt_second():
            for batch in batches:
                count["batches"] += 1
                loop.interruption.requested = count["batches"] >= 2
                yield batch

        train_step(loop, interrupt_second(), num_batches)

    monkeypatch.setattr(StartReport, "on_before_backward", on_before_backward)
    monkeypatch.setattr(Loop, "train_step", train_step_counting)
    monkeypatch.setattr(WatchedLauncher, "launch", refuse_processes)
    monkeypatch.setattr(jax.distributed, "initialize", refuse_processes)
    return lambda: count.update(batches=0)


@pytest.fixture
def settings_restored():
    """Restore process-wide settings that a recipe may change: determinism, anomaly detection, environment variables."""
    import jax

    saved = dict(os.environ), jax.config.jax_debug_nans
    yield
    os.environ.clear()
    os.environ.update(saved[0])
    jax.config.update("jax_debug_nans", saved[1])
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.set_num_threads(1)
