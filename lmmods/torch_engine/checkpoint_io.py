"""Lightning's reading and writing of checkpoints, as the folders of both engines."""

import collections
import os
import shutil
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from safetensors.torch import load_file, save_file

from lmmods.runs.checkpoint_io import ArrayLibrary, Writers, read_checkpoint, write_checkpoint


class FolderCheckpointIO(CheckpointIO):
    """A checkpoint as a folder (lmmods.runs.checkpoint_io)."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any = None,
                        writers: Writers = Writers()) -> None:
        write_checkpoint(Path(path), checkpoint, TORCH, writers)

    def load_checkpoint(self, path: str | os.PathLike, map_location: Any = None, weights_only: bool | None = None
                        ) -> dict[str, Any]:
        content = read_checkpoint(Path(path), TORCH)
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
    stored = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    uses = collections.Counter(tensor.untyped_storage().data_ptr() for tensor in stored.values())
    for name, tensor in stored.items():  # safetensors refuses parts of one memory that overlap
        if uses[tensor.untyped_storage().data_ptr()] > 1:
            stored[name] = tensor.clone()
    save_file(stored, path, metadata={"format": "pt"})


TORCH = ArrayLibrary(torch.is_tensor, _save, load_file, torch.cat, torch.Tensor.new_empty, _memory_of)
