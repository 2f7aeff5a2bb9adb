"""Conversion between files that store each expert's matrices separately and the network's stacked leaves."""

import re
from collections.abc import Iterator

import numpy as np

from jax_engine.models.architecture import ExpertFiles, Family
from lmmods.core.lazy_array import LazyArray, size_of

# Module name, expert index, matrix name.
_FILE_KEY = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight$")
_STACKED_NAME = re.compile(r"^(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")
Part = tuple[int, int, int]  # expert; number of parts of its matrix, by rows; index of the part


def find_leaf(family: Family, key: str) -> tuple[str, Part | None]:
    """Return the network's name of the leaf that a file's key belongs to, and its part; None is the whole leaf."""
    files = family.expert_files
    if files is None:
        return key, None
    key = key.replace(f".{files.mlp}.", ".mlp.")
    match = _FILE_KEY.match(key)
    matrices = {files.gate: ("gate_up_proj", 2, 0), files.up: ("gate_up_proj", 2, 1), files.down: ("down_proj", 1, 0)}
    if match is None or match[3] not in matrices:
        return key, None
    leaf, count, index = matrices[match[3]]
    return f"{match[1]}.{leaf}", (int(match[2]), count, index)


def select_part(leaf: np.ndarray, part: Part) -> np.ndarray:
    """Return a part of a stacked leaf [E, ...], as a view."""
    expert, count, index = part
    size = leaf.shape[1] // count
    return leaf[expert, index * size:(index + 1) * size]


def list_parts(leaf_name: str, num_experts: int) -> set[Part]:
    """Return all parts of a stacked leaf in files."""
    count = 2 if leaf_name.endswith("gate_up_proj") else 1
    return {(expert, count, index) for expert in range(num_experts) for index in range(count)}


def stack_experts(parts: dict[Part, LazyArray], shape: tuple[int, ...], dtype: np.dtype) -> LazyArray:
    """Assemble a stacked leaf [E, ...] from all its parts, lazily."""
    def read(part: tuple[slice, ...]) -> np.ndarray:
        experts, rows, *rest = part
        values = np.empty(size_of(part), dtype)
        for (expert, count, index), source in parts.items():
            start = index * shape[1] // count
            first, last = max(rows.start, start), min(rows.stop, start + shape[1] // count)
            if experts.start <= expert < experts.stop and first < last:
                values[expert - experts.start, first - rows.start:last - rows.start] = source[
                    slice(first - start, last - start), *rest]
        return values

    return LazyArray(shape, dtype, read)


def split_experts(family: Family, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convert tensors by the network's names to a file's: the inverse of `find_leaf` and `stack_experts`."""
    if family.expert_files is None:
        return tensors
    return dict(pair for name, value in tensors.items() for pair in _split_leaf(family.expert_files, name, value))


def _split_leaf(files: ExpertFiles, name: str, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    match = _STACKED_NAME.match(name)
    if match is None:
        yield name.replace(".mlp.", f".{files.mlp}."), value
        return
    module, names = match[1].replace(".mlp.", f".{files.mlp}."), (files.down,)
    if match[2] == "gate_up_proj":
        names = (files.gate, files.up)
    for index, matrix in enumerate(names):
        for expert in range(len(value)):
            yield f"{module}.{expert}.{matrix}.weight", select_part(value, (expert, len(names), index))
