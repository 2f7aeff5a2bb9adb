"""Packing of several rows into one of `max_length` tokens, separated by segment and position ids."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lmmods.core.labels import IGNORED
from lmmods.data.batch.collate import PLACES
from lmmods.data.order.sampler import shuffle_rows, stable_descending

CHUNK = 50_000  # rows packed at a time; bounds memory, and larger chunks pack no better


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put each row, longest first, into the fullest pack that still has space (best-fit decreasing).

    Rows of one length are placed together: as many as fit go into the fullest pack, the next into the one after it.

    Args:
        lengths: Tokens of each row, none above `capacity`.
        capacity: Tokens of a pack.

    Returns:
        Row numbers, pack after pack, and the place of each pack's first one there, with the end as last entry. Every
        row is in exactly one pack.
    """
    order = stable_descending(lengths)
    pack_of = np.empty(len(lengths), np.int64)  # of the rows in this order
    num_packs = 0
    with_room: dict[int, list[int]] = {}  # free tokens -> packs, the one to fill next last
    rooms: list[int] = []  # the keys of with_room, sorted

    def make_room(left: int, packs: list[int]) -> None:
        if packs and left not in with_room:
            with_room[left] = []
            insort(rooms, left)
        if packs:
            with_room[left] += packs

    ends = np.flatnonzero(np.diff(lengths[order], append=-1)) + 1
    start = 0
    for end in ends.tolist():
        length = int(lengths[order[start]])
        while start < end:
            count = end - start
            index = bisect_left(rooms, length)  # smallest room that suffices
            room = rooms[index] if index < len(rooms) else capacity
            per_pack = room // length if length else count
            wanted = -(-count // per_pack)
            if index == len(rooms):
                packs = list(range(num_packs, num_packs + wanted))
                num_packs += wanted
            else:
                packs = with_room[room][: -wanted - 1 : -1]
                del with_room[room][-wanted:]
                # `rooms` contains only sizes that some pack has.
                if not with_room[room]:
                    del with_room[room], rooms[index]
            placed = min(count, per_pack * len(packs))
            pack_of[start : start + placed] = np.repeat(packs, per_pack)[:placed]
            full, remainder = divmod(placed, per_pack)
            make_room(room - per_pack * length, packs[:full])
            make_room(room - remainder * length, packs[full:])
            start += placed
    by_pack = stable_descending(num_packs - pack_of)
    return order[by_pack], np.concatenate([[0], np.cumsum(np.bincount(pack_of, minlength=num_packs))])


class PackedSet(Dataset):
    """Items packed into rows of at most `max_length` tokens. Item -1 is None, a padding row.

    The assignment of items to packs is drawn once from the seed, so the number of packs is the same in each epoch. Pack
    number + draw * len(self) consists of the items of that draw.

    Args:
        items: Dataset with `lengths` and items {input_ids, labels, index, row, draw}, optionally `weight`, numbered
            like those of `NumberedSet`.
        groups: Numbers of items, in their order, that are packed apart: the items of each source. None packs all of
            them together.
    """

    def __init__(self, items: Any, max_length: int, seed: int, groups: Iterable[int] | None = None) -> None:
        self.items = items
        lengths = items.lengths
        # Items pack after pack, and where each pack begins: a million lists would take gigabytes.
        packed, ends, num_packs, begin = [np.empty(0, np.int32)], [np.zeros(1, np.int64)], [], 0
        for size in [len(lengths)] if groups is None else groups:
            # Shuffled, so that each chunk is a sample of all rows rather than of one source.
            order = shuffle_rows(int(size), np.random.default_rng([seed, int(size)])) + begin
            num_packs.append(0)
            for start in range(0, len(order), CHUNK):
                chunk = order[start : start + CHUNK]
                places, bounds = best_fit_decreasing(lengths[chunk], max_length)
                packed.append(chunk[places])
                ends.append(begin + start + bounds[1:])
                num_packs[-1] += len(bounds) - 1
            begin += int(size)
        self._items, self._bounds = np.concatenate(packed), np.concatenate(ends)
        self.source_sizes = np.array(num_packs)  # packs of each group
        self.lengths = self._sums(lengths)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def _sums(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sum over the items of each pack, int64."""
        return np.add.reduceat(numbers[self._items], self._bounds[:-1], dtype=np.int64)

    @property
    def truncated(self) -> np.ndarray:
        """Tokens truncated from the rows of each pack."""
        return self._sums(self.items.truncated)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        if index < 0:
            return None
        # The rows are those of the same draw, in the numbering of `NumberedSet`.
        draw, pack = divmod(index, len(self))
        items = self._items[self._bounds[pack] : self._bounds[pack + 1]].tolist()
        rows = [self.items[item + draw * len(self.items)] for item in items]
        sizes = [len(row["input_ids"]) for row in rows]  # tokens of each row; they add up to T
        # A copy: the stored rows must not change below.
        labels = np.concatenate([row["labels"] for row in rows])
        labels[np.cumsum([0, *sizes[:-1]])] = IGNORED  # the token before belongs to another document
        weights = {"weight": np.repeat([row["weight"] for row in rows], sizes)} if "weight" in rows[0] else {}
        if PLACES in rows[0]:
            weights[PLACES] = np.concatenate([row[PLACES] for row in rows])
        return {"input_ids": np.concatenate([row["input_ids"] for row in rows]), "labels": labels, **weights,
                "position_ids": np.concatenate([np.arange(size) for size in sizes]),
                # From 1, as the collator pads with 0.
                "segment_ids": np.repeat(np.arange(1, len(rows) + 1), sizes),
                "row": np.repeat([row["row"] for row in rows], sizes), "draw": draw, "index": rows[0]["index"]}
