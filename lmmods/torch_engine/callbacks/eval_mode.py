"""What callbacks do with the network while it trains, without training feeling it."""

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng


@contextmanager
def undisturbed(trainer: L.Trainer, module: L.LightningModule) -> Iterator[None]:
    """No dropout, no gradients, the stopwatch stands; modes of the modules and random states are left as they were."""
    # Also waits for the device, still training.
    module.accumulation.check_finite(trainer.global_step, trainer.current_epoch)
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    with (trainer.stopwatch.paused(), isolate_rng(), torch.no_grad(), trainer.precision_plugin.forward_context()):
        yield
    for part, training in modes:
        part.training = training
