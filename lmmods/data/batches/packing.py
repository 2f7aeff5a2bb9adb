"""Packing of several rows into one of `max_length` tokens, separated by segment and position ids."""

from bisect import bisect_left, insort
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lmmods.core.labels import IGNORED

CHUNK = 50_000  # rows packed at a time; bounds memory, and larger chunks pack no better


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Place each row, longest first, into the fullest pack that still has room (best-fit decreasing).

    Args:
        lengths: Tokens of each row, none above `capacity`.
        capacity: Tokens of a pack.

    Returns:
        The row numbers of each pack. Every row is in exactly one.
    """
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # free tokens -> packs
    rooms: list[int] = []  # the keys of with_room, sorted
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        place = bisect_left(rooms, length)  # smallest room that suffices
        if place == len(rooms):
            pack, room = len(packs), capacity
            packs.append([])
        else:
            room = rooms[place]
            pack = with_room[room].pop()
            # `rooms` holds only sizes that some pack has.
            if not with_room[room]:
                del with_room[room], rooms[place]
        packs[pack].append(row)
        left = room - length
        if left not in with_room:
            with_room[left] = []
            insort(rooms, left)
        with_room[left].append(pack)
    return packs


class PackedSet(Dataset):
    """Items packed into rows of at most `max_length` tokens. Item -1 is None, a padding row.

    The assignment of items to packs is drawn once from the seed, so the number of packs is the same in each epoch. Pack
    number + draw * len(self) consists of the items of that draw.

    Args:
        items: Data set with `lengths` and items {input_ids, labels, index, row, draw}, optionally `weight`, numbered
            like those of `NumberedSet`.
    """

    def __init__(self, items: Any, max_length: int, seed: int) -> None:
        self.items = items
        lengths = items.lengths
        # Shuffled, so that each chunk is a sample of all rows rather than of one source.
        order = np.random.default_rng([seed, len(lengths)]).permutation(len(lengths))
        self._packs = [order[start : start + CHUNK][pack] for start in range(0, len(order), CHUNK)
                       for pack in best_fit_decreasing(lengths[order[start : start + CHUNK]], max_length)]
        self.lengths = np.array([lengths[pack].sum() for pack in self._packs], np.int64)

    def __len__(self) -> int:
        return len(self._packs)

    @property
    def truncated(self) -> np.ndarray:
        """Tokens cut from the rows of each pack."""
        truncated = self.items.truncated
        return np.array([truncated[pack].sum() for pack in self._packs], np.int64)

    def __getitem__(self, number: int) -> dict[str, Any] | None:
        if number < 0:
            return None
        # The rows are those of the same draw, in the numbering of `NumberedSet`.
        draw, place = divmod(number, len(self))
        rows = [self.items[item + draw * len(self.items)] for item in self._packs[place].tolist()]
        sizes = [len(row["input_ids"]) for row in rows]  # tokens of each row; they add up to T
        # A copy: the stored rows must not change below.
        labels = np.concatenate([row["labels"] for row in rows])
        labels[np.cumsum([0, *sizes[:-1]])] = IGNORED  # the token before belongs to another document
        weights = {"weight": np.repeat([row["weight"] for row in rows], sizes)} if "weight" in rows[0] else {}
        return {"input_ids": np.concatenate([row["input_ids"] for row in rows]), "labels": labels, **weights,
                "position_ids": np.concatenate([np.arange(size) for size in sizes]),
                # From 1, as the collator pads with 0.
                "segment_ids": np.repeat(np.arange(1, len(rows) + 1), sizes),
                "row": np.repeat([row["row"] for row in rows], sizes), "draw": draw, "index": rows[0]["index"]}
