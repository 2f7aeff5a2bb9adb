"""Loaders: sized iterables over one rank's batches; the training loader has a position that can be saved.

They wrap torch's DataLoader. Lightning does not get the DataLoader itself, because it would lose the position: a
resumed epoch would repeat its first rows and skip its last.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, tee
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lmmods.core.errors import UserError
from lmmods.core.labels import PER_ROW
from lmmods.core.subprocesses import end_with_parent
from lmmods.data.order.sampler import BatchOrder, OrderRule, batches_done, batches_of_rank, batches_per_rank

Batch = dict[str, torch.Tensor]


@dataclass
class Shard:
    """Data-parallel rank of this process, which determines its batches, and the number of processes that prepare them.

    Args:
        rank: Rank of this process, of `world_size`.
        num_workers: Processes that prepare batches.
        batches_per_step: Global micro-batches of an optimiser step, over all ranks.
        fed: (ranks, number of ranks) if this process, as rank 0 of 1, feeds these ranks with consecutive
            batches, and other processes feed the rest; else None.
    """

    rank: int = 0
    world_size: int = 1
    num_workers: int = 0
    batches_per_step: int = 1
    fed: tuple[tuple[int, ...], int] | None = None


class Absent(NamedTuple):
    """Placeholder of a batch whose rows another process reads.

    Args:
        length: Its padded length.
        columns: Its columns whose names start with PER_ROW, with shapes and dtypes, but without values.
    """

    length: int
    columns: dict[str, np.ndarray]


Outline = Callable[[list[list[int]]], dict[str, np.ndarray]]
SAMPLED = 4096  # micro-batches that show how long batches are


class Widths:
    """Padded length of each batch, computed without reading it.

    Args:
        lengths: Tokens of each row; of its longest answer if a row has several.
        pad_length: `Collator.pad_length`.
        outline: Returns `Absent.columns` of a batch, from the rows in each row of it; None if batches have no such
            columns.
    """

    def __init__(self, lengths: np.ndarray, pad_length: Callable[[int], int],
                 outline: Outline | None = None) -> None:
        self._lengths, self._pad_length, self._outline = lengths, pad_length, outline

    def __call__(self, indices: list[int]) -> int:
        """Return the padded length of a batch of rows, indexed through the epochs as in an order; -1 is padding."""
        sizes = [int(self._lengths[index % len(self._lengths)]) for index in indices if index >= 0]
        return self._pad_length(max(sizes, default=1))

    def absent(self, indices: list[int]) -> Absent:
        """Return the placeholder of a batch; arguments as for `__call__`."""
        rows = [[index % len(self._lengths)] if index >= 0 else [] for index in indices]
        return Absent(self(indices), {} if self._outline is None else self._outline(rows))

    def maximum(self) -> int:
        """Return the padded length of a batch with the longest row."""
        return self._pad_length(int(self._lengths.max()))


class _Batches:
    """Batch sampler of the DataLoader; `upcoming` is set before each pass."""

    # Replaced rather than passed to a new DataLoader, with which persistent workers would end.
    upcoming: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.upcoming


def _torch_loader(rows: Dataset, collate: Callable, batches: _Batches, num_workers: int, ahead: int = 2) -> DataLoader:
    """Return torch's loader, whose workers together read at least `ahead` batches in advance."""
    # forkserver: forking a process that has started JAX can deadlock
    parallel: dict[str, Any] = {
        "multiprocessing_context": "forkserver", "persistent_workers": True,
        "prefetch_factor": max(2, -(-ahead // num_workers)), "worker_init_fn": end_with_parent} if num_workers else {}
    return DataLoader(rows, batch_sampler=batches, collate_fn=collate, num_workers=num_workers, **parallel)


def _read(loader: DataLoader, batches: _Batches, upcoming: Iterator[list[int]], count: int, shard: Shard,
          widths: Widths | None) -> Iterator[Batch | Absent]:
    """Yield the `count` upcoming batches; batches of ranks that this process does not feed are not read.

    If the last group has no batch for this process, its first batch is read as the pattern for padding.
    """
    if shard.fed is None or widths is None:
        batches.upcoming = upcoming
        yield from loader
        return
    ranks, size = shard.fed

    def is_read(position: int) -> bool:
        # The second case: the last group, of count - place batches, has none for `ranks`; rank 0's is the first of it.
        rank = position % size
        return rank in ranks or rank == 0 and min(ranks) >= min(size, count - position)

    # The DataLoader reads ahead of what is yielded, so each needs its own iterator.
    upcoming, batch_indices = tee(upcoming)
    batches.upcoming = (indices for position, indices in enumerate(upcoming) if is_read(position))
    own_batches = iter(loader)
    for position, indices in enumerate(batch_indices):
        absent = widths.absent(indices)
        if not is_read(position):
            yield absent
            continue
        batch = next(own_batches)
        width = batch["input_ids"].shape[-1]
        if width != absent.length:  # other processes would wait for batches of another shape
            raise RuntimeError(f"A batch is padded to {width} tokens, but its lengths give {absent.length}")
        shapes, expected = ({name: tuple(x.shape) for name, x in columns.items() if name.startswith(PER_ROW)}
                            for columns in (batch, absent.columns))
        if shapes != expected:
            raise RuntimeError(f"A batch has the shapes {shapes}, but its rows give {expected}")
        yield batch


class EvaluationLoader:
    """The same batches at each pass, each row once over all ranks.

    Args:
        rows: Map-style rows; number -1 is a padding row.
        order: Global micro-batches.
        widths: Padded lengths, if known; without them this process also reads batches that it does not feed.
    """

    def __init__(self, rows: Dataset, order: BatchOrder, collate: Callable[[list], Batch], shard: Shard,
                 widths: Widths | None = None) -> None:
        self._order, self._shard, self._widths = order, shard, widths
        self._batches = _Batches()
        self._loader = _torch_loader(rows, collate, self._batches, shard.num_workers)

    def __len__(self) -> int:
        return batches_per_rank(len(self._order), self._shard.world_size)

    def __iter__(self) -> Iterator[Batch | Absent]:
        upcoming = batches_of_rank(self._order, 0, self._shard.rank, self._shard.world_size)
        yield from _read(self._loader, self._batches, upcoming, len(self), self._shard, self._widths)


class StatefulLoader:
    """Endless training batches: each pass finishes the current epoch, the next starts a new one.

    `len` is the number of micro-batches of a whole epoch on this rank. Iteration starts at the position at the first
    `next`, so repeated calls of `iter` have no effect.

    Args:
        rows: Map-style rows; number -1 is a padding row.
        order_of: Maps an epoch and the run's order rule to the global micro-batches.
        batch_size: Rows per micro-batch.
        widths: See `EvaluationLoader`.
        grouped: True if the order groups rows by length; otherwise it does not depend on the rule.
        num_rows: Rows of an epoch, where sources have shares; None is all of `rows`.
    """

    def __init__(self, rows: Dataset, order_of: Callable[[int, OrderRule], BatchOrder],
                 collate: Callable[[list], Batch], shard: Shard, batch_size: int, widths: Widths | None = None,
                 grouped: bool = True, num_rows: int | None = None) -> None:
        # Shuffling millions of rows takes a second, and the order is needed several times in an epoch.
        self._order_of = lru_cache(1)(order_of)
        self._shard, self._widths, self._grouped = shard, widths, grouped
        self._batches = _Batches()
        # A step is taken out at once: the workers prepare the next one meanwhile.
        self._loader = _torch_loader(rows, collate, self._batches, shard.num_workers,
                                     -(-shard.batches_per_step // shard.world_size))
        self._batch_size = batch_size
        self._num_rows = len(rows) if num_rows is None else num_rows  # type: ignore[arg-type]
        # Rows of an optimiser step over all ranks, which do not change if the same step is divided otherwise.
        self._rule = OrderRule(batch_size * shard.batches_per_step)
        self._epoch = self._handed_out = 0
        self._num_batches = len(order_of(0, self._rule))

    def __len__(self) -> int:
        return batches_per_rank(self._num_batches, self._shard.world_size)

    def _begin_epoch(self) -> None:
        """Start the next epoch at the end of one."""
        if self._handed_out >= self._num_batches:
            self._epoch, self._handed_out = self._epoch + 1, 0

    def __iter__(self) -> Iterator[Batch | Absent]:
        self._begin_epoch()
        # The rest of the epoch from the position on, which is a whole epoch unless the run was resumed.
        rank, world_size = self._shard.rank, self._shard.world_size
        upcoming = batches_of_rank(self._order_of(self._epoch, self._rule), self._handed_out, rank, world_size)
        count = batches_per_rank(self._num_batches - self._handed_out, world_size)
        for batch in _read(self._loader, self._batches, upcoming, count, self._shard, self._widths):
            # Counted as handed out, not as read: workers run ahead. In the last group some ranks have padding only.
            self._handed_out = min(self._handed_out + world_size, self._num_batches)
            yield batch

    def lengths(self) -> list[int]:
        """Padded lengths of the first epoch's micro-batches over all ranks, or of its first `SAMPLED`, and the longest.

        They do not depend on the position. Needs `widths`.
        """
        assert self._widths is not None
        order = self._order_of(0, self._rule)
        return [*(self._widths(order[index]) for index in range(min(len(order), SAMPLED))), self._widths.maximum()]

    def state_dict(self) -> dict[str, Any]:
        """Position as plain JSON: epoch, number of its rows handed out, and settings of the batches."""
        # The last micro-batch of an epoch may be short.
        rows = min(self._handed_out * self._batch_size, self._num_rows)
        return {"epoch": self._epoch, "rows": rows, "batch_size": self._batch_size, "num_rows": self._num_rows,
                **self._rule.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, also with another batch size, another number of ranks or workers.

        Raises:
            UserError: The position belongs to other data, lies inside a batch of this size, or is of an earlier
                version's order and another batch size.
        """
        check_same(state, {"num_rows": self._num_rows})
        if self._grouped:
            # The run keeps the order that it was started with, whatever batch size it has from here on.
            self._rule = OrderRule.from_state(state)
            self._rule.check(state, self._batch_size)
        self._epoch = state["epoch"]
        self._handed_out = batches_done(state["rows"], self._batch_size, self._num_rows, state["batch_size"])


class SegmentLoader(StatefulLoader):
    """Training batches that come in segments: a segment depends on the weights after the steps before it.

    Abstract. Arguments as for `StatefulLoader`.
    """

    starts_itself = True  # False where the engine calls `begin_segment`

    @abstractmethod
    def begin_segment(self) -> int:
        """Prepare the segment at the current position and return this rank's number of micro-batches left in it.

        A collective call, to be made before iterating where `starts_itself` is False.
        """

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield from islice(super().__iter__(), self.begin_segment())
            if not self.starts_itself or self._handed_out >= self._num_batches:
                return


class StepLoader:
    """The training loader: each pass yields optimiser steps, lists of this rank's micro-batches.

    Args:
        batches: Endless passes over micro-batches with a position, such as `StatefulLoader`.
        accumulate: Micro-batches of a step; the last step of a pass may have fewer.
        num_batches: Micro-batches of a pass, at most all of an epoch.
        steps_done: Returns the steps of the current pass that are done where a resumed run starts.
    """

    def __init__(self, batches: Any, accumulate: int, num_batches: int,
                 steps_done: Callable[[], int] = lambda: 0) -> None:
        self.num_batches = num_batches
        self._batches, self._accumulate, self._steps_done = batches, accumulate, steps_done

    def __len__(self) -> int:
        return -(-self.num_batches // self._accumulate)

    def __iter__(self) -> Iterator[list[Batch]]:
        num_left = self.num_batches - self._steps_done() * self._accumulate
        batches = iter(self._batches)
        # A step is read only when it starts, as rows of a rollout depend on the weights after the previous step.
        while num_left > 0 and (step := list(islice(batches, min(self._accumulate, num_left)))):
            num_left -= len(step)
            yield step

    def state_dict(self) -> dict[str, Any]:
        """See `StatefulLoader`."""
        return self._batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `StatefulLoader`."""
        self._batches.load_state_dict(state)


def check_same(state: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raise UserError unless a saved position was written with these settings."""
    for key, value in settings.items():
        if state.get(key) != value:
            raise UserError(f"cannot resume: the checkpoint was written with {key} {state.get(key)}, now it is "
                            f"{value}. Restore the old setting, or start a new run")
