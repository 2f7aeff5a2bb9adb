"""What checkpoints need of the arrays of an engine."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from lmmods.core import lazy_array
from lmmods.core.lazy_array import LazyArray


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
