"""Checkpoints on disk, the same for both engines: their content, saving, and reading them to resume.

    model.safetensors       trainable parameters, by torch's names
    optimizer.safetensors   optimiser state; parameters are numbered as in torch's optimisers
    state.safetensors       other arrays
    state.json              everything else, with references to the arrays
    manifest.json           size and checksum of each file

No file is pickled. If several processes write, each writes its own files, without communication:

    model-00003-of-00008.safetensors    shards of process 3 of 8; the metadata give their offsets in each array

In older checkpoints the shards have no offsets and are concatenated along the first dimension. The folder gets its
final name only when all of it is on disk. `checkpoint_policy` decides which checkpoints of a run are kept.
"""

import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from lmmods.core import lazy_array
from lmmods.core.errors import UserError
from lmmods.core.files import disk_problem, read_text
from lmmods.core.fingerprints import first_damaged, stamps
from lmmods.core.lazy_array import LazyArray
from lmmods.runs.folder import checkpoint_names
from lmmods.runs.run_files import MANIFEST, PLAIN, commit_folder, fresh_folder, write_json

# Files of the arrays by the first key of their paths; all others are in REST.
SHARDED = {"state_dict": "model", "optimizer_states": "optimizer"}
REST = "state"
# Path prefixes of arrays that are read lazily. Earlier versions wrote gradients of unfinished steps.
LARGE = ("state_dict/", "optimizer_states/", "window/gradients/")
SHARDS_KEY = "pieces"  # in the metadata of a file: JSON of {name in the file: [name, shape, offset]}
POLL_SECONDS = 0.05
SMALL = 2**20  # bytes; smaller arrays are not divided among the processes that hold a copy

# ---------------------------------------------------------------------------------------------------------------------
# Content: a tree of plain data and arrays from which a run resumes exactly. Both engines use the layout of Lightning's
# checkpoints, so that a run can change engine.

class CheckpointContent(TypedDict, total=False):
    """The keys of a checkpoint.

    The state of the training data is under the DataModule's class name. Each engine adds keys: `engine` on JAX,
    `pytorch-lightning_version` and Lightning's own keys on torch.

    Args:
        global_step: Optimiser steps done.
        progress: Epochs and steps done (lmmods.runs.progress).
        state_dict: Trainable parameters, by the names of the torch engine.
        param_names: Names of the parameters, in the order of their indices in `optimizer_states`.
        optimizer_states: One state in the form of torch's optimisers: `state` by parameter index, `param_groups`.
        lr_schedulers: One state of torch's LambdaLR.
        callbacks: `Metrics` (lmmods.runs.step_metrics), `Checkpoint` (lmmods.runs.checkpoint_policy), and other
            callbacks' state under their keys.
        world_size: Number of data-parallel ranks.
    """

    global_step: int
    epoch: int
    progress: dict[str, Any]
    state_dict: dict[str, Any]
    param_names: list[str]
    optimizer_states: list[dict[str, Any]]
    lr_schedulers: list[dict[str, Any]]
    callbacks: dict[str, dict[str, Any]]
    world_size: int
    identity: dict[str, Any]


# ---------------------------------------------------------------------------------------------------------------------
# Arrays: the operations that an engine provides, and shards of arrays that several processes hold.

