"""Writing and reading a checkpoint folder, for both engines; each brings its own arrays.

    model.safetensors       trainable parameters, by torch's names
    optimizer.safetensors   optimiser state, numbered as torch's optimisers number parameters
    state.safetensors       accumulated gradients, and other arrays
    state.json              everything else, and where the arrays go
    manifest.json           size and checksum of each file

If several processes write, each has files of its own, `model-00000-of-00002.safetensors` and so on, which hold shards
of arrays with their offsets (lmmods.runs.checkpoint_shards). In older checkpoints the shards have no offsets and are
concatenated along the first dimension. The folder gets its final name only when all of it is on disk.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lmmods.core import lazy_array
from lmmods.core.lazy_array import LazyArray
from lmmods.runs.atomic import commit_folder, write_json
from lmmods.runs.checkpoint_files import PLAIN
from lmmods.runs.checkpoint_format import CheckpointContent, check_manifest, read_tree, split, write_manifest
from lmmods.runs.checkpoint_shards import (
    NUMPY,
    ArrayLibrary,
    WriterRank,
    begin_folder,
    check_filled,
    pieces_in,
    put_together,
    write_shards,
)
from lmmods.runs.inside import fresh_folder
from lmmods.runs.saving import saving

LARGE = ("state_dict/", "optimizer_states/", "window/gradients/")  # path prefixes of arrays that are read lazily
SHARDED = {"state_dict": "model", "optimizer_states": "optimizer"}
REST = "state"


def write_checkpoint(folder: Path, content: CheckpointContent, library: ArrayLibrary = NUMPY) -> None:
    """Write a tree of plain data and arrays. Raises UserError: the disk failed.

    Args:
        folder: Existing content is replaced.
    """
    temporary = folder.with_name(f".{folder.name}")
    tree, arrays = split(content, library.is_array, library.memory_of)
    by_file: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        file, inside = place_of(name)
        by_file.setdefault(file, {})[inside] = array
    with saving(folder, temporary, sum(array.nbytes for array in arrays.values())):
        fresh_folder(temporary)
        for file, part in by_file.items():
            library.save(part, temporary / f"{file}.safetensors", {})
        write_json(temporary / PLAIN, tree)
        write_manifest(temporary)
        commit_folder(temporary, folder)


def place_of(path: str) -> tuple[str, str]:
    """Map an array's path in the tree to its file, without suffix, and its name in that file."""
    top, _, rest = path.partition("/")
    return (SHARDED[top], rest) if top in SHARDED else (REST, path)


def read_checkpoint(folder: Path, library: ArrayLibrary = NUMPY) -> CheckpointContent:
    """Inverse of `write_checkpoint`, for any engine and number of writing processes.

    Raises:
        UserError: A file is damaged.
    """
    check_manifest(folder)
    return read_tree(folder, read_arrays(folder, library))


def read_arrays(folder: Path, library: ArrayLibrary = NUMPY) -> dict[str, Any]:
    """Return the whole arrays of a checkpoint, assembled from all shards, by their paths in its tree."""
    arrays: dict[str, Any] = {}
    for top, file in (*SHARDED.items(), ("", REST)):
        files = sorted(folder.glob(f"{file}*.safetensors"))
        if files and pieces_in(files[0]) is not None:
            found = put_together(files, library.load, library.empty)
            arrays |= {f"{top}/{name}".lstrip("/"): array for name, array in found.items()}
            continue
        shards = [library.load(path) for path in files]
        for name, array in shards[0].items() if shards else ():
            whole = library.concatenate([shard[name] for shard in shards]) if len(shards) > 1 and array.ndim else array
            arrays[f"{top}/{name}".lstrip("/")] = whole
    return arrays


def open_checkpoint(folder: Path, library: ArrayLibrary = NUMPY) -> CheckpointContent:
    """Like `read_checkpoint`, but parameters, optimiser state and gradients are lazy, and no checksum is verified.

    Raises:
        UserError: A file is damaged.
    """
    arrays: dict[str, Any] = {}
    for top, file in (*SHARDED.items(), ("", REST)):
        for name, array in _opened(folder, sorted(folder.glob(f"{file}*.safetensors")), library).items():
            path = f"{top}/{name}".lstrip("/")
            arrays[path] = array if array.ndim and path.startswith(LARGE) else library.read(array)
    return read_tree(folder, arrays)


def _opened(folder: Path, files: list[Path], library: ArrayLibrary) -> dict[str, LazyArray]:
    """Return the arrays whose shards are in `files`, placed by their offsets or else along the first dimension."""
    shapes: dict[str, tuple[int, ...]] = {}
    shards: dict[str, list[tuple[tuple[int, ...], LazyArray]]] = {}
    for file in files:
        told = pieces_in(file)
        for key, array in library.open(file).items():
            if told is not None:
                name, shape, begin = told[key]
            elif array.ndim:  # a shard without offset: follows those of the files before
                first = shapes[key][0] if key in shapes else 0
                name, shape, begin = key, (first + array.shape[0], *array.shape[1:]), (first, *[0] * (array.ndim - 1))
            else:
                name, shape, begin = key, (), ()
            shapes[name] = shape
            shards.setdefault(name, []).append((begin, array))
    for name, parts in shards.items():
        check_filled(folder, name, sum(array.size for _, array in parts), shapes[name])
    return {name: lazy_array.joined(shapes[name], parts) for name, parts in shards.items()}


class BackgroundWriter:
    """Write checkpoints in a thread, one at a time, while training goes on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, folder: Path, content: CheckpointContent, then: Callable[[], None] = lambda: None,
             writer_rank: WriterRank | None = None, barrier: Callable[[], None] = lambda: None,
             library: ArrayLibrary = NUMPY) -> None:
        """Start writing `content` once the checkpoint before it is done. Its arrays must not be modified afterwards.

        Args:
            then: Called by the first process when the checkpoint is complete.
            writer_rank: If several processes write it together and all call this: the rank of this one among them.
            barrier: Waits for all of them, in the calling thread.

        Raises:
            Exception: The error of the checkpoint before.
        """
        self.wait()
        if writer_rank is not None:
            if writer_rank.rank == 0:
                # The folder must be empty before any process writes into it, hence the barrier.
                begin_folder(folder)
            barrier()
        self._writing = self._thread.submit(self._write, folder, content, then, writer_rank, library)

    @staticmethod
    def _write(folder: Path, content: CheckpointContent, then: Callable[[], None], writer_rank: WriterRank | None,
               library: ArrayLibrary) -> None:
        if writer_rank is None:
            write_checkpoint(folder, content, library)
        else:
            write_shards(folder, content, writer_rank, place_of, library)
        if writer_rank is None or writer_rank.rank == 0:
            then()

    def wait(self) -> None:
        """Wait until nothing is being written any more, and raise the writer's error if there was one."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def check(self) -> None:
        """Raise the writer's error if it has failed by now. Does not wait."""
        if self._writing is not None and self._writing.done():
            self.wait()
