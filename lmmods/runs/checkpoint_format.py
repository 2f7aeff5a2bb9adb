"""A tree of dicts, lists, numbers and arrays as JSON plus safetensors: readable, engine-neutral, no pickle."""

import json
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypedDict

from lmmods.core.errors import UserError
from lmmods.core.files import read_text
from lmmods.core.fingerprints import first_damaged, stamps
from lmmods.runs.atomic import write_json
from lmmods.runs.checkpoint_files import MANIFEST, PLAIN


def split(tree: Any, is_array: Callable[[Any], bool],
          memory_of: Callable[[Any], Hashable] = id) -> tuple[Any, dict[str, Any]]:
    """Separate the arrays from a tree. An array that occurs several times is stored once, under its first path.

    Args:
        is_array: Returns True if a node is an array.
        memory_of: Returns a key that is equal for arrays with the same memory, shape and strides.

    Returns:
        The tree as JSON can hold it, and the arrays by their path in it.

    Raises:
        TypeError: Something in the tree is neither plain data nor an array.
    """
    arrays: dict[str, Any] = {}
    paths: dict[Hashable, str] = {}

    def walk(node: Any, path: str) -> Any:
        if is_array(node):
            path = paths.setdefault(memory_of(node), path)
            arrays.setdefault(path, node)
            return {"$array": path}
        if isinstance(node, dict):
            if all(isinstance(key, str) and not key.startswith("$") for key in node):
                return {key: walk(value, f"{path}/{key}".lstrip("/")) for key, value in node.items()}
            return {"$items": [[walk(key, path), walk(value, f"{path}/{key}".lstrip("/"))]
                               for key, value in node.items()]}
        if isinstance(node, (list, tuple)):
            items = [walk(value, f"{path}/{i}".lstrip("/")) for i, value in enumerate(node)]
            return {"$tuple": items} if isinstance(node, tuple) else items
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        raise TypeError(f"{path or 'the tree'} holds a {type(node).__name__}, which a checkpoint cannot store")

    return walk(tree, ""), arrays


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


def write_manifest(folder: Path) -> None:
    """Write size and CRC-32 of each file, so that damage is found before anything is restored."""
    write_json(folder / MANIFEST, stamps(sorted(folder.iterdir())))


def check_manifest(folder: Path, *names: str, share: tuple[int, int] = (0, 1)) -> None:
    """Raise UserError if a file in `names`, or by default any file, is missing, truncated, altered or not listed.

    Args:
        share: (index, count): check only part `index` of `count` of the folder's files.
    """
    try:
        manifest = json.loads(read_text(folder / MANIFEST))
        read = {PLAIN, *(path.name for path in folder.glob("*.safetensors"))}
        unlisted = sorted(read - set(manifest)) if isinstance(manifest, dict) else [PLAIN]
        own = [] if unlisted else names or sorted(manifest)[share[0]::share[1]]
        damaged = first_damaged(folder, {name: manifest[name] for name in own}) if own else None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"Checkpoint {folder} is damaged: {MANIFEST} cannot be read. Resume from another one."
                        ) from error
    if unlisted:
        raise UserError(f"Checkpoint {folder} is damaged: {MANIFEST} does not list {unlisted[0]}. Resume from another "
                        "one.")
    if damaged is not None:
        raise UserError(f"Checkpoint {folder} is damaged: {damaged} is not as it was written. Resume from another "
                        f"one, for example --ckpt_path {folder.parent}/step=N.")


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
    if missing := missing_key(plain):
        key, kind = missing
        raise UserError(f"Checkpoint {folder} is damaged: {PLAIN} holds no {key} that is {kind}. Resume from another "
                        "one.")
    return plain


def read_tree(folder: Path, arrays: dict[str, Any]) -> dict[str, Any]:
    """Return state.json of a folder with its arrays put back.

    Raises:
        UserError: It is not such a tree, or refers to an array that is missing.
    """
    try:
        tree = join(json.loads(read_text(folder / PLAIN)), arrays)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"Checkpoint {folder} is damaged: {PLAIN} does not fit its arrays ({error}). Resume from "
                        "another one.") from error
    _check_object(folder, tree)
    return tree


def _check_object(folder: Path, tree: Any) -> None:
    if not isinstance(tree, dict):
        raise UserError(f"Checkpoint {folder} is damaged: {PLAIN} holds a {type(tree).__name__}. Resume from another "
                        "one.")


# ---------------------------------------------------------------------------------------------------------------------
# Content of a checkpoint, for both engines: all that a run needs to resume exactly, as a tree of plain data and arrays.
#
# The tree has the layout of Lightning's checkpoints, so that a run can change engine.

class AccumulatedGradients(TypedDict):
    """Accumulated micro-batches of an incomplete optimiser step; key `window` of a checkpoint.

    Args:
        sums: [4 + 2 M] float64: summed loss, weight, real tokens and rows, over all processes and devices, then for
            each of the task's M metrics its summed values and their weight.
        num_batches: Micro-batches of each data-parallel rank.
        divisor: Divisor applied to the gradients so far.
        gradients: Summed over all ranks, by the names of `state_dict`.
    """

    sums: Any
    num_batches: int
    divisor: float
    gradients: dict[str, Any]


class CheckpointContent(TypedDict, total=False):
    """The keys of a checkpoint.

    Further keys are the state of the training data, under the DataModule's class name, and those of one engine:
    `engine` on JAX, `pytorch-lightning_version` and Lightning's own keys on torch.

    Args:
        global_step: Optimiser steps done.
        loops: Micro-batches, steps and epochs done, counted as by Lightning's loops (lmmods.runs.progress).
        state_dict: Trainable parameters, by the names of the torch engine.
        param_names: Order of the parameters, which numbers them in `optimizer_states`.
        optimizer_states: One state in the form of torch's optimisers: `state` by number, `param_groups`.
        lr_schedulers: One state of torch's LambdaLR.
        callbacks: `Metrics` (lmmods.runs.step_metrics), `Checkpoint` (lmmods.runs.checkpoint_policy), and other
            callbacks' state under their keys.
        window: Gradients of an incomplete optimiser step; empty between two steps.
        world_size: Number of data-parallel ranks; `loops` counts micro-batches of all of them together.
    """

    global_step: int
    epoch: int
    loops: dict[str, Any]
    state_dict: dict[str, Any]
    param_names: list[str]
    optimizer_states: list[dict[str, Any]]
    lr_schedulers: list[dict[str, Any]]
    callbacks: dict[str, dict[str, Any]]
    window: AccumulatedGradients | dict[str, Any]
    world_size: int
    identity: dict[str, Any]


_KINDS = {dict: "an object", list: "a list", int: "a whole number"}
# Keys required in checkpoints of all versions; older ones lack some others.
_REQUIRED = {
    "state_dict": dict, "optimizer_states": list, "lr_schedulers": list, "global_step": int, "epoch": int,
    "callbacks|Metrics|num_tokens": int, "callbacks|Metrics|num_rows": int, "callbacks|Metrics|latest": dict,
    "callbacks|Checkpoint|best": list, "window": dict,
    "loops|fit_loop|epoch_progress": dict, "loops|fit_loop|epoch_loop.batch_progress|current": dict,
}


def missing_key(content: dict[str, Any]) -> tuple[str, str] | None:
    """Return the first required key that is missing, and the type it must have; None if all are present."""
    for path, kind in _REQUIRED.items():
        value: Any = content
        for key in path.split("|"):
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool):
            return path.replace("|", "."), _KINDS[kind]
    return None
