"""The end of an interrupted run that writes no checkpoints."""

import lightning as L

from lmmods.core.signals import stop


class StopUnsaved(L.Callback):
    """Stands where Checkpoint would, which stops the other runs once they are saved."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: object) -> None:
        if not module.accumulation.is_open and trainer.interrupt_requested():
            stop(trainer.global_step, None)
