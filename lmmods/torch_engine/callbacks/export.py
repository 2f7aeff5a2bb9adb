"""Export a finished run: model folder, model card and loss plot; upload to the hub."""

from collections.abc import Callable
from pathlib import Path

import lightning as L

from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.runs.hub_upload import Publisher
from lmmods.runs.manifest import end_manifest
from lmmods.runs.model_card import complete_model
from lmmods.runs.wandb import log_checkpoint


def export_run(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Write model/ and loss.png and mark the run completed. A collective call."""
    folder = trainer.run_folder
    exported = write_model(trainer, module, folder.create_model_folder)
    if trainer.is_global_zero:
        folder.replace_model(exported)
        log_checkpoint(trainer.loggers, folder.find("last"), ends=True)
        end_manifest(folder, trainer.global_step)
        folder.complete()
        say(f"Wrote {folder.model}.")
    trainer.strategy.barrier("export")


def write_model(trainer: L.Trainer, module: L.LightningModule, make_folder: Callable[[], Path]) -> Path:
    """Write the model or adapter with its model card and return the folder. A collective call.

    Args:
        make_folder: Creates the folder to write to; called by the first process.
    """
    folder = trainer.strategy.broadcast(make_folder() if trainer.is_global_zero else None)
    trained = [(param, param.data) for param in module.trainable().values()]
    with module.use_averages():
        module.export(folder)  # sharded parameters are gathered by all processes
        for param, data in trained:  # export has cast it to model.save_dtype, and training may continue
            param.data = data
    if trainer.is_global_zero:
        complete_model(folder, trainer.run_folder, module, module.auto_class, trainer.datamodule)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Uploads to the hub.

class Publish(Publisher, L.Callback):
    """Upload of the model of each checkpoint, or of the finished run."""

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if self.repo is None or stage != "fit":
            return
        problem = trainer.strategy.broadcast(self.problem() if trainer.is_global_zero else None)
        if problem:
            raise UserError(problem)

    def upload(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Upload the current model, unless the previous upload is still running. A collective call."""
        if trainer.strategy.broadcast(self.is_busy):
            return say(f"The upload to {self.repo} is still running; step {trainer.global_step} is not uploaded.")
        with trainer.stopwatch.paused():
            folder = write_model(trainer, module, trainer.run_folder.create_upload_folder)
            if trainer.is_global_zero:
                self.start_upload(folder, trainer.global_step)

    def publish(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Upload model/."""
        if trainer.is_global_zero:
            self.finish(trainer.run_folder.model, trainer.global_step)
