"""When checkpoints are written, and what Lightning alone would not put into them."""

from pathlib import Path
from typing import Any

import lightning as L

from lmmods.core.signals import stop
from lmmods.runs.checkpoint_content import CheckpointContent
from lmmods.runs.checkpoint_policy import CheckpointPolicy
from lmmods.runs.folder import checkpoint_name
from lmmods.runs.progress import correct_epochs, recount_loops
from lmmods.runs.wandb import log_checkpoint
from lmmods.torch_engine.callbacks.publish import Publish
from lmmods.torch_engine.strategies.deepspeed import DeepSpeed


class Checkpoint(CheckpointPolicy, L.Callback):
    """Save what a run needs to go on exactly: by the rules, after validation, at the end and when interrupted."""

    _inside_epoch = True

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """After StartReport has made the run folder ready."""
        if trainer.resumed_from and trainer.is_global_zero:
            self.resume(trainer.run_folder, trainer.resumed_from)

    # When ------------------------------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if trainer.validation_is_due():
            return  # saved after it: a run resumed from before would skip it
        step_done = not module.accumulation.is_open
        due = step_done and self.is_due(trainer.global_step)
        # Several processes agree on an interruption once a step: asking each other makes them wait.
        alone = trainer.world_size == 1 and not isinstance(trainer.strategy, DeepSpeed)
        may_stop = (step_done or alone) and trainer.interrupt_requested()
        if due or may_stop or trainer.is_last_batch_of_run():
            self.save(trainer)

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self.rank({name: value.item() for name, value in trainer.callback_metrics.items()}, self._path(trainer).name)
        self.save(trainer)

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not self._path(trainer).is_dir():  # stopped by a callback rather than by max_steps or max_epochs
            self._inside_epoch = False
            self.save(trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: CheckpointContent) -> None:
        """Note what the run is and the number of processes."""
        checkpoint["world_size"] = trainer.world_size
        checkpoint["identity"] = trainer.identity.tree
        if self._inside_epoch:
            correct_epochs(checkpoint)

    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: CheckpointContent) -> None:
        """Recount micro-batches where the run goes on with another number of processes."""
        if trainer.state.fn == "fit":
            recount_loops(checkpoint, type(trainer.datamodule).__qualname__, trainer.world_size, "processes")

    # How -------------------------------------------------------------------------------------------------------------

    def save(self, trainer: L.Trainer) -> None:
        """Write a checkpoint of this very moment, point `last` and `best`, drop what is no longer kept."""
        trainer.lightning_module.accumulation.check_finite(trainer.global_step, trainer.current_epoch)
        path = self._path(trainer)
        with trainer.stopwatch.paused():
            trainer.save_checkpoint(path)
            if trainer.is_global_zero:
                self.decide(path.name).apply(trainer.run_folder)
                log_checkpoint(trainer.loggers, path)
        trainer.strategy.barrier("checkpoint")
        if trainer.interrupt_requested():
            stop(trainer.global_step, path)
        for callback in trainer.callbacks:
            if isinstance(callback, Publish):
                with trainer.stopwatch.paused():
                    callback.on_checkpoint_saved(trainer, trainer.lightning_module)

    @staticmethod
    def _path(trainer: L.Trainer) -> Path:
        num_batches = trainer.lightning_module.accumulation.num_batches
        return trainer.run_folder.checkpoint(checkpoint_name(trainer.global_step, num_batches))
