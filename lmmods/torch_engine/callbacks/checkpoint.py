"""Writing of checkpoints, with the content that Lightning does not include."""

from pathlib import Path

import lightning as L

from lmmods.runs.checkpoint_format import CheckpointContent
from lmmods.runs.checkpoint_policy import CheckpointPolicy
from lmmods.runs.folder import checkpoint_name
from lmmods.runs.progress import correct_epochs, recount_loops
from lmmods.runs.wandb import log_checkpoint


class Checkpoint(CheckpointPolicy, L.Callback):
    """Save what a run needs to go on exactly."""

    _inside_epoch = True
    _latest: Path | None = None

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """After StartReport has made the run folder ready."""
        if trainer.resumed_from and trainer.is_global_zero:
            self.resume(trainer.run_folder, trainer.resumed_from)

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: CheckpointContent) -> None:
        """Add the run's identity and its number of ranks."""
        checkpoint["world_size"] = trainer.num_data_ranks
        checkpoint["identity"] = trainer.identity.tree
        if self._inside_epoch:
            correct_epochs(checkpoint)

    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: CheckpointContent) -> None:
        """Convert Lightning's counts of micro-batches if their size or number per optimiser step has changed."""
        if trainer.state.fn == "fit":
            data = trainer.datamodule
            progress = recount_loops(checkpoint, type(data).__qualname__, trainer.cut(data))
            module.accumulation.num_batches = progress.accumulated

    # Called by RunEvents ---------------------------------------------------------------------------------------------

    def path(self, trainer: L.Trainer) -> Path:
        """Return the path of a checkpoint of the current position."""
        accumulation = trainer.lightning_module.accumulation
        return trainer.run_folder.checkpoint(checkpoint_name(trainer.global_step, accumulation.num_batches))

    def rank_now(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Rank the checkpoint about to be written by the monitored metric."""
        self.rank({name: value.item() for name, value in trainer.callback_metrics.items()}, self.path(trainer).name)

    def save(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Write a checkpoint of the current position, update `last` and `best`, and remove checkpoints not kept."""
        module.accumulation.check_finite(trainer.global_step, trainer.current_epoch)
        path = self._latest = self.path(trainer)
        kept = self.decide(path.name)

        def settle() -> None:
            kept.apply(trainer.run_folder)
            log_checkpoint(trainer.loggers, path)

        with trainer.stopwatch.paused():
            trainer.save_checkpoint(path, storage_options=settle)
        trainer.strategy.barrier("checkpoint")

    def is_saved(self, trainer: L.Trainer) -> bool:
        """True if a checkpoint of the current position exists or is being written."""
        path = self.path(trainer)
        return path == self._latest or path.is_dir()

    def check(self, trainer: L.Trainer) -> None:
        """Raise the error of the latest checkpoint if writing it has failed by now; does not wait."""
        writer = trainer.strategy.checkpoint_io.writer
        if writer is not None:
            writer.check()

    def wait(self, trainer: L.Trainer) -> None:
        """Wait until the latest checkpoint is complete, and raise its error, if any. A collective call."""
        writer = trainer.strategy.checkpoint_io.writer
        if writer is not None:
            writer.wait()
            trainer.strategy.barrier("checkpoint stands")

    def save_at_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Save at the end of a run ended by a callback, where Lightning has already counted the epoch as complete."""
        self._inside_epoch = False
        self.save(trainer, module)
