"""The order of micro-batches: a pure function of seed, epoch, row lengths and batch size.

World size and workers only shard the batches: the k-th of rank r is batch k * world_size + r. So a run continues
at the same example on another number of devices.
"""

from collections.abc import Iterator

import numpy as np

SORTED_TOGETHER = 50  # batches per sorted chunk: enough to save padding, few enough to stay random
PADDING_ROW = -1


class BatchOrder:
    """The micro-batches of one epoch.

    Args:
        order: All row numbers, batch after batch (int64).
        batch_size: Rows per batch; the last chunk of `order` may be shorter.
        batches: Which chunk comes when.
        offset: Added to each row number, for rows that differ from epoch to epoch.
    """

    def __init__(self, order: np.ndarray, batch_size: int, batches: np.ndarray, offset: int = 0) -> None:
        self._order, self._batch_size, self._batches, self._offset = order, batch_size, batches, offset

    def shifted(self, offset: int) -> "BatchOrder":
        """The same batches with `offset` added to each row number."""
        return BatchOrder(self._order, self._batch_size, self._batches, offset)

    def first(self, count: int) -> "BatchOrder":
        """The first `count` batches alone."""
        return BatchOrder(self._order, self._batch_size, self._batches[:count], self._offset)

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def rows(self) -> np.ndarray:
        """All row numbers, batches kept together; the short one comes last."""
        return self._order

    def __getitem__(self, number: int) -> list[int]:
        start = int(self._batches[number]) * self._batch_size
        return (self._order[start : start + self._batch_size] + self._offset).tolist()


def training_order(lengths: np.ndarray, batch_size: int, seed: list[int], shuffle: bool = True,
                   group_by_length: bool = False) -> BatchOrder:
    """Each row once, in an order drawn from the seed.

    Args:
        seed: Seed of the run, epoch, and whatever else the order depends on.
        shuffle: Draw an order; otherwise rows come as they are stored.
        group_by_length: Put rows of similar length into a batch: sort within random stretches of the shuffled rows,
            then shuffle the batches.
    """
    num_rows = len(lengths)
    batches = np.arange(-(-num_rows // batch_size))
    if not shuffle:
        return BatchOrder(np.arange(num_rows), batch_size, batches)
    random = np.random.default_rng(seed)
    order = random.permutation(num_rows)
    if group_by_length:
        chunk_of = np.arange(num_rows) // (batch_size * SORTED_TOGETHER)
        order = order[np.lexsort((-lengths[order], chunk_of))]
        batches = random.permutation(batches)
    return BatchOrder(order, batch_size, batches)


def evaluation_order(lengths: np.ndarray, batch_size: int) -> BatchOrder:
    """Each row once, longest first: least padding, and a lack of memory shows at once."""
    order = np.argsort(-lengths, kind="stable")
    return BatchOrder(order, batch_size, np.arange(-(-len(order) // batch_size)))


def batches_per_rank(num_batches: int, world_size: int) -> int:
    """Micro-batches that each rank gets from `num_batches` global ones."""
    return -(-num_batches // world_size)


def batches_of_rank(order: BatchOrder, start: int, rank: int, world_size: int) -> Iterator[list[int]]:
    """This rank's batches from global batch `start` on; every rank gets equally many, the last may be padding."""
    for first in range(start, len(order), world_size):
        number = first + rank
        yield order[number] if number < len(order) else [PADDING_ROW]
