"""Packing of several rows into one of `max_length` tokens, separated by segment and position ids."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lmmods.core.labels import IGNORED
from lmmods.data.batch.collate import PLACES
from lmmods.data.batch.images import INPUTS, join_inputs
from lmmods.data.batch.loader import Outline
from lmmods.data.order.sampler import shuffle_rows, stable_descending

CHUNK = 50_000  # rows packed at a time; bounds memory, and larger chunks pack no better


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put each row, longest first, into the fullest pack that still has space (best-fit decreasing).

    Rows of one length are packed together: as many as fit go into the fullest pack, the next into the one after it.

    Args:
        lengths: Tokens of each row, none above `capacity`.
        capacity: Tokens of a pack.

    Returns:
        Row indices, pack after pack, and the position of each pack's first row in them, with the end as last entry.
        Every row is in exactly one pack.
    """
    order = stable_descending(lengths)
    pack_of = np.empty(len(lengths), np.int64)  # of the rows in this order
    num_packs = 0
    packs_by_space: dict[int, list[int]] = {}  # free tokens -> packs, the one to fill next last
    spaces: list[int] = []  # the keys of `packs_by_space`, sorted

    def add_packs(num_free: int, packs: list[int]) -> None:
        if packs and num_free not in packs_by_space:
            packs_by_space[num_free] = []
            insort(spaces, num_free)
        if packs:
            packs_by_space[num_free] += packs

    ends = np.flatnonzero(np.diff(lengths[order], append=-1)) + 1
    start = 0
    for end in ends.tolist():
        length = int(lengths[order[start]])
        while start < end:
            count = end - start
            index = bisect_left(spaces, length)  # smallest space that suffices
            space = spaces[index] if index < len(spaces) else capacity
            per_pack = space // length if length else count
            num_needed = -(-count // per_pack)
            if index == len(spaces):
                packs = list(range(num_packs, num_packs + num_needed))
                num_packs += num_needed
            else:
                packs = packs_by_space[space][: -num_needed - 1 : -1]
                del packs_by_space[space][-num_needed:]
                # `spaces` contains only sizes that some pack has.
                if not packs_by_space[space]:
                    del packs_by_space[space], spaces[index]
            placed = min(count, per_pack * len(packs))
            pack_of[start : start + placed] = np.repeat(packs, per_pack)[:placed]
            full, remainder = divmod(placed, per_pack)
            add_packs(space - per_pack * length, packs[:full])
            add_packs(space - remainder * length, packs[full:])
            start += placed
    by_pack = stable_descending(num_packs - pack_of)
    return order[by_pack], np.concatenate([[0], np.cumsum(np.bincount(pack_of, minlength=num_packs))])


class PackedSet(Dataset):
    """Items packed into rows of at most `max_length` tokens. Item -1 is None, a padding row.

    The assignment of items to packs is drawn once from the seed, so the number of packs is the same in each epoch. Pack
    number + draw * len(self) consists of the items of that draw.

    Args:
        items: Dataset with `lengths` and items {input_ids, labels, index, row, draw}, optionally `weight` and image
            inputs (`ImageSet`), numbered like those of `NumberedSet`.
        groups: Numbers of consecutive items that are packed separately, one for each source. None packs all items
            together.
    """

    def __init__(self, items: Any, max_length: int, seed: int, groups: Iterable[int] | None = None) -> None:
        self.items = items
        lengths = items.lengths
        # Items pack after pack, and where each pack starts: a million lists would take gigabytes.
        packed, ends, num_packs, first = [np.empty(0, np.int32)], [np.zeros(1, np.int64)], [], 0
        for size in [len(lengths)] if groups is None else groups:
            # Shuffled, so that each chunk is a sample of all rows rather than of one source.
            order = shuffle_rows(int(size), np.random.default_rng([seed, int(size)])) + first
            num_packs.append(0)
            for start in range(0, len(order), CHUNK):
                chunk = order[start : start + CHUNK]
                order_in_chunk, bounds = best_fit_decreasing(lengths[chunk], max_length)
                packed.append(chunk[order_in_chunk])
                ends.append(first + start + bounds[1:])
                num_packs[-1] += len(bounds) - 1
            first += int(size)
        self._items, self._bounds = np.concatenate(packed), np.concatenate(ends)
        self.source_sizes = np.array(num_packs)  # packs of each group
        self.lengths = self._sums(lengths)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def _sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sum over the items of each pack, int64."""
        return np.add.reduceat(values[self._items], self._bounds[:-1], dtype=np.int64)

    def _items_of(self, pack: int) -> list[int]:
        return self._items[self._bounds[pack] : self._bounds[pack + 1]].tolist()

    @property
    def outline(self) -> Outline | None:
        """`outline` of the items; see `Widths`."""
        of_items = getattr(self.items, "outline", None)
        return of_items and (lambda batch: of_items([[item for pack in packs for item in self._items_of(pack)]
                                                     for packs in batch]))

    @property
    def truncated(self) -> np.ndarray:
        """Tokens truncated from the rows of each pack."""
        return self._sums(self.items.truncated)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        if index < 0:
            return None
        # Rows of the same draw, numbered as in `NumberedSet`.
        draw, pack = divmod(index, len(self))
        rows = [self.items[item + draw * len(self.items)] for item in self._items_of(pack)]
        sizes = [len(row["input_ids"]) for row in rows]  # tokens of each row; they add up to T
        # A copy: the stored rows must not change below.
        labels = np.concatenate([row["labels"] for row in rows])
        labels[np.cumsum([0, *sizes[:-1]])] = IGNORED  # the token before belongs to another document
        further: dict[str, Any] = {}
        if "weight" in rows[0]:
            further["weight"] = np.repeat([row["weight"] for row in rows], sizes)
        if PLACES in rows[0]:
            further[PLACES] = np.concatenate([row[PLACES] for row in rows])
        if images := [row[INPUTS] for row in rows if INPUTS in row]:
            further[INPUTS] = join_inputs(images)
        return {"input_ids": np.concatenate([row["input_ids"] for row in rows]), "labels": labels, **further,
                "position_ids": np.concatenate([np.arange(size) for size in sizes]),
                # From 1, as the collator pads with 0.
                "segment_ids": np.repeat(np.arange(1, len(rows) + 1), sizes),
                "row": np.repeat([row["row"] for row in rows], sizes), "draw": draw, "index": rows[0]["index"]}