@dataclass(frozen=True)
class ArrayLibrary:
    """Operations on one kind of array.

    Args:
        is_array: Returns True if a node of a tree is such an array.
        save: Write arrays by name as a safetensors file with these metadata.
        load: Inverse of `save`.
        concatenate: Join arrays along their first dimension.
        empty: Allocate an array of the type of the first argument, with the shape of the second.
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
                     lambda file: lazy_array.lazy_file(file), np.asarray)


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
        """Return the shards of entry `index` along the first dimension, from those that contain it."""
        return Shards(self.shape[1:], tuple((begin[1:], array[index - begin[0]]) for begin, array in self.parts
                                            if begin[0] <= index < begin[0] + len(array)))


def slice_for_process(begin: tuple[int, ...], array: Any, index: int, count: int
                     ) -> tuple[tuple[tuple[int, ...], np.ndarray], ...]:
    """Return a copy of the rows of a shard that process `index` writes, of the `count` processes that hold the shard.

    The result is empty if another process writes the whole shard.

    Args:
        begin: Offset of the shard.
        array: Its values, with `shape`, `nbytes` and slices.
    """
    # A shard that is too small to divide, or has fewer rows than processes, is written by the first one.
    if count == 1 or not array.ndim or array.nbytes < SMALL or array.shape[0] < count:
        return ((begin, np.array(array)),) if index == 0 else ()
    first, last = (len(array) * rank // count for rank in (index, index + 1))
    return (((begin[0] + first, *begin[1:]), np.array(array[first:last])),)


@dataclass(frozen=True)
class WriterRank:
    """Rank of this process among the `size` processes that write a checkpoint together."""

    rank: int
    size: int

    def file(self, group: str, rank: int | None = None) -> str:
        return f"{group}-{self.rank if rank is None else rank:05d}-of-{self.size:05d}.safetensors"


# ---------------------------------------------------------------------------------------------------------------------
# Save: in the background of training, by one process or by all together.

class BackgroundWriter:
    """Thread that writes checkpoints, one at a time, while training goes on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, folder: Path, content: CheckpointContent, then: Callable[[], None] = lambda: None,
             writer_rank: WriterRank | None = None, barrier: Callable[[], None] = lambda: None,
             library: ArrayLibrary = NUMPY) -> None:
        """Start writing `content` once the checkpoint before it is done. Its arrays must not be modified afterwards.

        Args:
            then: Called by the first process when the checkpoint is complete.
            writer_rank: Rank of this process if several processes write the checkpoint; all of them then call this.
            barrier: Waits for all of these processes, in the calling thread.

        Raises:
            Exception: Writing the previous checkpoint failed.
        """
        self.wait()
        if writer_rank is not None:
            if writer_rank.rank == 0:
                # The barrier below keeps other processes from writing before the folder is empty.
                create_folder(folder)
            barrier()
        self._writing = self._thread.submit(self._write, folder, content, then, writer_rank, library)

    @staticmethod
    def _write(folder: Path, content: CheckpointContent, then: Callable[[], None], writer_rank: WriterRank | None,
               library: ArrayLibrary) -> None:
        if writer_rank is None:
            write_checkpoint(folder, content, library)
        else:
            write_shards(folder, content, writer_rank, library)
        if writer_rank is None or writer_rank.rank == 0:
            then()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises the writer's error, if any."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def check(self) -> None:
        """Raise the writer's error if writing has failed by now. Does not wait."""
        if self._writing is not None and self._writing.done():
            self.wait()


def write_checkpoint(folder: Path, content: CheckpointContent, library: ArrayLibrary = NUMPY) -> None:
    """Write a tree of plain data and arrays. Raises UserError: the disk failed.

    Args:
        folder: Existing content is replaced.
    """
    temporary = _temporary(folder)
    tree, arrays = split(content, library.is_array, library.memory_of)
    by_file: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        file, key = locate_array(name)
        by_file.setdefault(file, {})[key] = array
    with saving(folder, temporary, sum(array.nbytes for array in arrays.values())):
        fresh_folder(temporary)
        for file, stored in by_file.items():
            library.save(stored, temporary / f"{file}.safetensors", {})
        write_json(temporary / PLAIN, tree)
        # The manifest needs all other files, and the final name comes last: a folder that has it is complete.
        write_manifest(temporary)
        commit_folder(temporary, folder)


def create_folder(folder: Path) -> None:
    """Create an empty temporary folder for a checkpoint. The first process does so before any other one writes."""
    fresh_folder(_temporary(folder))


