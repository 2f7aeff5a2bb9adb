"""Checkpoints written by all processes of a run: each writes the shards it holds, without communication meanwhile.

    model-00003-of-00008.safetensors    shards of process 3 of 8; the metadata give their offsets in each array

The first process creates the folder and completes it. It recognises that the others are done by their file names, since
a file gets its final name only when it is complete.
"""

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import safe_open

from lmmods.core import lazy_array
from lmmods.core.errors import UserError
from lmmods.core.lazy_array import LazyArray
from lmmods.runs.atomic import commit_folder, write_json
from lmmods.runs.checkpoint_files import PLAIN
from lmmods.runs.checkpoint_format import CheckpointContent, split, write_manifest
from lmmods.runs.inside import fresh_folder
from lmmods.runs.saving import saving

# ---------------------------------------------------------------------------------------------------------------------
# Array operations that an engine provides for checkpoints.


@dataclass(frozen=True)
class ArrayLibrary:
    """Operations on one kind of array.

    Args:
        is_array: Returns True if a node of a tree is such an array.
        save: Write arrays by name as a safetensors file with these metadata.
        load: Inverse of `save`.
        concatenate: Join arrays along their first dimension.
        empty: Allocate an array of a shape, of the kind of another one.
        open: Return the arrays of a safetensors file by name, to be read lazily.
        read: Read the whole of such a lazy array.
        memory_of: Returns a key that is equal for arrays with the same memory, shape and strides.
    """

    is_array: Callable[[Any], bool]
    save: Callable[[dict[str, Any], Path, dict[str, str]], None]
    load: Callable[[Path], dict[str, Any]]
    concatenate: Callable[[list[Any]], Any]
    empty: Callable[[Any, tuple[int, ...]], Any]
    open: Callable[[Path], dict[str, LazyArray]]
    read: Callable[[LazyArray], Any]
    memory_of: Callable[[Any], Hashable] = id


def _save_numpy(arrays: dict[str, np.ndarray], path: Path, metadata: dict[str, str]) -> None:
    # safetensors writes garbage for arrays that are not contiguous
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    safetensors.numpy.save_file(contiguous, path, metadata={"format": "pt", **metadata})


NUMPY = ArrayLibrary(lambda node: isinstance(node, np.ndarray), _save_numpy, safetensors.numpy.load_file,
                     np.concatenate, lambda like, shape: np.empty(shape, like.dtype),
                     lambda file: lazy_array.of_file(file), np.asarray)


PIECES = "pieces"  # in the metadata of a file: JSON of {name in the file: [name, shape, begin]}
POLL_SECONDS = 0.05
SMALL = 2**20  # bytes; smaller arrays are not divided among processes that all hold them


