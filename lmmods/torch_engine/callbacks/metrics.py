"""What is measured while training: one place that feeds every logger, the progress bar and metrics.json."""

from typing import Any

import lightning as L
import torch

from lmmods.core.throughput import Laps, Stopwatch, peak_flops


class Metrics(L.Callback):
    """Log every `log_every_n_steps` optimiser steps and after each evaluation, under the names of the design."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_rows = 0
        self.latest: dict[str, float] = {}
        self.stopwatch, self.laps = Stopwatch(), Laps()

    def state_dict(self) -> dict[str, Any]:
        return {"num_tokens": self.num_tokens, "num_rows": self.num_rows, "latest": self.latest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_tokens, self.num_rows, self.latest = state["num_tokens"], state["num_rows"], state["latest"]

    # Training --------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if module.window.is_open:
            self.laps.leave_out(int(module.window.sums()[2]))
        self.stopwatch.start()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any,
                           batch_idx: int) -> None:
        if trainer.is_last_batch_of_run():
            trainer.should_stop = True  # which makes Lightning validate now: the final numbers are the final model's
        if module.window.is_open or trainer.global_step % trainer.log_every_n_steps:
            return
        figures = module.window.last()
        self._count(module.window)
        figures["epoch"] = trainer.current_epoch + (batch_idx + 1) / trainer.num_training_batches
        figures["tokens"] = self.num_tokens
        figures["tokens_per_second"] = self.laps.tokens_per_second()
        device = torch.cuda.get_device_name(module.device) if module.device.type == "cuda" else "CPU"
        if (peak := peak_flops(device)) is not None:
            flops = module.flops_per_token() * figures["tokens_per_second"]
            figures["mfu"] = flops / (peak * trainer.world_size)
        self._log(trainer, module, {f"train/{name}": value for name, value in figures.items()})

    def _count(self, window: Any) -> None:
        """Count the steps done. Waits for the device."""
        tokens, rows = window.take_counts()
        self.num_tokens += tokens
        self.num_rows += rows
        self.laps.add(tokens, self.stopwatch.seconds())

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict) -> None:
        """Lightning has taken `state_dict` already; what closed since the last log goes into it here."""
        self._count(module.window)
        checkpoint["callbacks"][self.state_key] = self.state_dict()

    # Evaluation ------------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._count(module.window)
        self.stopwatch.stop()

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._evaluated(trainer, module, "val")

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.stopwatch.start()

    def on_test_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._evaluated(trainer, module, "test")

    def _evaluated(self, trainer: L.Trainer, module: L.LightningModule, prefix: str) -> None:
        found, files = module.eval_results(prefix)
        if trainer.sanity_checking:
            return
        results = {f"{prefix}/{name}": value for name, value in found.items()}
        if trainer.is_global_zero:
            trainer.run_folder.write_files(files)
        self._log(trainer, module, results)
        if trainer.state.fn != "fit" and trainer.is_global_zero:
            trainer.run_folder.merge_metrics(results)

    # Everywhere ------------------------------------------------------------------------------------------------------

    def _log(self, trainer: L.Trainer, module: L.LightningModule, metrics: dict[str, float]) -> None:
        self.latest |= metrics
        for name, value in metrics.items():
            module.log(name, value, logger=False, rank_zero_only=False)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            trainer.run_folder.merge_metrics({**self.latest, "train/tokens": self.num_tokens,
                                              "train/rows": self.num_rows, "trainer/global_step": trainer.global_step})
