"""The order of training rows, and its division into micro-batches.

The order is a pure function of seed, epoch, row lengths and the rows of an optimiser step. Micro-batches are
consecutive rows of it, and the k-th of rank r is micro-batch k * world_size + r. So a step contains the same rows for
every batch split, and a run continues at the same row with another batch size or another number of devices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmmods.core.errors import UserError

SORTED_TOGETHER = 50  # steps per sorted chunk: enough to save padding, few enough to stay random
PADDING_ROW = -1
RULE = 2  # version of the order of new runs
VERSION, GROUPED = "order", "rows_per_step"  # keys of a saved position


@dataclass(frozen=True)
class OrderRule:
    """Rule that determines a run's order together with data, seed and epoch. It never changes during a run.

    Args:
        rows_per_step: Rows that are grouped together: those of an optimiser step.
        version: 1 is the order of earlier versions, which grouped the rows of a micro-batch (`rows_per_step` is its
            size) and had no micro-batch across two buffers of a stream.
    """

    rows_per_step: int
    version: int = RULE

    def state(self) -> dict[str, int]:
        """Return the keys of a saved position."""
        return {VERSION: self.version, GROUPED: self.rows_per_step}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "OrderRule":
        """Return the rule of a saved position; positions of earlier versions name none."""
        rows: Any = state.get(GROUPED, state.get("batch_size"))
        return cls(rows, state.get(VERSION, 1))

    def check(self, state: dict[str, Any], batch_size: int) -> None:
        """Raise UserError if a run resumed from a saved position would take its rows in another order."""
        if self.version == 1 and state["batch_size"] != batch_size:
            raise UserError(
                f"This run was started by an earlier version, whose row order depends on data.batch_size: with "
                f"{batch_size} instead of {state['batch_size']} its steps would have other rows. Set data.batch_size "
                f"{state['batch_size']}, or start a new run, whose order does not depend on it.")


class BatchOrder:
    """The micro-batches of one epoch.

    Args:
        order: All row numbers, batch after batch (integers of any size).
        batch_size: Rows per batch; the last chunk of `order` may be shorter.
        batches: Order of the chunks; None keeps them as they are.
        offset: Added to each row number, for rows that differ between epochs.
    """

    def __init__(self, order: np.ndarray, batch_size: int, batches: Sequence[int] | np.ndarray | None = None,
                 offset: int = 0) -> None:
        self._order, self._batch_size, self._offset = order, batch_size, offset
        self._batches = range(-(-len(order) // batch_size)) if batches is None else batches

    def shifted(self, offset: int) -> "BatchOrder":
        """Return the same batches with `offset` added to each row number."""
        return BatchOrder(self._order, self._batch_size, self._batches, offset)

    def first(self, count: int) -> "BatchOrder":
        """Return the first `count` batches only."""
        return BatchOrder(self._order, self._batch_size, self._batches[:count], self._offset)

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def rows(self) -> np.ndarray:
        """All row numbers (int64), batches kept together; the short batch comes last."""
        # Neither the order of `_batches`, which only version 1 sets, nor the count of `first` applies here.
        return self._order.astype(np.int64) + self._offset

    def __getitem__(self, index: int) -> list[int]:
        start = int(self._batches[index]) * self._batch_size
        # int64, as numbers that count through the epochs outgrow the type of the order
        return (self._order[start : start + self._batch_size].astype(np.int64) + self._offset).tolist()


def training_order(lengths: np.ndarray, batch_size: int, seed: list[int], rule: OrderRule, shuffle: bool = True,
                   group_by_length: bool = False, rows_before: int = 0) -> BatchOrder:
    """Return each row once, in a random order determined by the seed.

    Args:
        lengths: Tokens of each row.
        batch_size: Rows per micro-batch.
        seed: Seed of the run, epoch, and whatever else the order depends on.
        rule: Order rule of the run.
        shuffle: Shuffle the rows; otherwise they come in stored order.
        group_by_length: Put rows of similar length into a step.
        rows_before: Rows that the current step already has from before this order.
    """
    if not shuffle:
        return BatchOrder(_arange(len(lengths)), batch_size)
    random = np.random.default_rng(seed)
    # The order of calls of `random` is part of every saved position: a resumed run repeats it.
    order = shuffle_rows(len(lengths), random)
    if not group_by_length:
        return BatchOrder(order, batch_size)
    if rule.version == 1:
        # Unchanged for runs of earlier versions: sort within chunks, then shuffle micro-batches.
        chunk_of = np.arange(len(order)) // (batch_size * SORTED_TOGETHER)
        order = order[np.lexsort((-lengths[order], chunk_of))]
        return BatchOrder(order, batch_size, random.permutation(-(-len(order) // batch_size)))
    return BatchOrder(_group_by_length(order, lengths, rule.rows_per_step, rows_before, random), batch_size)


def mixed_order(items: np.ndarray, lengths: np.ndarray, batch_size: int, seed: list[int], rule: OrderRule,
                group_by_length: bool = False) -> BatchOrder:
    """Return the items of an epoch whose sources have shares, in micro-batches.

    Args:
        items: Items in order, as in `Mixture.epoch`.
        lengths: Tokens of each item.
        seed: Seed of the run and epoch.
        rule: Order rule of the run.
        group_by_length: Put items of similar length into a step, of those near each other in the order.
    """
    if group_by_length:
        positions = np.arange(len(items))
        random = np.random.default_rng([*seed, 0, 2])  # not that of the order itself
        items = items[_group_by_length(positions, lengths[items % len(lengths)], rule.rows_per_step, 0, random)]
    return BatchOrder(items, batch_size)


def _group_by_length(order: np.ndarray, lengths: np.ndarray, size: int, rows_before: int, random: np.random.Generator
                     ) -> np.ndarray:
    """Sort within random chunks of the shuffled rows, then shuffle the steps of `size` rows.

    Rows of the incomplete last step, and those that complete the current one, are random rows: otherwise the
    shortest of a chunk would come last in every epoch. Rows of a step come longest first, so that each micro-batch, on
    any rank, has rows of similar length.
    """
    # Rows that complete the step that the previous order left incomplete.
    start = min(-rows_before % size, len(order))
    num_steps = (len(order) - start) // size
    end = start + num_steps * size
    head, rows, tail = np.split(order, [start, end])
    # Stretches of steps, the last of which may be shorter, each longest first -> [num_steps, size], steps shuffled.
    stretch = size * SORTED_TOGETHER
    num_whole = len(rows) // stretch * stretch
    rows = np.concatenate([_longest_first(rows[:num_whole].reshape(-1, stretch), lengths).ravel(),
                           _longest_first(rows[num_whole:], lengths)])
    rows = rows.reshape(num_steps, size)[random.permutation(num_steps)]
    return np.concatenate([_longest_first(head, lengths), rows.ravel(), _longest_first(tail, lengths)])


def _longest_first(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sort row numbers [..., N] by length along the last axis; rows of equal length keep their order."""
    return np.take_along_axis(rows, stable_descending(lengths[rows]), -1)


