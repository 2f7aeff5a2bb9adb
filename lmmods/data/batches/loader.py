"""Loaders: sized iterables over one rank's batches, the training one with a position that can be saved.

torch's DataLoader works underneath. It is not handed to Lightning itself, because its position is then lost: a resumed
epoch would repeat its first rows and miss its last.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lmmods.core.errors import UserError
from lmmods.core.subprocesses import begin_worker
from lmmods.data.batches.sampler import BatchOrder, batches_of_rank, batches_per_rank

Batch = dict[str, torch.Tensor]


@dataclass
class Shard:
    """Which data-parallel rank this process is, so which batches it gets, and how many processes prepare them."""

    rank: int = 0
    world_size: int = 1
    num_workers: int = 0


class _Batches:
    """The batch sampler under the DataLoader: what it yields next is set before each pass."""

    upcoming: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.upcoming


def _torch_loader(rows: Dataset, collate: Callable, batches: _Batches, num_workers: int) -> DataLoader:
    # forkserver: forking a process in which JAX has started can deadlock
    parallel = {"multiprocessing_context": "forkserver", "persistent_workers": True,
                "worker_init_fn": begin_worker} if num_workers else {}
    return DataLoader(rows, batch_sampler=batches, collate_fn=collate, num_workers=num_workers, **parallel)


class EvaluationLoader:
    """The same batches at each pass, each row once over all ranks.

    Args:
        rows: Map-style rows; number -1 is a padding row.
        order: Global micro-batches.
    """

    def __init__(self, rows: Dataset, order: BatchOrder, collate: Callable[[list], Batch], shard: Shard) -> None:
        self._order, self._shard = order, shard
        self._batches = _Batches()
        self._loader = _torch_loader(rows, collate, self._batches, shard.num_workers)

    def __len__(self) -> int:
        return batches_per_rank(len(self._order), self._shard.world_size)

    def __iter__(self) -> Iterator[Batch]:
        self._batches.upcoming = batches_of_rank(self._order, 0, self._shard.rank, self._shard.world_size)
        yield from self._loader


class StatefulLoader:
    """Training batches without end: each pass finishes the current epoch, the next begins a new one.

    `len` is the number of micro-batches of a whole epoch on this rank. Iteration starts where the position stands at
    the first `next`, so several calls of `iter` change nothing.

    Args:
        rows: Map-style rows; number -1 is a padding row.
        order_of: Epoch -> its global micro-batches.
        batch_size: Rows per micro-batch; a position can only be continued with the same.
    """

    def __init__(self, rows: Dataset, order_of: Callable[[int], BatchOrder], collate: Callable[[list], Batch],
                 shard: Shard, batch_size: int) -> None:
        self._order_of, self._shard = order_of, shard
        self._rows, self._collate = rows, collate
        self._batches = _Batches()
        self._loader = _torch_loader(rows, collate, self._batches, shard.num_workers)
        self._identity = {"batch_size": batch_size, "num_rows": len(rows)}  # type: ignore[arg-type]
        self._epoch = self._handed_out = 0
        self._num_batches = len(order_of(0))

    def __len__(self) -> int:
        return batches_per_rank(self._num_batches, self._shard.world_size)

    def __iter__(self) -> Iterator[Batch]:
        if self._handed_out >= self._num_batches:
            self._epoch, self._handed_out = self._epoch + 1, 0
        rank, world_size = self._shard.rank, self._shard.world_size
        self._batches.upcoming = batches_of_rank(self._order_of(self._epoch), self._handed_out, rank, world_size)
        for batch in self._loader:
            self._handed_out = min(self._handed_out + world_size, self._num_batches)
            yield batch

    def peek(self, first: int, count: int) -> list[Batch]:
        """Micro-batches `first` to `first + count` of this rank in the epoch under way; the position stays."""
        world_size = self._shard.world_size
        upcoming = batches_of_rank(self._order_of(self._epoch), first * world_size, self._shard.rank, world_size)
        return [self._collate([self._rows[number] for number in batch]) for batch in islice(upcoming, count)]

    def state_dict(self) -> dict[str, Any]:
        """Position as plain JSON: epoch, global micro-batches of it handed out, and what they were made of."""
        return {"epoch": self._epoch, "batches": self._handed_out, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, also on another number of ranks or workers.

        Raises:
            UserError: The position belongs to other data or another batch size.
        """
        check_same(state, self._identity)
        self._epoch, self._handed_out = state["epoch"], state["batches"]


def check_same(state: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raise UserError unless a saved position is one of batches made by these settings."""
    for key, value in settings.items():
        if state.get(key) != value:
            raise UserError(f"cannot resume: the checkpoint was written with {key} {state.get(key)}, now it is {value};"
                            " restore the old setting, or start a new run")
