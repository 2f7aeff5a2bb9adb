"""Lightning's phases on the progress bar."""

from typing import Any

import lightning as L
import torch

from lmmods.core.progress_bar import Bar, describe


class Progress(L.Callback):
    """Steps, loss, tokens/s, memory and the time left."""

    def __init__(self) -> None:
        self._bar = Bar()

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        cuda = trainer.strategy.root_device.type == "cuda"
        self._bar = Bar(trainer.is_global_zero, torch.cuda.max_memory_allocated if cuda else lambda: None)

    # Training --------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._bar.open("train", int(trainer.estimated_stepping_batches), trainer.global_step, unit="step")

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if not module.accumulation.is_open:
            is_logged = trainer.global_step % trainer.log_every_n_steps == 0
            self._bar.update(trainer.global_step, describe(trainer.callback_metrics) if is_logged else "")

    def on_train_end(self, *_: Any) -> None:
        self._bar.close()

    def on_exception(self, *_: Any) -> None:
        self._bar.close()

    # Evaluation and prediction ---------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.state.fn == "validate":
            self._bar.open("validate", sum(trainer.num_val_batches))

    def on_test_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._bar.open("test", sum(trainer.num_test_batches))

    def on_predict_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._bar.open("predict", sum(trainer.num_predict_batches))

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.state.fn == "validate":
            self._bar.update()

    def on_test_batch_end(self, *_: Any) -> None:
        self._bar.update()

    on_predict_batch_end = on_test_batch_end

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.state.fn == "validate":
            self._bar.close()
        if not trainer.sanity_checking:
            self._bar.say(describe(trainer.callback_metrics, "val/"))

    def on_test_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._bar.close()
        self._bar.say(describe(trainer.callback_metrics, "test/"))

    def on_predict_end(self, *_: Any) -> None:
        self._bar.close()
