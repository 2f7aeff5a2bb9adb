"""Checkpoints: when they are written, which are kept, and how they lie on disk."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from lmmods import treefile
from lmmods.errors import UserError
from lmmods.run import checkpoint_name, checkpoint_position, commit_folder, write_json
from lmmods.settings import require


class FolderCheckpointIO(CheckpointIO):
    """A checkpoint as a folder: `model.safetensors`, `optimizer.safetensors` and `state.json`.

    The folder appears under its name only when all of it is on disk. Reading checks every file first.
    """

    FILES = {"state_dict": "model.safetensors", "optimizer_states": "optimizer.safetensors"}
    REST = "state.safetensors"

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any = None) -> None:
        from safetensors.torch import save_file

        path = Path(path)
        tree, tensors = treefile.split(checkpoint, torch.is_tensor)
        temporary = path.with_name(f".{path.name}-{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        by_file: dict[str, dict] = {}
        for name, tensor in tensors.items():
            top, _, rest = name.partition("/")
            by_file.setdefault(self.FILES.get(top, self.REST), {})[
                rest if top in self.FILES else name] = tensor.detach().contiguous()
        for file, content in by_file.items():
            save_file(content, temporary / file, metadata={"format": "pt"})
        write_json(temporary / "state.json", tree)
        treefile.write_manifest(temporary)
        commit_folder(temporary, path)

    def load_checkpoint(self, path: str | os.PathLike, map_location: Any = None, weights_only: bool | None = None
                        ) -> dict[str, Any]:
        from safetensors.torch import load_file

        path = Path(path)
        treefile.check_manifest(path)
        tensors = {}
        for top, file in (*self.FILES.items(), ("", self.REST)):
            if (path / file).exists():
                tensors |= {f"{top}/{name}".lstrip("/"): tensor for name, tensor in load_file(path / file).items()}
        return treefile.join(json.loads((path / "state.json").read_text()), tensors)

    def remove_checkpoint(self, path: str | os.PathLike) -> None:
        shutil.rmtree(path)


class Checkpoint(L.Callback):
    """Save what a run needs to go on exactly, every so many steps, after validation, at the end and when interrupted.

    Args:
        every_n_steps: Optimiser steps between checkpoints; null saves after each validation and at the end only.
        keep_last: How many of the newest to keep.
        keep_best: How many of the best by `monitor` to keep beside them.
        monitor: Metric that says which is best.
        mode: Whether the smaller or the larger value is better.
    """

    def __init__(self, every_n_steps: int | None = 250, keep_last: int = 2, keep_best: int = 1,
                 monitor: str = "val/loss", mode: Literal["min", "max"] = "min"):
        require(every_n_steps is None or every_n_steps >= 1, "checkpoint.every_n_steps", every_n_steps, "1 or more")
        require(keep_last >= 1, "checkpoint.keep_last", keep_last, "1 or more")
        require(keep_best >= 0, "checkpoint.keep_best", keep_best, "0 or more")
        self.every_n_steps, self.keep_last, self.keep_best = every_n_steps, keep_last, keep_best
        self.monitor, self.mode = monitor, mode
        self.best: list[tuple[float, str]] = []  # (value, checkpoint name), best first
        self._inside_epoch = True

    def state_dict(self) -> dict[str, Any]:
        return {"best": [list(pair) for pair in self.best]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = [(value, name) for value, name in state["best"]]

    # When ------------------------------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if trainer.validation_is_due():
            return  # saved after it: a run resumed from before would skip it
        step_done = not module.window.is_open
        due = step_done and self.every_n_steps and trainer.global_step % self.every_n_steps == 0
        # Several processes agree on an interruption once a step: asking each other makes them wait.
        may_stop = (step_done or trainer.world_size == 1) and trainer.interrupt_requested()
        if due or may_stop or trainer.is_last_batch_of_run():
            self.save(trainer)

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if self.keep_best:
            self._rank(trainer)
        self.save(trainer)

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not self._path(trainer).is_dir():  # stopped by a callback rather than by max_steps or max_epochs
            self._inside_epoch = False
            self.save(trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Set Lightning's count of epochs right.

        After a resume from the end of an epoch it counts neither the end of that one nor the start of the next; a run
        stopped so twice would train an epoch more than max_epochs.
        """
        if self._inside_epoch:
            for counts in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
                counts["processed"] = counts["completed"]
                counts["ready"] = counts["started"] = counts["completed"] + 1

    # How -------------------------------------------------------------------------------------------------------------

    def save(self, trainer: L.Trainer) -> None:
        """Write a checkpoint of this very moment, point `last` and `best`, drop what is no longer kept."""
        trainer.lightning_module.window.check_finite(trainer.global_step, trainer.current_epoch)
        path = self._path(trainer)
        with trainer.stopwatch.paused():
            trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            folder = trainer.run_folder
            folder.point("last", path)
            if self.best and folder.checkpoint(self.best[0][1]).is_dir():
                folder.point("best", folder.checkpoint(self.best[0][1]))
            for name in set(folder.names()) - set(folder.names()[-self.keep_last :]) - {n for _, n in self.best}:
                shutil.rmtree(folder.checkpoint(name))
        trainer.strategy.barrier("checkpoint")
        if trainer.interrupt_requested():
            trainer.stop_interrupted(path)

    @staticmethod
    def _path(trainer: L.Trainer) -> Path:
        window = trainer.lightning_module.window
        return trainer.run_folder.checkpoint(checkpoint_name(trainer.global_step, window.num_batches))

    def _rank(self, trainer: L.Trainer) -> None:
        """Note the checkpoint about to be written among the best, if it is."""
        if self.monitor not in trainer.callback_metrics:
            known = ", ".join(sorted(trainer.callback_metrics))
            raise UserError(f"checkpoint.monitor is {self.monitor!r}, which this run does not log ({known}).")
        value = trainer.callback_metrics[self.monitor].item()
        self.best.append((math.inf if math.isnan(value) and self.mode == "min" else value, self._path(trainer).name))
        sign = 1 if self.mode == "min" else -1
        self.best.sort(key=lambda pair: (sign * pair[0], checkpoint_position(pair[1])))
        self.best = self.best[: self.keep_best]
