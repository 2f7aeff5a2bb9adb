"""Lightning's reading and writing of checkpoints, as the folders of both engines."""

import collections
import os
import shutil
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from safetensors.torch import load_file, save_file

from lmmods.runs.array_library import ArrayLibrary
from lmmods.runs.checkpoint_content import CheckpointContent
from lmmods.runs.checkpoint_format import join
from lmmods.runs.checkpoint_io import BackgroundWriter, read_checkpoint, write_checkpoint
from lmmods.runs.checkpoint_pieces import Shares, split_pieces


class FolderCheckpointIO(CheckpointIO):
    """A checkpoint as a folder (lmmods.runs.checkpoint_io)."""

    writer: BackgroundWriter | None = None  # since several processes have begun to write one together

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike,
                        storage_options: Callable[[], None] | None = None) -> None:
        """Write it; `storage_options` is called when it stands."""
        write_checkpoint(Path(path), checkpoint, TORCH)
        if storage_options is not None:
            storage_options()

    def save_share(self, checkpoint: dict[str, Any], path: Path, then: Callable[[], None] | None, shares: Shares,
                   barrier: Callable[[], None]) -> None:
        """Begin to write this process's part of it beside training; arguments as of `BackgroundWriter.save`."""
        if self.writer is None:
            self.writer = BackgroundWriter()
        self.writer.save(path, frozen(checkpoint), then or (lambda: None), shares, barrier, TORCH)

    def load_checkpoint(self, path: str | os.PathLike, map_location: Any = None, weights_only: bool | None = None
                        ) -> dict[str, Any]:
        content = read_checkpoint(Path(path), TORCH)
        # Lightning asks which of its versions wrote a checkpoint; the JAX engine knows none.
        content.setdefault("pytorch-lightning_version", L.__version__)
        return content

    def remove_checkpoint(self, path: str | os.PathLike) -> None:
        shutil.rmtree(path)


def frozen(content: CheckpointContent) -> CheckpointContent:
    """A checkpoint that training changes no more: plain data and tensors copied; `Pieces` are copies already."""
    tree, arrays = split_pieces(content, TORCH)
    return join(tree, {path: array.detach().to("cpu", copy=True) if torch.is_tensor(array) else array
                       for path, array in arrays.items()})


def _memory_of(tensor: torch.Tensor) -> Hashable:
    """Optimisers let the state of several parameters share a tensor: bitsandbytes' 8-bit ones their code books."""
    if not tensor.numel():
        return id(tensor)  # empty ones have no memory
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    stored = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    uses = collections.Counter(tensor.untyped_storage().data_ptr() for tensor in stored.values())
    for name, tensor in stored.items():  # safetensors refuses parts of one memory that overlap
        if uses[tensor.untyped_storage().data_ptr()] > 1:
            stored[name] = tensor.clone()
    save_file(stored, path, metadata={"format": "pt", **metadata})


TORCH = ArrayLibrary(torch.is_tensor, _save, load_file, torch.cat, torch.Tensor.new_empty, _memory_of)
