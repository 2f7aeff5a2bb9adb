"""Callback of a dry run, which trains without writing anything."""

from collections.abc import Callable
from typing import Any

import lightning as L


class DryRun(L.Callback):
    """Pass the metrics of each optimiser step to `watch`, and stop when it returns True."""

    def __init__(self, watch: Callable[[dict[str, float]], bool]) -> None:
        self._watch = watch

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        # The metrics are sums over all processes, so all of them decide alike.
        if not module.accumulation.is_open and self._watch(module.accumulation.last.step_metrics()):
            trainer.should_stop = True