def write_shards(folder: Path, content: CheckpointContent, writer_rank: WriterRank,
                 library: ArrayLibrary = NUMPY) -> None:
    """Write this process's shards; the first process also completes the checkpoint when all others have written theirs.

    Args:
        content: The same tree in all processes, with `Shards` of this process. Other arrays are equal in all processes,
            and the first one writes them.

    Raises:
        UserError: The disk failed, here or for another process.
    """
    temporary = _temporary(folder)
    tree, arrays = split_shards(content, library)
    files: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for path, array in arrays.items():
        group, name = locate_array(path)
        stored, offsets = files.setdefault(group, ({}, {}))
        if not isinstance(array, Shards):
            array = Shards(array.shape, (((0,) * array.ndim, array),) if writer_rank.rank == 0 else ())
        for index, (begin, values) in enumerate(array.parts):
            # A process may hold several shards of one array, but a file needs distinct names.
            key = f"{name}|{index}"
            stored[key] = values
            offsets[key] = [name, list(array.shape), list(begin)]
    with saving(folder, temporary, sum(array.nbytes for array in arrays.values()), is_shard=True):
        for group, (stored, offsets) in files.items():
            # Rename when complete: for the first process, a file is complete once it has its final name.
            hidden = temporary / f".{writer_rank.file(group)}"
            library.save(stored, hidden, {SHARDS_KEY: json.dumps(offsets)})
            os.replace(hidden, temporary / writer_rank.file(group))
        if writer_rank.rank == 0:
            awaited = {writer_rank.file(group, rank) for group in files for rank in range(writer_rank.size)}
            # Polled, as a collective operation would interfere with those of training. If another process fails, it
            # renames the folder, and `iterdir` raises.
            while not awaited <= {path.name for path in temporary.iterdir()}:
                time.sleep(POLL_SECONDS)
            write_json(temporary / PLAIN, tree)
            write_manifest(temporary)
            commit_folder(temporary, folder)


def split_shards(content: CheckpointContent, library: ArrayLibrary) -> tuple[Any, dict[str, Any]]:
    """Like `split`, for a tree whose arrays may be `Shards`."""
    return split(content, lambda node: isinstance(node, Shards) or library.is_array(node),
                 lambda node: id(node) if isinstance(node, Shards) else library.memory_of(node))


def split(tree: object, is_array: Callable[[Any], bool],
          memory_of: Callable[[Any], Hashable] = id) -> tuple[Any, dict[str, Any]]:
    """Separate the arrays from a tree. An array that occurs several times is stored once, under its first path.

    Args:
        is_array: Returns True if a node is an array.
        memory_of: Returns a key that is equal for arrays with the same memory, shape and strides.

    Returns:
        The tree as JSON data, and the arrays by their path in it.

    Raises:
        TypeError: A node is neither plain data nor an array.
    """
    arrays: dict[str, Any] = {}
    paths: dict[Hashable, str] = {}

    def walk(node: Any, path: str) -> Any:
        if is_array(node):
            # Tensors that share memory are one array in the file, and shared again after `join`.
            path = paths.setdefault(memory_of(node), path)
            arrays.setdefault(path, node)
            return {"$array": path}
        if isinstance(node, dict):
            # Keys that JSON does not support, or that look like the markers below, are stored as pairs.
            if all(isinstance(key, str) and not key.startswith("$") for key in node):
                return {key: walk(value, f"{path}/{key}".lstrip("/")) for key, value in node.items()}
            return {"$items": [[walk(key, path), walk(value, f"{path}/{key}".lstrip("/"))]
                               for key, value in node.items()]}
        if isinstance(node, (list, tuple)):
            items = [walk(value, f"{path}/{i}".lstrip("/")) for i, value in enumerate(node)]
            return {"$tuple": items} if isinstance(node, tuple) else items
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        raise TypeError(f"{path or 'the tree'} contains a {type(node).__name__}, which a checkpoint cannot store")

    return walk(tree, ""), arrays


