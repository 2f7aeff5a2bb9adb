"""Checkpoints: when they are written, which are kept, and how they lie on disk."""

import collections
import os
import shutil
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from lmmods.core.signals import stop
from lmmods.runs import checkpoint_format as treefile
from lmmods.runs.checkpoint_policy import KeepRules
from lmmods.runs.csv_logger import log_checkpoint
from lmmods.runs.folder import checkpoint_name, commit_folder, write_json
from lmmods.runs.progress import recount
from lmmods.runs.saving import saving
from lmmods.torch_engine.callbacks.publish import Publish
from lmmods.torch_engine.strategies.deepspeed import DeepSpeed


class FolderCheckpointIO(CheckpointIO):
    """A checkpoint as a folder: `model.safetensors`, `optimizer.safetensors`, `state.safetensors` and `state.json`.

    Of sharded parameters each process may write its own part, `model-00000-of-00002.safetensors` and so on, which
    joined along their first dimension are the whole. The folder appears under its name only when all of it is on disk.
    Reading checks every file first.
    """

    FILES = {"state_dict": "model", "optimizer_states": "optimizer"}
    REST = "state"

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any = None) -> None:
        self.save_part(checkpoint, Path(path), 0, 1, lambda: None)

    def save_part(self, checkpoint: dict[str, Any], path: Path, rank: int, world_size: int,
                  barrier: Callable[[], None]) -> None:
        """Write one process's part of a checkpoint; all processes must call this.

        Args:
            checkpoint: Parameters and optimiser state cut along their first dimension, all else whole.
            path: Folder on a file system that the processes share.
            rank: This process.
            world_size: Number of processes.
            barrier: Waits for all processes.
        """
        temporary = path.with_name(f".{path.name}")
        tree, tensors = treefile.split(checkpoint, torch.is_tensor, _memory_of)
        with saving(path, temporary, sum(tensor.nbytes for tensor in tensors.values())):
            self._write_part(tree, tensors, path, temporary, rank, world_size, barrier)

    def _write_part(self, tree: Any, tensors: dict[str, torch.Tensor], path: Path, temporary: Path, rank: int,
                    world_size: int, barrier: Callable[[], None]) -> None:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        barrier()
        part = f"-{rank:05d}-of-{world_size:05d}" if world_size > 1 else ""
        for file, content in self._by_file(tensors).items():
            if rank == 0 and file == self.REST:
                _save(content, temporary / f"{file}.safetensors")
            elif file != self.REST:  # a single number is not cut
                _save({name: tensor for name, tensor in content.items() if rank == 0 or tensor.ndim},
                      temporary / f"{file}{part}.safetensors")
        barrier()
        if rank == 0:
            write_json(temporary / treefile.PLAIN, tree)
            treefile.write_manifest(temporary)
            commit_folder(temporary, path)

    def _by_file(self, tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        by_file: dict[str, dict] = {}
        for name, tensor in tensors.items():
            top, _, rest = name.partition("/")
            file = self.FILES.get(top, self.REST)
            by_file.setdefault(file, {})[name if file == self.REST else rest] = tensor
        return by_file

    def load_checkpoint(self, path: str | os.PathLike, map_location: Any = None, weights_only: bool | None = None
                        ) -> dict[str, Any]:
        path = Path(path)
        treefile.check_manifest(path)
        tensors = {}
        for top, file in (*self.FILES.items(), ("", self.REST)):
            tensors |= {f"{top}/{name}".lstrip("/"): tensor for name, tensor in _load(path, file).items()}
        content = treefile.read_tree(path, tensors)
        # Lightning asks which of its versions wrote a checkpoint; the JAX engine knows none.
        content.setdefault("pytorch-lightning_version", L.__version__)
        return content

    def remove_checkpoint(self, path: str | os.PathLike) -> None:
        shutil.rmtree(path)


def _memory_of(tensor: torch.Tensor) -> Hashable:
    """Optimisers let the state of several parameters share a tensor: bitsandbytes' 8-bit ones their code books."""
    if not tensor.numel():
        return id(tensor)  # empty ones have no memory
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    stored = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    uses = collections.Counter(tensor.untyped_storage().data_ptr() for tensor in stored.values())
    for name, tensor in stored.items():  # safetensors refuses parts of one memory that overlap
        if uses[tensor.untyped_storage().data_ptr()] > 1:
            stored[name] = tensor.clone()
    save_file(stored, path, metadata={"format": "pt"})


def _load(folder: Path, file: str) -> dict[str, torch.Tensor]:
    """Tensors of `file`, whole or in parts; none where there is no such file."""
    from safetensors.torch import load_file

    parts = [load_file(path) for path in sorted(folder.glob(f"{file}*.safetensors"))]
    return {name: torch.cat([part[name] for part in parts]) if len(parts) > 1 and tensor.ndim else tensor
            for name, tensor in parts[0].items()} if parts else {}


class Checkpoint(KeepRules, L.Callback):
    """Save what a run needs to go on exactly: by the rules, after validation, at the end and when interrupted."""

    _inside_epoch = True

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """After StartReport has made the run folder ready."""
        if trainer.resumed_from and trainer.is_global_zero:
            self.take_up(trainer.run_folder, trainer.resumed_from)

    # When ------------------------------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if trainer.validation_is_due():
            return  # saved after it: a run resumed from before would skip it
        step_done = not module.window.is_open
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

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note what the run is and the number of processes, and set Lightning's count of epochs right.

        After a resume from the end of an epoch it counts neither the end of that one nor the start of the next; a run
        stopped so twice would train an epoch more than max_epochs.
        """
        checkpoint["world_size"] = trainer.world_size
        checkpoint["identity"] = trainer.identity.tree
        if self._inside_epoch:
            for counts in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
                counts["processed"] = counts["completed"]
                counts["ready"] = counts["started"] = counts["completed"] + 1

    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Recount micro-batches where the run goes on with another number of processes."""
        before, now = checkpoint.get("world_size", 1), trainer.world_size
        if before == now or trainer.state.fn != "fit":
            return
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        position = checkpoint[type(trainer.datamodule).__qualname__]
        current, total = recount(progress["current"]["ready"], position, before, now, "processes")
        for counts, ready in ((progress["current"], current), (progress["total"], total)):
            shift = ready - counts["ready"]
            for name in counts:  # the batch under way may not be completed yet
                counts[name] += shift

    # How -------------------------------------------------------------------------------------------------------------

    def save(self, trainer: L.Trainer) -> None:
        """Write a checkpoint of this very moment, point `last` and `best`, drop what is no longer kept."""
        trainer.lightning_module.window.check_finite(trainer.global_step, trainer.current_epoch)
        path = self._path(trainer)
        with trainer.stopwatch.paused():
            trainer.save_checkpoint(path)
            if trainer.is_global_zero:
                self.kept_with(path.name).settle(trainer.run_folder)
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
        window = trainer.lightning_module.window
        return trainer.run_folder.checkpoint(checkpoint_name(trainer.global_step, window.num_batches))
