"""Lightning plugin that reads and writes checkpoints as folders, in the format shared with the JAX engine."""

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
from lmmods.runs.checkpoint_files import remove_checkpoint
from lmmods.runs.checkpoint_format import CheckpointContent, check_manifest, join
from lmmods.runs.checkpoint_io import BackgroundWriter, open_checkpoint, read_checkpoint, write_checkpoint
from lmmods.runs.checkpoint_shards import ArrayLibrary, WriterRank, split_shards


class FolderCheckpointIO(CheckpointIO):
    """Reads and writes checkpoint folders (lmmods.runs.checkpoint_io)."""

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
        self.writer.save(path, frozen(checkpoint), then or (lambda: None), writer_rank, barrier, TORCH)

    def load_checkpoint(self, path: str | os.PathLike, map_location: Any = None, weights_only: bool | None = None
                        ) -> dict[str, Any]:
        return _of_lightning(read_checkpoint(Path(path), TORCH))

    def open_checkpoint(self, path: Path, gather: Callable[[dict], dict], writer_rank: WriterRank) -> dict[str, Any]:
        """Load a checkpoint with lazy arrays. A collective call: each process verifies a share of the files.

        Args:
            gather: Merges the processes' dictionaries, which are keyed by rank.

        Raises:
            UserError: A file is damaged.
        """
        problems = {}
        try:
            check_manifest(path, share=(writer_rank.rank, writer_rank.size))
        except UserError as error:
            problems = {writer_rank.rank: str(error)}
        if problems := gather(problems):
            raise UserError(problems[min(problems)])
        return _of_lightning(open_checkpoint(path, TORCH))

    def remove_checkpoint(self, path: str | os.PathLike) -> None:
        remove_checkpoint(Path(path))


def _of_lightning(content: CheckpointContent) -> dict[str, Any]:
    # Lightning requires the version that wrote a checkpoint, which those of the JAX engine do not have.
    return {"pytorch-lightning_version": L.__version__, **content}


def frozen(content: CheckpointContent) -> CheckpointContent:
    """Copy a checkpoint's data and tensors to the CPU, so that training cannot change them; `Shards` are copies."""
    tree, arrays = split_shards(content, TORCH)
    return join(tree, {path: array.detach().to("cpu", copy=True) if torch.is_tensor(array) else array
                       for path, array in arrays.items()})


def _memory_of(tensor: torch.Tensor) -> Hashable:
    """Return a key by which shared tensors are found: bitsandbytes' 8-bit optimisers share their code books."""
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
    return lazy_array.of_file(file, "pt", torch.empty)


def _read(array: LazyArray) -> torch.Tensor:
    return array[(slice(None),) * array.ndim].clone()  # a copy, not the file's mapped memory


TORCH = ArrayLibrary(torch.is_tensor, _save, load_file, torch.cat, torch.Tensor.new_empty, _open, _read, _memory_of)
