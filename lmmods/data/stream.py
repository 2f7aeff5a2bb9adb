"""Training on more than memory or disk holds: rows are encoded window by window, as they are read.

A window of rows is a small data set of its own, arranged, shuffled and batched like any other. Every rank reads and
encodes the whole stream and takes its share of the batches. So the batches do not depend on the number of ranks, and a
position is three numbers; the price is that tokenising does not get faster with ranks.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from lmmods.data.building import encode_batches
from lmmods.data.encoded import Encoded, Encoder
from lmmods.data.loader import Batch, Share
from lmmods.data.readers import Row
from lmmods.data.rows import RowSet
from lmmods.data.sampler import BatchOrder, deal
from lmmods.data.store import MemoryStore
from lmmods.errors import UserError

ENDLESS = 10**12  # length of a loader that never ends; sized, so that nobody fetches ahead to find its end


@dataclass
class StreamSource:
    """One source of a stream.

    Args:
        rows: Starts reading anew at each call.
        encoder: Rows to ids.
        weight: Rows of this source come in proportion to its weight until it is exhausted.
        info: What was found out about it.
    """

    rows: Callable[[], Iterator[Row]]
    encoder: Encoder
    weight: float
    info: dict[str, Any]


def mixed_windows(sources: list[StreamSource], size: int, seed: int, epoch: int) -> Iterator[list[list[Row]]]:
    """Windows of `size` rows drawn from the sources, rows of each source in a list of its own."""
    random = np.random.default_rng([seed, epoch])
    readers = [source.rows() for source in sources]
    weights = np.array([source.weight for source in sources], float)
    window: list[list[Row]] = [[] for _ in sources]
    while weights.any():
        chosen = (
            0
            if len(sources) == 1
            else int(np.searchsorted(np.cumsum(weights) / weights.sum(), random.random(), "right"))
        )
        row = next(readers[chosen], None)
        if row is None:
            weights[chosen] = 0
            continue
        window[chosen].append(row)
        if sum(map(len, window)) == size:
            yield window
            window = [[] for _ in sources]
    if any(window):
        yield window


def encode_window(sources: list[StreamSource], window: list[list[Row]], num_proc: int = 1) -> RowSet:
    """Rows of a window as a set in memory."""
    stores = []
    for source, rows in zip(sources, window, strict=True):
        if rows:
            parts: list[tuple[list[Row], Encoded]] = list(encode_batches(iter(rows), source.encoder, num_proc))
            stores.append(MemoryStore(parts, source.info))
    return RowSet(stores)


class StreamLoader:
    """Training batches without end, epoch after epoch of a stream, with a position that can be saved.

    Args:
        sources: What is read.
        window_size: Rows that are shuffled together.
        arrange: Encoded rows -> data set of rows for batches, with `lengths`.
        order_of: (lengths, epoch, window) -> global micro-batches of a window.
        collate: Rows -> batch.
        share: This process's part.
        settings: Seed, batch size and window size: a position can only be continued with the same.
        num_proc: Processes that tokenise.
    """

    def __init__(
        self,
        sources: list[StreamSource],
        arrange: Callable[[RowSet], Any],
        order_of: Callable[[np.ndarray, int, int], BatchOrder],
        collate: Callable[[list], Batch],
        share: Share,
        settings: dict[str, int],
        num_proc: int = 1,
    ) -> None:
        self._sources, self._arrange, self._order_of, self._collate = sources, arrange, order_of, collate
        self._share, self._settings, self._num_proc = share, settings, num_proc
        self._epoch = self._window = self._handed_out = 0

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[Batch]:
        with ThreadPoolExecutor(1) as ahead:  # the next window is encoded while this one is trained on
            windows = self._windows()
            upcoming = ahead.submit(next, windows)
            while True:
                self._epoch, self._window, items = upcoming.result()
                upcoming = ahead.submit(next, windows)
                yield from self._batches(items)
                self._window, self._handed_out = self._window + 1, 0

    def _windows(self) -> Iterator[tuple[int, int, Any]]:
        """(epoch, window, data set) from the position on, without end."""
        start = self._window
        for epoch in count(self._epoch):
            found = False
            for number, window in enumerate(
                mixed_windows(self._sources, self._settings["window_size"], self._settings["seed"], epoch)
            ):
                found = True
                if number < start:
                    continue
                rows = encode_window(self._sources, window, self._num_proc)
                if len(rows):
                    yield epoch, number, self._arrange(rows)
            if not found:
                raise UserError("the stream is empty: no row was found in data.source")
            start = 0

    def _batches(self, items: Any) -> Iterator[Batch]:
        order = self._order_of(items.lengths, self._epoch, self._window)
        rank, world_size = self._share.rank, self._share.world_size
        for numbers in deal(order, self._handed_out, rank, world_size):
            self._handed_out = min(self._handed_out + world_size, len(order))
            yield self._collate([items[number] for number in numbers])

    def state_dict(self) -> dict[str, Any]:
        """Position as plain JSON: epoch, window of it, global micro-batches handed out of that, and the settings."""
        return {"epoch": self._epoch, "window": self._window, "batches": self._handed_out, **self._settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, also on another number of ranks.

        Raises:
            UserError: The position belongs to other settings.
        """
        for key, value in self._settings.items():
            if state.get(key) != value:
                raise UserError(
                    f"cannot resume: the checkpoint was written with {key} {state.get(key)}, now it is {value}; "
                    "restore the old setting, or start a new run"
                )
        self._epoch, self._window, self._handed_out = state["epoch"], state["window"], state["batches"]