@dataclass(frozen=True)
class Shards:
    """The shards of an array that this process writes; other processes write the rest.

    Args:
        shape: Shape of the whole array.
        parts: Offset of each shard in it, and its values.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[tuple[int, ...], Any], ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for _, array in self.parts)

    def __getitem__(self, index: int) -> "Shards":
        """The shards of entry `index` along the first dimension."""
        return Shards(self.shape[1:], tuple((begin[1:], array[index - begin[0]]) for begin, array in self.parts
                                            if begin[0] <= index < begin[0] + len(array)))


def own_shard(begin: tuple[int, ...], array: Any, number: int, count: int
             ) -> tuple[tuple[tuple[int, ...], np.ndarray], ...]:
    """Return the part, copied, that holder `number` of the `count` holders of a shard writes: some rows, or all or
    nothing.

    Args:
        begin: Offset of the shard.
        array: Its values, with `shape`, `nbytes` and slices.
    """
    if count == 1 or not array.ndim or array.nbytes < SMALL or array.shape[0] < count:
        return ((begin, np.array(array)),) if number == 0 else ()
    first, last = (len(array) * rank // count for rank in (number, number + 1))
    return (((begin[0] + first, *begin[1:]), np.array(array[first:last])),)


@dataclass(frozen=True)
class WriterRank:
    """The place of this process among those that write a checkpoint together: `rank` of `size`."""

    rank: int
    size: int

    def file(self, group: str, rank: int | None = None) -> str:
        return f"{group}-{self.rank if rank is None else rank:05d}-of-{self.size:05d}.safetensors"


def begin_folder(folder: Path) -> None:
    """Create an empty temporary folder for a checkpoint. The first process does so before any other one writes."""
    fresh_folder(_temporary(folder))


def write_shards(folder: Path, content: CheckpointContent, writer_rank: WriterRank,
                 groups: Callable[[str], tuple[str, str]], library: ArrayLibrary = NUMPY) -> None:
    """Write this process's shards; the first process also completes the checkpoint when all others have written theirs.

    Args:
        content: The same tree in all processes, with `Shards` of this process, and arrays that all hold, which the
            first one writes.
        groups: Maps an array's path in the tree to its file and its name in that file.

    Raises:
        UserError: The disk failed, here or for another process.
    """
    temporary = _temporary(folder)
    tree, arrays = split_shards(content, library)
    files: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for path, array in arrays.items():
        group, name = groups(path)
        stored, told = files.setdefault(group, ({}, {}))
        if not isinstance(array, Shards):
            array = Shards(array.shape, (((0,) * array.ndim, array),) if writer_rank.rank == 0 else ())
        for number, (begin, part) in enumerate(array.parts):
            key = f"{name}|{number}"
            stored[key] = part
            told[key] = [name, list(array.shape), list(begin)]
    with saving(folder, temporary, sum(array.nbytes for array in arrays.values()), is_shard=True):
        for group, (stored, told) in files.items():
            # Rename when complete: the first process takes a file's name as the sign that it is whole.
            hidden = temporary / f".{writer_rank.file(group)}"
            library.save(stored, hidden, {PIECES: json.dumps(told)})
            os.replace(hidden, temporary / writer_rank.file(group))
        if writer_rank.rank == 0:
            awaited = {writer_rank.file(group, rank) for group in files for rank in range(writer_rank.size)}
            while not awaited <= {path.name for path in temporary.iterdir()}:
                time.sleep(POLL_SECONDS)
            write_json(temporary / PLAIN, tree)
            write_manifest(temporary)
            commit_folder(temporary, folder)


def split_shards(content: CheckpointContent, library: ArrayLibrary) -> tuple[Any, dict[str, Any]]:
    """Like `split`, for a tree whose arrays may be `Shards`."""
    return split(content, lambda node: isinstance(node, Shards) or library.is_array(node),
                 lambda node: id(node) if isinstance(node, Shards) else library.memory_of(node))


def pieces_in(file: Path) -> dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] | None:
    """Return the array's name, its shape and the shard's offset for each shard in a file, by the shard's name there.

    None if the file holds no shards with offsets.
    """
    with safe_open(file, framework="np") as opened:
        told = (opened.metadata() or {}).get(PIECES)
    if told is None:
        return None
    return {key: (name, tuple(shape), tuple(begin)) for key, (name, shape, begin) in json.loads(told).items()}


def put_together(files: list[Path], load: Callable[[Path], dict[str, Any]], empty: Callable[[Any, tuple], Any]
                 ) -> dict[str, Any]:
    """Assemble arrays from their shards in `files`, loading one file at a time.

    Args:
        empty: Allocates an array of a shape, of the kind of another one.

    Raises:
        UserError: Some shards are in none of the files.
    """
    whole: dict[str, Any] = {}
    filled: Counter[str] = Counter()
    for file in files:
        arrays = load(file)
        for key, (name, shape, begin) in (pieces_in(file) or {}).items():
            part = arrays.pop(key)
            if name not in whole:
                whole[name] = empty(part, shape)
            whole[name][tuple(slice(at, at + size) for at, size in zip(begin, part.shape, strict=True))] = part
            filled[name] += math.prod(part.shape)
    for name, array in whole.items():
        check_filled(files[0].parent, name, filled[name], array.shape)
    return whole


def check_filled(folder: Path, name: str, found: int, shape: tuple[int, ...]) -> None:
    """Raise UserError unless shards with `found` values in all make up an array of this shape."""
    if found != math.prod(shape):
        raise UserError(f"Checkpoint {folder} is damaged: parts of {name} are missing. Resume from another one.")


def _temporary(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}")
