"""Checkpoints that all processes of a run write, each the pieces of arrays that it holds, without talking meanwhile.

    model-00003-of-00008.safetensors    pieces of process 3 of 8; metadata say where in its array each begins

The first process begins the folder and ends it. That another one has written its files it sees by their names, which
they bear from when they are complete.
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
# What checkpoints need of the arrays of an engine.

@dataclass(frozen=True)
class ArrayLibrary:
    """What is done with arrays of one kind.

    Args:
        is_array: Whether a node of a tree is one.
        save: Write arrays by name as a safetensors file with these metadata.
        load: Undo `save`.
        concatenate: Join arrays along their first dimension.
        empty: Make an array of a shape, of another one's kind.
        open: Name the arrays of a safetensors file, which are read by parts.
        read: All of such an array.
        memory_of: What is equal for arrays that are the same memory read in the same way.
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
SMALL = 2**20  # bytes; what is smaller is not cut among processes that all hold it


@dataclass(frozen=True)
class Pieces:
    """What this process writes of an array, whose other pieces are written by others.

    Args:
        shape: Of the whole.
        parts: Where in it each piece begins, and its values.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[tuple[int, ...], Any], ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for _, array in self.parts)

    def __getitem__(self, index: int) -> "Pieces":
        """One along the first dimension."""
        return Pieces(self.shape[1:], tuple((begin[1:], array[index - begin[0]]) for begin, array in self.parts
                                            if begin[0] <= index < begin[0] + len(array)))


def own_part(begin: tuple[int, ...], array: Any, number: int, count: int
             ) -> tuple[tuple[tuple[int, ...], np.ndarray], ...]:
    """What holder `number` of `count` that all have a piece writes of it, copied: some of its rows, or all or nothing.

    Args:
        begin: Where the piece begins.
        array: Its values, with `shape`, `nbytes` and slices.
    """
    if count == 1 or not array.ndim or array.nbytes < SMALL or array.shape[0] < count:
        return ((begin, np.array(array)),) if number == 0 else ()
    first, last = (len(array) * rank // count for rank in (number, number + 1))
    return (((begin[0] + first, *begin[1:]), np.array(array[first:last])),)


@dataclass(frozen=True)
class Shares:
    """Which of the processes that write a checkpoint together this one is: `rank` of `size`."""

    rank: int
    size: int

    def file(self, group: str, rank: int | None = None) -> str:
        return f"{group}-{self.rank if rank is None else rank:05d}-of-{self.size:05d}.safetensors"


def begin_folder(folder: Path) -> None:
    """Make room for a checkpoint. The first process does so before any other one writes."""
    fresh_folder(_temporary(folder))


def write_share(folder: Path, content: CheckpointContent, shares: Shares, groups: Callable[[str], tuple[str, str]],
                library: ArrayLibrary = NUMPY) -> None:
    """Write this process's pieces; the first also ends the checkpoint, when all others have written theirs.

    Args:
        content: The same tree in all processes, with this process's `Pieces` and arrays that all have, which the first
            one writes.
        groups: The file and the name in it of an array by its path in the tree.

    Raises:
        UserError: The disk failed, here or for another process.
    """
    temporary = _temporary(folder)
    tree, arrays = split_pieces(content, library)
    files: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for path, array in arrays.items():
        group, name = groups(path)
        stored, told = files.setdefault(group, ({}, {}))
        if not isinstance(array, Pieces):
            array = Pieces(array.shape, (((0,) * array.ndim, array),) if shares.rank == 0 else ())
        for number, (begin, part) in enumerate(array.parts):
            key = f"{name}|{number}"
            stored[key] = part
            told[key] = [name, list(array.shape), list(begin)]
    with saving(folder, temporary, sum(array.nbytes for array in arrays.values()), is_share=True):
        for group, (stored, told) in files.items():
            hidden = temporary / f".{shares.file(group)}"
            library.save(stored, hidden, {PIECES: json.dumps(told)})
            os.replace(hidden, temporary / shares.file(group))
        if shares.rank == 0:
            awaited = {shares.file(group, rank) for group in files for rank in range(shares.size)}
            while not awaited <= {path.name for path in temporary.iterdir()}:
                time.sleep(POLL_SECONDS)
            write_json(temporary / PLAIN, tree)
            write_manifest(temporary)
            commit_folder(temporary, folder)


def split_pieces(content: CheckpointContent, library: ArrayLibrary) -> tuple[Any, dict[str, Any]]:
    """`split` where arrays may be `Pieces`."""
    return split(content, lambda node: isinstance(node, Pieces) or library.is_array(node),
                 lambda node: id(node) if isinstance(node, Pieces) else library.memory_of(node))


def pieces_in(file: Path) -> dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] | None:
    """Of each piece in a file by its name there: the array's name and shape, and where in it the piece begins.

    None where the file holds no pieces.
    """
    with safe_open(file, framework="np") as opened:
        told = (opened.metadata() or {}).get(PIECES)
    if told is None:
        return None
    return {key: (name, tuple(shape), tuple(begin)) for key, (name, shape, begin) in json.loads(told).items()}


def put_together(files: list[Path], load: Callable[[Path], dict[str, Any]], empty: Callable[[Any, tuple], Any]
                 ) -> dict[str, Any]:
    """The arrays whose pieces are in some files, one file in memory at a time.

    Args:
        empty: Makes an array of this shape and another one's kind.

    Raises:
        UserError: Some pieces are in none of the files.
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
    """Raise UserError unless pieces with `found` values make up an array of a checkpoint."""
    if found != math.prod(shape):
        raise UserError(f"Checkpoint {folder} is damaged: parts of {name} are missing. Resume from another one.")


def _temporary(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}")
