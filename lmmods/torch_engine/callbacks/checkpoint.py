"""Save and load checkpoints of a torch run, in the format of both engines (lmmods.runs.checkpoint).

Save: `RunEvents` calls `Checkpoint.save`, and this Lightning's `save_checkpoint`, which collects the states of model,
optimiser and callbacks. `Checkpoint.on_save_checkpoint` adds progress, position in the data and the run's identity;
`TaskModule.on_save_checkpoint` removes frozen parameters; the strategy passes the result to `FolderCheckpointIO`.

Resume: `Trainer.fit` gives Lightning the folder. The strategy reads it through `FolderCheckpointIO`, which adds the
state of Lightning's loops. `TaskModule.on_load_checkpoint` checks the parameters; Lightning restores the rest.
`Checkpoint.on_train_start` completes the clean-up of an interrupted run.
"""

import collections
import os
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from safetensors.torch import load_file, save_file

from lmmods.core import lazy_array
from lmmods.core.errors import UserError
from lmmods.core.lazy_array import LazyArray
from lmmods.runs.checkpoint import (
    ArrayLibrary,
    BackgroundWriter,
    CheckpointContent,
    WriterRank,
    check_manifest,
    join,
    open_checkpoint,
    read_checkpoint,
    split_shards,
    write_checkpoint,
)
from lmmods.runs.checkpoint_policy import CheckpointPolicy
from lmmods.runs.folder import checkpoint_name
from lmmods.runs.progress import Progress, update_checkpoint
from lmmods.runs.run_files import remove_checkpoint
from lmmods.runs.wandb import log_checkpoint
from lmmods.torch_engine.compat.lightning import correct_logged_step, loops_state


class Checkpoint(CheckpointPolicy, L.Callback):
    """Callback that saves what a run needs to resume exactly."""

    _latest: Path | None = None
    _position: dict[str, Any] = {}  # progress, and state of the data, after the last step done

    # Save; called by RunEvents ---------------------------------------------------------------------------------------

    def path(self, trainer: L.Trainer) -> Path:
        """Return the checkpoint path of the last step done."""
        return trainer.run_folder.checkpoint(checkpoint_name(trainer.global_step))

    def note_position(self, trainer: L.Trainer) -> None:
        """Record the position after a step: a later save must not see the loader's progress within the next step."""
        data = trainer.datamodule
        self._position = {"progress": trainer.progress.state(), type(data).__qualname__: data.state_dict()}

    def rank_current(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Rank the checkpoint about to be written by the monitored metric."""
        self.rank({name: value.item() for name, value in trainer.callback_metrics.items()}, self.path(trainer).name)

    def save(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Write a checkpoint of the last step done, update `last` and `best`, and remove checkpoints not kept."""
        # A checkpoint with non-finite weights could replace the last good one.
        module.check_finite(trainer.global_step)
        path = self._latest = self.path(trainer)
        kept = self.decide(path.name)

        # Other checkpoints are removed only once this one is complete, which may be later, in the writer's thread.
        def on_complete() -> None:
            kept.apply(trainer.run_folder)
            log_checkpoint(trainer.loggers, path)

        with trainer.stopwatch.paused():
            trainer.save_checkpoint(path, storage_options=on_complete)
        trainer.strategy.barrier("checkpoint")

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: CheckpointContent) -> None:
        """Add the position, the run's identity and its number of ranks."""
        checkpoint |= {**self._position, "world_size": trainer.num_data_ranks,
                       "identity": trainer.identity.tree}
        del checkpoint["loops"]

    def is_saved(self, trainer: L.Trainer) -> bool:
        """True if a checkpoint of the current step exists or is being written."""
        path = self.path(trainer)
        return path == self._latest or path.is_dir()

    def check(self, trainer: L.Trainer) -> None:
        """Raise the error of the latest checkpoint if writing it has already failed; does not wait."""
        writer = trainer.strategy.checkpoint_io.writer
        if writer is not None:
            writer.check()

    def wait(self, trainer: L.Trainer) -> None:
        """Wait until the latest checkpoint is complete, and raise its error, if any. A collective call."""
        writer = trainer.strategy.checkpoint_io.writer
        if writer is not None:
            writer.wait()
            trainer.strategy.barrier("checkpoint complete")

    # Resume ----------------------------------------------------------------------------------------------------------

    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: CheckpointContent) -> None:
        """Restore the position, which the run keeps until its next step is done."""
        key = type(trainer.datamodule).__qualname__
        self._position = {name: checkpoint[name] for name in ("progress", key) if name in checkpoint}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        # StartReport has prepared the run folder by now.
        if trainer.resumed_from and trainer.is_global_zero:
            self.resume(trainer.run_folder, trainer.resumed_from)

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        correct_logged_step(trainer)


