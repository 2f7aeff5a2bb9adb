"""What attacks share: runs that end after two micro-batches, start no processes, and leave the process as it was."""

import os

import pytest
import torch

from lmmods.core.signals import Interrupted


@pytest.fixture
def short_runs(monkeypatch):
    """Any run is interrupted in its second micro-batch, and one that would start other processes ends before."""
    import jax
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

    from jax_engine.trainer import Loop
    from lmmods.torch_engine.callbacks.run_events import StartReport

    def starts_processes(*_, **__):
        raise Interrupted("Other processes would be started here.")

    left = {"batches": 0}

    def on_before_backward(callback, trainer, *_):
        left["batches"] += 1
        trainer.interruption.requested = left["batches"] >= 2

    train_step = Loop.train_step

    def counted(loop, batches, num_batches):
        def interrupting():
            for batch in batches:
                left["batches"] += 1
                loop.interruption.requested = left["batches"] >= 2
                yield batch

        train_step(loop, interrupting(), num_batches)

    monkeypatch.setattr(StartReport, "on_before_backward", on_before_backward)
    monkeypatch.setattr(Loop, "train_step", counted)
    monkeypatch.setattr(_SubprocessScriptLauncher, "launch", starts_processes)
    monkeypatch.setattr(jax.distributed, "initialize", starts_processes)
    return lambda: left.update(batches=0)


@pytest.fixture
def settings_restored():
    """What a recipe may set for the whole process is set back: determinism, anomaly detection, the environment."""
    import jax

    before = dict(os.environ), jax.config.jax_debug_nans
    yield
    os.environ.clear()
    os.environ.update(before[0])
    jax.config.update("jax_debug_nans", before[1])
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.set_num_threads(1)
