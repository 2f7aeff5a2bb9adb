"""Prefetching: stack the micro-batches of a torch loader into global batches and copy them to the devices in advance.

With N data-parallel ranks, a step takes N consecutive micro-batches, one per rank, as N torch ranks would. Every
process iterates over all micro-batches: the loader reads the micro-batches of the process's ranks, and returns only the
lengths and shapes of the others. So all processes agree on shapes and on the end of the epoch without communication,
and a loader's position does not depend on the number of processes. The loader must have world size 1.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import Array

from jax_engine.distributed.interface import Parallel
from jax_engine.distributed.loss import LABELS, no_label
from lmmods.core.labels import PER_ROW, has_tokens
from lmmods.data.batch.loader import Absent


@dataclass
class GlobalBatch:
    """Global batch: one of the loader's micro-batches per data-parallel rank.

    Args:
        arrays: Arrays on the devices, [ranks, B, ...] int32, or float32 for floating-point data.
        host: Rows of this process's ranks, in host memory.
        num_batches: Number of micro-batches; the remaining ranks get padding.
        position: The loader's `state_dict()` after these micro-batches; None if it has none.
    """

    arrays: dict[str, Array]
    host: dict[str, np.ndarray]
    num_batches: int
    position: dict[str, Any] | None


class Prefetcher:
    """One pass over a loader. Iterate once, and close it (or use `with`) when leaving early.

    A thread reads ahead and copies batches to the devices. The consumer raises the thread's exceptions.

    Args:
        loader: Yields dicts of CPU tensors, rows first.
        batch_size: Rows per micro-batch; smaller ones are padded with empty rows.
        max_length: Maximum of the rounded lengths (see `round_up`); None does not round. With context parallelism, rows
            are padded to a multiple of its size.
        lengths: Padded lengths, ascending (see `choose_padded_lengths`), which replace the rounded length where one is
            long enough.
        ahead: Number of global batches to prepare in advance.
        complete: Adds columns to a global batch's arrays [local ranks, B, ...] on the host.
    """

    def __init__(self, loader: Iterable, parallel: Parallel, batch_size: int, pad_id: int,
                 max_length: int | None = None, lengths: Sequence[int] = (), ahead: int = 2,
                 complete: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda batch: batch):
        self._loader, self._parallel, self._batch_size = loader, parallel, batch_size
        self._fill = {"index": -1, "input_ids": pad_id}
        self._max_length, self._lengths, self._complete = max_length, lengths, complete
        self._ready: queue.Queue = queue.Queue(ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._produce, name="prefetch", daemon=True)

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __iter__(self) -> Iterator[GlobalBatch]:
        self._thread.start()
        try:
            while (item := self._ready.get()) is not None:
                # The thread passes its exception through the queue.
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.close()

    def close(self) -> None:
        """Stop the thread and drop the remaining batches."""
        self._closed.set()
        while self._thread.is_alive():
            while not self._ready.empty():
                self._ready.get_nowait()
            self._thread.join(0.01)

    # Run in the thread -----------------------------------------------------------------------------------------------

    def _produce(self) -> None:
        try:
            for host, num_batches, position in self._global_batches():
                host = self._complete(host)
                # Copy to the devices in this thread, while the previous step computes.
                if not self._put(GlobalBatch(self._parallel.put_batch(host), host, num_batches, position)):
                    return
            self._put(None)
        except BaseException as error:  # the consumer raises it
            self._put(error)

    def _put(self, item: Any) -> bool:
        """Queue an item; return False if the prefetcher has been closed."""
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.05)
                return True
            except queue.Full:
                continue
        return False

    def _global_batches(self) -> Iterator[tuple[dict[str, np.ndarray], int, dict[str, Any] | None]]:
        group: list[dict[str, np.ndarray] | Absent] = []
        for batch in self._loader:
            group.append(batch if isinstance(batch, Absent)
                         else {name: np.asarray(tensor) for name, tensor in batch.items()})
            # Micro-batch i of a group goes to rank i. Read the position before the loader continues.
            if len(group) == self._parallel.data_parallel_size:
                yield self._stack(group), len(group), self._position()
                group = []
        if group:
            yield self._stack(group), len(group), self._position()

    def _position(self) -> dict[str, Any] | None:
        return self._loader.state_dict() if hasattr(self._loader, "state_dict") else None

    def _stack(self, group: list[dict[str, np.ndarray] | Absent]) -> dict[str, np.ndarray]:
        """Stack the micro-batches of this process's ranks, padded to a common length, [local ranks, B, ...]."""
        # Batches of other processes' ranks are `Absent`: only their length and shapes are known, which all processes
        # need to choose the same padded ones.
        example = next(batch for batch in group if not isinstance(batch, Absent))
        axis = example["input_ids"].ndim - 1  # the token axis
        length = max(batch.length if isinstance(batch, Absent) else batch["input_ids"].shape[axis] for batch in group)
        if self._max_length is not None:
            chosen = next((padded for padded in self._lengths if padded >= length), round_up(length))
            length = max(length, min(chosen, self._max_length))
        # Context parallelism splits rows into parts of equal length.
        length = -(-length // self._parallel.context_parallel_size) * self._parallel.context_parallel_size
        local_ranks = self._parallel.local_ranks
        # At the end of an epoch, ranks without a micro-batch get empty rows, with the shape of `x[:0]`.
        local = [group[rank] if rank < len(group) else {name: x[:0] for name, x in example.items()}
                 for rank in local_ranks]
        columns = {name: np.stack([self._pad(name, batch[name], length, axis) for batch in local])
                   for name in example if not name.startswith(PER_ROW)}
        # Some micro-batches may lack these columns, and their shapes differ.
        per_row: dict[str, list[np.ndarray]] = {}
        for batch in group:
            for name, x in (batch.columns if isinstance(batch, Absent) else batch).items():
                if name.startswith(PER_ROW):
                    per_row.setdefault(name, []).append(x)
        return columns | {name: self._stack_per_row([batch.get(name, group_columns[0][:0]) for batch in local],
                                                    group_columns) for name, group_columns in per_row.items()}

    def _stack_per_row(self, columns: list[np.ndarray], group: list[np.ndarray]) -> np.ndarray:
        """Stack arrays [B, N, ...] as int32 or float32, padded with zeros to the largest shape of a group and to few
        values of N.
        """
        sizes = np.max([column.shape[1:] for column in group], 0).tolist()
        if sizes:
            sizes[0] = round_count(sizes[0])
        stacked = np.zeros((len(columns), self._batch_size, *sizes),
                           np.float32 if columns[0].dtype.kind == "f" else np.int32)
        for padded, column in zip(stacked, columns, strict=True):
            padded[tuple(slice(size) for size in column.shape)] = column
        return stacked

    def _pad(self, name: str, x: np.ndarray, length: int, axis: int) -> np.ndarray:
        """Pad a micro-batch's array to the batch size, and `axis` to `length`; convert it to int32 or float32."""
        # Floating-point labels belong to rows, also if a row has several.
        is_per_row = not has_tokens(name, x.ndim, x.dtype.kind == "f", axis)
        tokens = () if is_per_row else (length,)
        shape = (self._batch_size, *x.shape[1:axis], *tokens, *x.shape[axis + len(tokens):])
        fill = no_label(x.dtype) if name in LABELS else self._fill.get(name, 0)
        padded = np.full(shape, fill, np.float32 if x.dtype.kind == "f" else np.int32)
        # Padding rows come last, padding tokens on the right.
        padded[tuple(slice(size) for size in x.shape)] = x
        if name in ("attention_mask", "segment_ids"):
            padded[len(x) :, ..., 0] = 1  # so that no softmax is over an empty set
        return padded


def round_up(length: int) -> int:
    """Round a length up to one of few values, so that few shapes are compiled.

    The result is at most a quarter longer, or the next multiple of 32.
    """
    # The power of two that is an eighth to a quarter of the length.
    step = max(32, 1 << max(length.bit_length() - 3, 0))
    return -(-length // step) * step


def round_count(count: int) -> int:
    """Round a number of entries per row up to a power of two or three quarters of one, so that few shapes are compiled.
    """
    above = 1 << max(count - 1, 0).bit_length()
    return above * 3 // 4 if count <= above * 3 // 4 else above


def halve_lengths(max_length: int) -> tuple[int, ...]:
    """Return padded lengths, ascending, for batches of unknown length: each is about half the next."""
    lengths = [max_length]
    while lengths[0] > 32:
        lengths.insert(0, -(-(lengths[0] // 2) // 32) * 32)
    return tuple(lengths)


MAX_LENGTHS = 10
FINE = 16  # tokens


def choose_padded_lengths(batch_lengths: Sequence[int], max_length: int, is_fine: bool, cost: float = 0.0,
                          max_lengths: int = MAX_LENGTHS) -> tuple[int, ...]:
    """Return up to `max_lengths` padded lengths, ascending, that minimise the cost of padding and compiling.

    Args:
        batch_lengths: Lengths of batches, at least one, including the longest.
        max_length: Maximum of the rounded lengths.
        is_fine: Choose among multiples of `FINE`; otherwise among lengths of `round_up`, which suit fused kernels.
        cost: Padding tokens in all of `batch_lengths` that cost as much as compiling a program.
    """
    batch_lengths = np.asarray(batch_lengths)
    rounded = (-(-batch_lengths // FINE) * FINE if is_fine
               else np.array([round_up(int(length)) for length in batch_lengths]))
    sizes, counts = np.unique(np.maximum(batch_lengths, np.minimum(rounded, max_length)), return_counts=True)
    # Dynamic programming: for all batches up to each size, the cost of padding and programs if that size is the last
    # choice, and the choices. Each round allows one more size.
    num_batches = counts.cumsum()
    costs, choices = sizes * num_batches + cost, [(int(size),) for size in sizes]
    is_before = np.tri(len(sizes), k=-1, dtype=bool).T
    for _ in range(max_lengths - 1):
        # [i, j]: size i precedes size j in the choice.
        with_one_more = np.where(
            is_before, costs[:, None] + sizes * (num_batches - num_batches[:, None]) + cost, costs)
        previous = with_one_more.argmin(0)
        choices = [(*choices[i], int(sizes[j])) if with_one_more[i, j] < costs[j] else choices[j]
                   for j, i in enumerate(previous)]
        costs = with_one_more.min(0)
    return choices[-1]