def stable_descending(lengths: np.ndarray) -> np.ndarray:
    """Return the positions of `lengths` [..., N] from the longest to the shortest, equal ones in their order.

    A tenth of the time of sorting wide integers: numpy sorts 16-bit ones by radix.
    """
    max_length = lengths.max(initial=0)
    keys = max_length - lengths
    return np.argsort(keys.astype(np.uint16) if max_length < 2**16 else keys, axis=-1, kind="stable")


def shuffle_rows(count: int, random: np.random.Generator) -> np.ndarray:
    """Return `random.permutation(count)`, as int32 if that suffices, which takes half the memory."""
    indices = _arange(count)
    random.shuffle(indices)
    return indices


def _arange(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)


def batches_done(rows: int, batch_size: int, num_rows: int, saved_size: int) -> int:
    """Return the micro-batches that the first `rows` of an epoch's `num_rows` rows make.

    Args:
        saved_size: Rows of a micro-batch where the position was saved.

    Raises:
        UserError: They end inside a micro-batch.
    """
    if rows < num_rows and rows % batch_size:
        raise UserError(f"This checkpoint was written after row {rows} of an epoch, which is inside a batch of "
                        f"{batch_size} rows. Resume from one at another step, or with data.batch_size {saved_size}.")
    return -(-rows // batch_size)  # the last one of an epoch may be short


def evaluation_order(lengths: np.ndarray, batch_size: int) -> BatchOrder:
    """Return each row once, longest first: this minimises padding, and a lack of memory shows at once."""
    return BatchOrder(stable_descending(lengths), batch_size)


def batches_per_rank(num_batches: int, world_size: int) -> int:
    """Return the number of micro-batches of each rank out of `num_batches` global ones."""
    return -(-num_batches // world_size)


def batches_of_rank(order: BatchOrder, start: int, rank: int, world_size: int) -> Iterator[list[int]]:
    """Yield this rank's batches from global batch `start` on; as many on all ranks, so the last may be padding."""
    for first in range(start, len(order), world_size):
        index = first + rank
        # The last group may not have a batch for every rank, but collective calls need all of them.
        yield order[index] if index < len(order) else [PADDING_ROW]
