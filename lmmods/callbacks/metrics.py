"""What is measured while training: one place that feeds every logger, the progress bar and metrics.json."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch

from lmmods.run import write_json

# Peak dense bf16 FLOP/s of one device, from the vendors' data sheets; other devices get no train/mfu.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12,
              "4090": 165e12, "3090": 71e12, "V100": 125e12, "T4": 65e12}


class Stopwatch:
    """Seconds of training proper: evaluation and saving are left out."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def lap(self) -> float:
        """Seconds since the last lap."""
        self.stop()
        seconds, self._seconds = self._seconds, 0.0
        self.start()
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.stop()
        yield
        self.start()


class Metrics(L.Callback):
    """Log every `log_every_n_steps` optimiser steps and after each evaluation, under the names of the design."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_rows = 0
        self.latest: dict[str, float] = {}
        self.stopwatch = Stopwatch()
        self._lap_tokens = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_tokens": self.num_tokens, "num_rows": self.num_rows, "latest": self.latest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_tokens, self.num_rows, self.latest = state["num_tokens"], state["num_rows"], state["latest"]

    # Training --------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.stopwatch.start()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any,
                           batch_idx: int) -> None:
        if trainer.is_last_batch_of_run():
            trainer.should_stop = True  # which makes Lightning validate now: the final numbers are the final model's
        if module.window.is_open or trainer.global_step % trainer.log_every_n_steps:
            return
        figures = module.window.last()
        self._count(module.window)
        seconds = self.stopwatch.lap()
        figures["epoch"] = trainer.current_epoch + (batch_idx + 1) / trainer.num_training_batches
        figures["tokens"] = self.num_tokens
        figures["tokens_per_second"] = self._lap_tokens / seconds
        if (peak := peak_flops(module.device)) is not None:
            flops = module.flops_per_token() * figures["tokens_per_second"]
            figures["mfu"] = flops / (peak * trainer.world_size)
        self._lap_tokens = 0
        self._log(trainer, module, {f"train/{name}": value for name, value in figures.items()})

    def _count(self, window: Any) -> None:
        tokens, rows = window.take_counts()
        self.num_tokens += tokens
        self.num_rows += rows
        self._lap_tokens += tokens

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict) -> None:
        """Lightning has taken `state_dict` already; what closed since the last log goes into it here."""
        self._count(module.window)
        checkpoint["callbacks"][self.state_key] = self.state_dict()

    # Evaluation ------------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
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
            for name, content in files.items():
                write_json(trainer.run_folder.root / name, content)
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


def peak_flops(device: torch.device) -> float | None:
    """Peak bf16 FLOP/s of a known GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for known, flops in PEAK_FLOPS.items() if known in name), None)
