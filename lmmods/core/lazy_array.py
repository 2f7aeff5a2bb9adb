"""Lazy arrays: shape and dtype are known, values are read part by part on demand."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

Part = tuple[slice, ...]  # a slice for each dimension, without steps


class LazyArray:
    """An array that is read in parts, on every access.

    Args:
        read: Returns a part; its slices have both bounds.
        empty: Allocates an array of a shape and `dtype` in the library of the values: `np.empty`, `torch.empty`.
    """

    def __init__(self, shape: Sequence[int], dtype: Any, read: Callable[[Part], Any], empty: Callable = np.empty):
        self.shape, self.dtype = tuple(shape), np.dtype(dtype) if empty is np.empty else dtype
        self._read, self.empty = read, empty
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize

    def __getitem__(self, part: Part) -> np.ndarray:
        """Read a part, given by a slice for each dimension."""
        # Fill in open and negative bounds; readers get neither these nor empty parts.
        part = tuple(slice(*bounds.indices(length)[:2]) for bounds, length in zip(part, self.shape, strict=True))
        sizes = size_of(part)
        return self._read(part) if all(sizes) else self.empty(sizes, dtype=self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[(slice(None),) * self.ndim], dtype or self.dtype)

    def astype(self, dtype: Any) -> "LazyArray":
        """Return the same values in another dtype, for numpy arrays."""
        return LazyArray(self.shape, dtype, lambda part: self[part].astype(dtype, copy=False))

    def scaled(self, factor: np.generic | float) -> "LazyArray":
        """Multiply each value by a factor of the same dtype, or by a Python number for torch arrays."""
        return LazyArray(self.shape, self.dtype, lambda part: self[part] * factor, self.empty)

    def transposed(self) -> "LazyArray":
        """Return the transpose of a matrix."""
        return LazyArray(self.shape[::-1], self.dtype, lambda part: self[part[::-1]].T, self.empty)

    def concatenate_rows(self) -> "LazyArray":
        """Stack matrices [N, rows, columns] to one matrix [N * rows, columns]."""
        num, num_rows, columns = self.shape

        def read(part: Part) -> np.ndarray:
            rows, columns_part = part
            # Read all matrices that the rows overlap, then select the rows.
            first, last = rows.start // num_rows, -(-rows.stop // num_rows)
            matrices = self[slice(first, last), slice(0, num_rows), columns_part]
            stacked = matrices.reshape(-1, columns_part.stop - columns_part.start)
            return stacked[rows.start - first * num_rows:rows.stop - first * num_rows]

        return LazyArray((num * num_rows, columns), self.dtype, read, self.empty)

    def read_rows(self, rows: slice) -> np.ndarray:
        """Read a slice of the first dimension."""
        return self[(rows, *[slice(None)] * (self.ndim - 1))]


def lazy(array: Any, empty: Callable = np.empty) -> LazyArray:
    """Wrap an array that may be in memory already."""
    if isinstance(array, LazyArray):
        return array
    return LazyArray(array.shape, array.dtype, lambda part: array[part], empty)


def lazy_file(file: Path, framework: str = "numpy", empty: Callable = np.empty) -> dict[str, LazyArray]:
    """Return the arrays of a safetensors file by name. The file stays open as long as one of them exists.

    Args:
        framework: safetensors' name of the library for the arrays.
        empty: See `LazyArray`.
    """
    opened = safe_open(file, framework)

    def array(name: str) -> LazyArray:
        # A slice knows its shape from the header alone; nothing is read yet.
        stored = opened.get_slice(name)
        shape = stored.get_shape()
        # A scalar has no slice `[:0]`, which gives the dtype below; it is small enough to read at once.
        if not shape:
            return lazy(opened.get_tensor(name), empty)
        # The header names the dtype in safetensors' terms; an empty slice has the library's dtype.
        return LazyArray(shape, stored[:0].dtype, lambda part: stored[part], empty)

    return {name: array(name) for name in opened.keys()}


def zeros(shape: Sequence[int], dtype: Any = np.float32) -> LazyArray:
    """Return lazy zeros."""
    return LazyArray(shape, dtype, lambda part: np.zeros(size_of(part), dtype))


def assemble_shards(shape: Sequence[int], shards: Sequence[tuple[Sequence[int], LazyArray]]) -> LazyArray:
    """Assemble an array from shards, each with its offset."""
    first_shard = shards[0][1]

    def read(part: Part) -> np.ndarray:
        # Uninitialised: the shards must cover the array.
        whole = first_shard.empty(size_of(part), dtype=first_shard.dtype)
        for offset, shard in shards:
            # Overlap of the part and the shard in each dimension, [first, last) in the whole array.
            overlaps = [(max(bounds.start, start), min(bounds.stop, start + size))
                        for bounds, start, size in zip(part, offset, shard.shape, strict=True)]
            if all(first < last for first, last in overlaps):
                target = tuple(slice(first - bounds.start, last - bounds.start)
                               for (first, last), bounds in zip(overlaps, part))
                whole[target] = shard[tuple(slice(first - start, last - start)
                                            for (first, last), start in zip(overlaps, offset))]
        return whole

    return LazyArray(shape, first_shard.dtype, read, first_shard.empty)


def row(array: LazyArray, index: int) -> LazyArray:
    """Return the values at one index of the first dimension, without that dimension."""
    return LazyArray(array.shape[1:], array.dtype, lambda part: array[(slice(index, index + 1), *part)][0], array.empty)


def stack(layers: Sequence[LazyArray]) -> LazyArray:
    """Stack arrays of one shape and dtype along a new first dimension; they are read one after the other."""
    def read(part: Part) -> np.ndarray:
        selected = layers[part[0]]  # a slice of the first dimension selects layers
        whole = np.empty([len(selected), *size_of(part[1:])], layers[0].dtype)
        for index, layer in enumerate(selected):
            whole[index] = layer[part[1:]]
        return whole

    return LazyArray((len(layers), *layers[0].shape), layers[0].dtype, read)


def size_of(part: Part) -> list[int]:
    """Return the shape of a part whose slices have both bounds."""
    return [max(bounds.stop - bounds.start, 0) for bounds in part]