def locate_array(path: str) -> tuple[str, str]:
    """Map an array's path in the tree to its file, without suffix, and its name in that file."""
    top, _, rest = path.partition("/")
    return (SHARDED[top], rest) if top in SHARDED else (REST, path)


def _temporary(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}")


def write_manifest(folder: Path) -> None:
    """Write size and CRC-32 of each file, so that damage is found before anything is restored."""
    write_json(folder / MANIFEST, stamps(sorted(folder.iterdir())))


@contextmanager
def saving(checkpoint: Path, temporary: Path, num_bytes: int, is_shard: bool = False) -> Iterator[None]:
    """Wrap the writing of a checkpoint: if the disk fails, delete the partial files and report it.

    Args:
        temporary: Its path until it is complete.
        num_bytes: Size of its arrays.
        is_shard: True if other processes write into the same folder.

    Raises:
        UserError: The disk failed, here or for another process. Earlier checkpoints are untouched.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = disk_problem(error)
        # The disk works here, but the process whose disk failed has renamed the folder.
        if is_shard and reason is None and not temporary.exists():
            raise UserError(f"{checkpoint} could not be saved: another process failed to write its part. See the error "
                            "of that process.") from error
        _discard(temporary)
        if reason is None:
            raise
        earlier = checkpoint_names(checkpoint.parent)
        free = shutil.disk_usage(checkpoint.parent).free if checkpoint.parent.is_dir() else 0
        advice = (f"Free some space, then resume from the checkpoint before it, {earlier[-1]}, with --ckpt_path last."
                  if earlier else "There is no earlier checkpoint: free some space, then start again with --overwrite "
                  "true.")
        raise UserError(f"{checkpoint} could not be saved: {reason}. It takes {num_bytes / 2**20:,.1f} MiB, and "
                        f"{free / 2**20:,.1f} MiB are free there. {advice}") from error


def _discard(folder: Path) -> None:
    """Delete a folder that other processes write into, renamed first so that they never see it half deleted."""
    dropped = folder.with_name(f"{folder.name}-dropped")  # a name that `remove_unfinished` cleans up
    with suppress(OSError):
        os.replace(folder, dropped)
    shutil.rmtree(dropped, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------------------
# Resume: check the files, then read plain data and arrays, whole or lazily.

def read_plain(folder: Path) -> dict[str, Any]:
    """Return state.json of a run's checkpoint: its content without arrays.

    Raises:
        UserError: It cannot be read, or lacks a key that both engines need to resume.
    """
    check_manifest(folder, PLAIN)
    try:
        plain = json.loads(read_text(folder / PLAIN))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"Checkpoint {folder} is damaged: {PLAIN} cannot be read. Resume from another one.") from error
    _check_object(folder, plain)
    if missing := find_missing_key(plain):
        key, type_name = missing
        raise UserError(f"Checkpoint {folder} is damaged: in {PLAIN}, {key} is missing or not {type_name}. Resume from "
                        "another one.")
    return plain


def check_manifest(folder: Path, *names: str, share: tuple[int, int] = (0, 1)) -> None:
    """Raise UserError if a file in `names`, or by default any file, is missing, truncated, altered or not listed.

    Args:
        share: (index, count): check only every `count`-th file, beginning with file `index`.
    """
    try:
        manifest = json.loads(read_text(folder / MANIFEST))
        # Every file that will be read must be listed, or damage to it would go unnoticed.
        needed = {PLAIN, *(path.name for path in folder.glob("*.safetensors"))}
        unlisted = sorted(needed - set(manifest)) if isinstance(manifest, dict) else [PLAIN]
        checked = [] if unlisted else names or sorted(manifest)[share[0]::share[1]]
        damaged = first_damaged(folder, {name: manifest[name] for name in checked}) if checked else None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"Checkpoint {folder} is damaged: {MANIFEST} cannot be read. Resume from another one."
                        ) from error
    if unlisted:
        raise UserError(f"Checkpoint {folder} is damaged: {MANIFEST} does not list {unlisted[0]}. Resume from another "
                        "one.")
    if damaged is not None:
        raise UserError(f"Checkpoint {folder} is damaged: {damaged} has changed since it was written. Resume from "
                        f"another one, for example --ckpt_path {folder.parent}/step=N.")


def read_checkpoint(folder: Path, library: ArrayLibrary = NUMPY) -> CheckpointContent:
    """Inverse of `write_checkpoint`, for any engine and number of writing processes.

    Raises:
        UserError: A file is damaged.
    """
    check_manifest(folder)
    return cast(CheckpointContent, read_tree(folder, read_arrays(folder, library)))


def open_checkpoint(folder: Path, library: ArrayLibrary = NUMPY) -> CheckpointContent:
    """Like `read_checkpoint`, but parameters and optimiser state are lazy, and no checksum is verified.

    Raises:
        UserError: A file is damaged.
    """
    arrays: dict[str, Any] = {}
    for top, file in (*SHARDED.items(), ("", REST)):
        for name, array in _open_arrays(folder, sorted(folder.glob(f"{file}*.safetensors")), library).items():
            path = f"{top}/{name}".lstrip("/")
            arrays[path] = array if array.ndim and path.startswith(LARGE) else library.read(array)
    return cast(CheckpointContent, read_tree(folder, arrays))


def _open_arrays(folder: Path, files: list[Path], library: ArrayLibrary) -> dict[str, LazyArray]:
    """Return the arrays in `files`, their shards joined by offset, or in older files along the first dimension."""
    shapes: dict[str, tuple[int, ...]] = {}
    shards: dict[str, list[tuple[tuple[int, ...], LazyArray]]] = {}
    # `files` are sorted by rank: shards without offsets are joined in this order.
    for file in files:
        offsets = read_offsets(file)
        for key, array in library.open(file).items():
            if offsets is not None:
                name, shape, begin = offsets[key]
            elif array.ndim:  # without offset: follows the shards of earlier files
                num_rows = shapes[key][0] if key in shapes else 0
                name, shape = key, (num_rows + array.shape[0], *array.shape[1:])
                begin = (num_rows, *[0] * (array.ndim - 1))
            else:
                name, shape, begin = key, (), ()
            shapes[name] = shape
            shards.setdefault(name, []).append((begin, array))
    for name, parts in shards.items():
        check_complete(folder, name, sum(array.size for _, array in parts), shapes[name])
    return {name: lazy_array.assemble_shards(shapes[name], parts) for name, parts in shards.items()}


def read_arrays(folder: Path, library: ArrayLibrary = NUMPY) -> dict[str, Any]:
    """Return the whole arrays of a checkpoint, assembled from all shards, by their paths in its tree."""
    arrays: dict[str, Any] = {}
    for top, file in (*SHARDED.items(), ("", REST)):
        files = sorted(folder.glob(f"{file}*.safetensors"))
        if files and read_offsets(files[0]) is not None:
            assembled = assemble(files, library.load, library.empty)
            arrays |= {f"{top}/{name}".lstrip("/"): array for name, array in assembled.items()}
            continue
        shards = [library.load(path) for path in files]
        for name, array in shards[0].items() if shards else ():
            # Scalars are equal in all files.
            whole = library.concatenate([shard[name] for shard in shards]) if len(shards) > 1 and array.ndim else array
            arrays[f"{top}/{name}".lstrip("/")] = whole
    return arrays


def assemble(files: list[Path], load: Callable[[Path], dict[str, Any]], empty: Callable[[Any, tuple], Any]
             ) -> dict[str, Any]:
    """Assemble arrays from their shards in `files`, loading one file at a time.

    Args:
        empty: Allocates an array of the type of the first argument, with the shape of the second.

    Raises:
        UserError: Some shards are missing.
    """
    whole: dict[str, Any] = {}
    filled: Counter[str] = Counter()
    for file in files:
        arrays = load(file)
        for key, (name, shape, begin) in (read_offsets(file) or {}).items():
            part = arrays.pop(key)  # removed, so that its memory can be freed
            if name not in whole:
                whole[name] = empty(part, shape)
            whole[name][tuple(slice(start, start + size) for start, size in zip(begin, part.shape, strict=True))] = part
            filled[name] += math.prod(part.shape)
    for name, array in whole.items():
        check_complete(files[0].parent, name, filled[name], array.shape)
    return whole


def read_offsets(file: Path) -> dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] | None:
    """Return (array name, array shape, offset) of each shard in a file, by the shard's name in it.

    None if the file's shards have no offsets.
    """
    with safe_open(file, framework="np") as opened:
        offsets = (opened.metadata() or {}).get(SHARDS_KEY)
    if offsets is None:
        return None
    return {key: (name, tuple(shape), tuple(begin)) for key, (name, shape, begin) in json.loads(offsets).items()}


def check_complete(folder: Path, name: str, num_values: int, shape: tuple[int, ...]) -> None:
    """Raise UserError unless shards with `num_values` values in total make up an array of this shape."""
    if num_values != math.prod(shape):
        raise UserError(f"Checkpoint {folder} is damaged: parts of {name} are missing. Resume from another one.")


def read_tree(folder: Path, arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the tree in state.json, with its arrays.

    Raises:
        UserError: It is not such a tree, or refers to a missing array.
    """
    try:
        tree = join(json.loads(read_text(folder / PLAIN)), arrays)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"Checkpoint {folder} is damaged: {PLAIN} does not fit its arrays ({error}). Resume from "
                        "another one.") from error
    _check_object(folder, tree)
    return tree