class FolderCheckpointIO(CheckpointIO):
    """Lightning's plugin that reads and writes checkpoint folders."""

    writer: BackgroundWriter | None = None  # created by the first `save_shards`

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike,
                        storage_options: Callable[[], None] | None = None) -> None:
        """Write a checkpoint; `storage_options` is called once it is complete."""
        write_checkpoint(Path(path), checkpoint, TORCH)
        if storage_options is not None:
            storage_options()

    def save_shards(self, checkpoint: dict[str, Any], path: Path, then: Callable[[], None] | None,
                    writer_rank: WriterRank, barrier: Callable[[], None]) -> None:
        """Start writing this process's shards in the background; arguments as in `BackgroundWriter.save`."""
        if self.writer is None:
            self.writer = BackgroundWriter()
        # A copy, as training changes the tensors while they are being written.
        self.writer.save(path, copy_to_cpu(checkpoint), then or (lambda: None), writer_rank, barrier, TORCH)

    def load_checkpoint(self, path: str | os.PathLike, map_location: Any = None, weights_only: bool | None = None
                        ) -> dict[str, Any]:
        return _to_lightning(read_checkpoint(Path(path), TORCH))

    def open_checkpoint(self, path: Path, gather: Callable[[dict], dict], writer_rank: WriterRank) -> dict[str, Any]:
        """Load a checkpoint with lazy arrays. A collective call: each process verifies some of the files.

        Args:
            gather: Merges the processes' dictionaries, which are keyed by rank.

        Raises:
            UserError: A file is damaged.
        """
        problems = {}
        try:
            # All processes raise the same error, so that none waits for the others.
            check_manifest(path, share=(writer_rank.rank, writer_rank.size))
        except UserError as error:
            problems = {writer_rank.rank: str(error)}
        if problems := gather(problems):
            raise UserError(problems[min(problems)])
        return _to_lightning(open_checkpoint(path, TORCH))

    def remove_checkpoint(self, path: str | os.PathLike) -> None:
        remove_checkpoint(Path(path))


def copy_to_cpu(content: CheckpointContent) -> CheckpointContent:
    """Copy a checkpoint's data and tensors to the CPU, so that training cannot change them; `Shards` are copies."""
    tree, arrays = split_shards(content, TORCH)
    return join(tree, {path: array.detach().to("cpu", copy=True) if torch.is_tensor(array) else array
                       for path, array in arrays.items()})


def _to_lightning(content: CheckpointContent) -> dict[str, Any]:
    content = update_checkpoint(content)
    # Lightning requires the version that wrote a checkpoint, which the JAX engine does not save.
    return {"pytorch-lightning_version": L.__version__, **content,
            "loops": loops_state(Progress(**content["progress"]))}


# ---------------------------------------------------------------------------------------------------------------------
# torch's operations on the arrays of a checkpoint.

def _memory_key(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors that share memory: bitsandbytes' 8-bit optimisers share code books."""
    if not tensor.numel():
        return id(tensor)  # empty tensors have no memory
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    stored = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    uses = collections.Counter(tensor.untyped_storage().data_ptr() for tensor in stored.values())
    for name, tensor in stored.items():  # safetensors rejects tensors that share memory
        if uses[tensor.untyped_storage().data_ptr()] > 1:
            stored[name] = tensor.clone()
    save_file(stored, path, metadata={"format": "pt", **metadata})


def _open(file: Path) -> dict[str, LazyArray]:
    return lazy_array.lazy_file(file, "pt", torch.empty)


def _read(array: LazyArray) -> torch.Tensor:
    return array[(slice(None),) * array.ndim].clone()  # a copy, not the file's mapped memory


TORCH = ArrayLibrary(torch.is_tensor, _save, load_file, torch.cat, torch.Tensor.new_empty, _open, _read, _memory_key)
