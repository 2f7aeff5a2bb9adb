"""Lightning's phases on the progress bar."""

from typing import Any

import lightning as L
import torch

from lmmods.core.progress_bar import Bar, describe
from lmmods.runs.step_metrics import StepMetrics


class Progress(L.Callback):
    """Steps, loss, tokens/s, memory and the time left.

    Args:
        steps: What is measured of the steps.
    """

    def __init__(self, steps: StepMetrics) -> None:
        self._steps = steps
        self._bar = Bar(enabled=False)

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        cuda = trainer.strategy.root_device.type == "cuda"
        self._bar = Bar(trainer.is_global_zero, torch.cuda.max_memory_allocated if cuda else lambda: None)

    # Training --------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._steps.show = lambda step: self._bar.update(step, self._steps.shown())
        schedule = trainer.schedule()
        self._bar.open("train", schedule.num_steps, trainer.global_step, validations=schedule.validations_after)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if not module.accumulation.is_open:
            self._bar.update(trainer.global_step)

    def on_train_end(self, *_: Any) -> None:
        self._bar.close()

    def on_exception(self, *_: Any) -> None:
        self._bar.close()

    # Evaluation and prediction ---------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.state.fn == "validate":
            self._bar.open("validate", sum(trainer.num_val_batches))
        elif not trainer.sanity_checking:
            self._bar.pause()

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
        elif not trainer.sanity_checking:
            self._bar.go_on()
        if not trainer.sanity_checking:
            self._bar.say(describe(trainer.callback_metrics, "val/"))

    def on_test_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._bar.close()
        self._bar.say(describe(trainer.callback_metrics, "test/"))

    def on_predict_end(self, *_: Any) -> None:
        self._bar.close()
