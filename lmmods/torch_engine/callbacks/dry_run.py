"""Lightning's call after each step of a dry run, which trains and leaves nothing."""

from collections.abc import Callable
from typing import Any

import lightning as L


class DryRun(L.Callback):
    """Hands the figures of each optimiser step to `watch`, which says whether it was the last."""

    def __init__(self, watch: Callable[[dict[str, float]], bool]) -> None:
        self._watch = watch

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        # Figures are sums over all processes, so these decide alike.
        if not module.accumulation.is_open and self._watch(module.accumulation.last.figures()):
            trainer.should_stop = True
