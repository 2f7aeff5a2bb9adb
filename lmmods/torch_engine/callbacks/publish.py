"""Uploads to the hub on Lightning."""

import lightning as L

from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.runs.hub_upload import Publisher
from lmmods.torch_engine.callbacks.export import write_model


class Publish(Publisher, L.Callback):
    """Upload the model of each checkpoint, or of the finished run."""

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if self.repo is None or stage != "fit":
            return
        problem = trainer.strategy.broadcast(self.problem() if trainer.is_global_zero else None)
        if problem:
            raise UserError(problem)

    def upload(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Upload the model of this moment, unless the upload before it is under way. All processes must call this."""
        if trainer.strategy.broadcast(self.is_busy):
            return say(f"The upload to {self.repo} is still under way: step {trainer.global_step} is left out.")
        with trainer.stopwatch.paused():
            folder = write_model(trainer, module, trainer.run_folder.room_for_upload)
            if trainer.is_global_zero:
                self.upload_aside(folder, trainer.global_step)

    def publish(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Upload model/."""
        if trainer.is_global_zero:
            self.finish(trainer.run_folder.model, trainer.global_step)
