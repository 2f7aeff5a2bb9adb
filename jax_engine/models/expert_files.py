"""Conversion between files that store each expert's matrices separately and the network's stacked leaves."""

import re
from collections.abc import Iterator

import numpy as np

from jax_engine.models.architecture import ExpertFiles, Family
from lmmods.core.lazy_array import LazyArray, size_of

# Name of the module; number of the expert; its matrix.
_ONE = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight$")
_ALL = re.compile(r"^(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")
Part = tuple[int, int, int]  # expert; number of pieces of its matrix, by rows; index of the piece


def whole(family: Family, key: str) -> tuple[str, Part | None]:
    """Return the network's name of the leaf that a file's key belongs to, and the part it is; None: the whole leaf."""
    files = family.expert_files
    if files is None:
        return key, None
    key = key.replace(f".{files.mlp}.", ".mlp.")
    found = _ONE.match(key)
    pieces = {files.gate: ("gate_up_proj", 2, 0), files.up: ("gate_up_proj", 2, 1), files.down: ("down_proj", 1, 0)}
    if found is None or found[3] not in pieces:
        return key, None
    leaf, count, place = pieces[found[3]]
    return f"{found[1]}.{leaf}", (int(found[2]), count, place)


def part_of(leaf: np.ndarray, part: Part) -> np.ndarray:
    """Return a part of a stacked leaf [E, ...], as a view."""
    expert, count, place = part
    size = leaf.shape[1] // count
    return leaf[expert, place * size:(place + 1) * size]


def parts(leaf_name: str, num_experts: int) -> set[Part]:
    """Return all parts of a stacked leaf that files hold."""
    count = 2 if leaf_name.endswith("gate_up_proj") else 1
    return {(expert, count, place) for expert in range(num_experts) for place in range(count)}


def stack_experts(found: dict[Part, LazyArray], shape: tuple[int, ...], dtype: np.dtype) -> LazyArray:
    """Assemble a stacked leaf [E, ...] from all its parts, lazily."""
    def read(part: tuple[slice, ...]) -> np.ndarray:
        experts, rows, *rest = part
        whole = np.empty(size_of(part), dtype)
        for (expert, count, place), source in found.items():
            begin = place * shape[1] // count
            first, last = max(rows.start, begin), min(rows.stop, begin + shape[1] // count)
            if experts.start <= expert < experts.stop and first < last:
                whole[expert - experts.start, first - rows.start:last - rows.start] = source[
                    slice(first - begin, last - begin), *rest]
        return whole

    return LazyArray(shape, dtype, read)


def split_experts(family: Family, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convert tensors by the network's names to those of a file: the inverse of `whole` and `joined`."""
    if family.expert_files is None:
        return tensors
    return dict(pair for name, value in tensors.items() for pair in _pieces(family.expert_files, name, value))


def _pieces(files: ExpertFiles, name: str, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    found = _ALL.match(name)
    if found is None:
        yield name.replace(".mlp.", f".{files.mlp}."), value
        return
    module, names = found[1].replace(".mlp.", f".{files.mlp}."), (files.down,)
    if found[2] == "gate_up_proj":
        names = (files.gate, files.up)
    for place, piece in enumerate(names):
        for expert in range(len(value)):
            yield f"{module}.{expert}.{piece}.weight", part_of(value, (expert, len(names), place))