def join(tree: Any, arrays: dict[str, Any]) -> Any:
    """Inverse of `split`."""
    if isinstance(tree, list):
        return [join(value, arrays) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if "$array" in tree:
        return arrays[tree["$array"]]
    if "$items" in tree:
        return {join(key, arrays): join(value, arrays) for key, value in tree["$items"]}
    if "$tuple" in tree:
        return tuple(join(value, arrays) for value in tree["$tuple"])
    return {key: join(value, arrays) for key, value in tree.items()}


def _check_object(folder: Path, tree: object) -> None:
    if not isinstance(tree, dict):
        raise UserError(f"Checkpoint {folder} is damaged: {PLAIN} contains a {type(tree).__name__}. Resume from "
                        "another one.")


_TYPE_NAMES = {dict: "an object", list: "a list", int: "an integer"}
# Keys that checkpoints of all versions have; older ones lack some of the other keys.
_REQUIRED = {
    "state_dict": dict, "optimizer_states": list, "lr_schedulers": list, "global_step": int, "epoch": int,
    "callbacks|Metrics|num_tokens": int, "callbacks|Metrics|num_rows": int, "callbacks|Metrics|latest": dict,
    "callbacks|Checkpoint|best": list,
}
_REQUIRED_NOW = {"progress|epoch": int, "progress|epoch_step": int, "progress|step": int}
_REQUIRED_BEFORE = {  # of earlier versions, see `update_checkpoint`
    "loops|fit_loop|epoch_progress|current": dict, "loops|fit_loop|epoch_loop.batch_progress|current": dict}


def find_missing_key(content: dict[str, Any]) -> tuple[str, str] | None:
    """Return the first required key that is missing, and the type it must have; None if all are present."""
    for path, cls in (_REQUIRED | (_REQUIRED_BEFORE if "loops" in content else _REQUIRED_NOW)).items():
        value: Any = content
        for key in path.split("|"):
            value = value.get(key) if isinstance(value, dict) else None
        # bool is a subclass of int.
        if not isinstance(value, cls) or isinstance(value, bool):
            return path.replace("|", "."), _TYPE_NAMES[cls]
    return None
