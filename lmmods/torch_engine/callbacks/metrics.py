"""Callbacks for metrics and the progress bar."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch

from lmmods.core.hardware import peak_flops
from lmmods.core.progress_bar import Bar, describe
from lmmods.core.throughput import Stopwatch
from lmmods.runs.step_metrics import StepMetrics
from lmmods.runs.wandb import log_classes


class Metrics(L.Callback):
    """Callback that logs every `log_every_n_steps` optimiser steps and after each evaluation.

    Args:
        show: Displays a step and a short form of its metrics.
    """

    steps: StepMetrics

    def __init__(self, show: Callable[[int, str], None] = lambda step, text: None) -> None:
        self.stopwatch = Stopwatch()
        self._show = show

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        def report(metrics: dict[str, float], step: int) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)

        def flops_fraction() -> float | None:
            device = torch.cuda.get_device_name(module.device) if module.device.type == "cuda" else "CPU"
            peak = peak_flops(device)
            return None if peak is None else module.flops_per_token() / (peak * trainer.world_size)

        self.steps = StepMetrics(self.stopwatch, trainer.log_every_n_steps, flops_fraction, report, self._show,
                                 skips_overflows=trainer.precision == "16-mixed")

    def state_dict(self) -> dict[str, Any]:
        return self.steps.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps.load_state_dict(state)

    # Training --------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.stopwatch.start()

    def log_step(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Record the optimiser step just done, and log every `log_every_n_steps`."""
        progress = trainer.progress
        epoch = progress.epoch + progress.epoch_step / trainer.num_training_batches
        self.steps.add(trainer.global_step, epoch, module.last_step.step_metrics)
        if trainer.global_step % self.steps.every == 0:
            self._set_callback_metrics(module, self.steps.fetch())

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict) -> None:
        """Update the saved state with the steps since the last row: Lightning called `state_dict` before this hook."""
        self.steps.fetch()
        checkpoint["callbacks"][self.state_key] = self.state_dict()

    # Evaluation ------------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        # Record pending steps before the validation, so that their time does not include it.
        self.steps.fetch()
        self.stopwatch.stop()

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._evaluate(trainer, module, "val")

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.stopwatch.start()

    def on_test_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._evaluate(trainer, module, "test")

    def _evaluate(self, trainer: L.Trainer, module: L.LightningModule, prefix: str) -> None:
        # Also resets the sums, and gathers over all processes, so it comes before the sanity check returns.
        metrics, files = module.eval_results(prefix)
        if trainer.sanity_checking:
            return
        results = {f"{prefix}/{name}": value for name, value in metrics.items()}
        if trainer.is_global_zero:
            trainer.run_folder.write_files(files)
            log_classes(trainer.loggers, files, prefix, trainer.global_step)
        self._set_callback_metrics(module, results)
        self.steps.log(results, trainer.global_step)
        if trainer.state.fn != "fit" and trainer.is_global_zero:
            trainer.run_folder.merge_metrics(results)

    # Everywhere ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _set_callback_metrics(module: L.LightningModule, metrics: dict[str, float]) -> None:
        """Add metrics to Lightning's `callback_metrics`, for early stopping, checkpoint ranking and progress."""
        for name, value in metrics.items():
            module.log(name, value, logger=False, rank_zero_only=False)

    def finish(self, trainer: L.Trainer) -> None:
        """Write the final metrics to metrics.json."""
        self.steps.fetch()
        if trainer.is_global_zero:
            trainer.run_folder.merge_metrics(self.steps.final(trainer.global_step))


# ---------------------------------------------------------------------------------------------------------------------
# Progress bar.

class Progress(L.Callback):
    """Progress bar with steps, loss, tokens/s, memory and remaining time."""

    def __init__(self) -> None:
        self._bar = Bar(enabled=False)

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        cuda = trainer.strategy.root_device.type == "cuda"
        self._bar = Bar(trainer.is_global_zero, torch.cuda.max_memory_allocated if cuda else lambda: None)

    # Training --------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        schedule = trainer.schedule()
        self._bar.open("train", schedule.num_steps, trainer.global_step, validations=schedule.validations_after)

    def show(self, step: int, text: str) -> None:
        """Display the metrics of a step."""
        self._bar.update(step, text)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
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
            self._bar.resume()
        if not trainer.sanity_checking:
            self._bar.say(describe(trainer.callback_metrics, "val/"))

    def on_test_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._bar.close()
        self._bar.say(describe(trainer.callback_metrics, "test/"))

    def on_predict_end(self, *_: Any) -> None:
        self._bar.close()
