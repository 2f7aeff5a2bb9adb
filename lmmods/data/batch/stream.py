"""Streaming: training on more data than fits in memory or on disk. Rows are encoded buffer by buffer while read.

A shuffle buffer of rows is a small dataset, arranged and shuffled like any other. The rows of all buffers are
concatenated and then divided into batches, so that each step has the same rows under every batch split. Every rank
reads and encodes the whole stream and takes its shard of the batches. So the batches do not depend on the number of
ranks, and a position is a few numbers; the price is that tokenising does not get faster with more ranks.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Literal

import numpy as np

from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.data.batch.loader import Batch, Shard, check_same
from lmmods.data.encode.encoder import Encoded, Encoder, RowCounts, describe_dropped
from lmmods.data.order.sampler import BatchOrder, OrderRule, batches_of_rank
from lmmods.data.read.readers import Row
from lmmods.data.store.arrow_store import MemoryStore
from lmmods.data.store.cache import encode_batches
from lmmods.data.store.rows import RowSet

Rule = Literal["upsample", "exhaust", "concat"]
ENDLESS = 10**12  # `len` of an endless loader: without a length, Lightning would prefetch to find its end


@dataclass
class StreamSource:
    """One source of a stream.

    Args:
        rows: Each call starts reading from the start.
        weight: Rows are sampled in proportion to their source's weight.
        info: Facts about the source, for the report.
    """

    rows: Callable[[], Iterator[Row]]
    encoder: Encoder
    weight: float
    info: dict[str, Any]


def shuffle_buffers(sources: list[StreamSource], size: int, seed: int, epoch: int, rule: Rule = "concat"
                    ) -> Iterator[list[list[Row]]]:
    """Yield buffers of `size` rows sampled from the sources, as one list of rows per source.

    Args:
        rule: Where the pass ends, as in `Mixing`.
    """
    random = np.random.default_rng([seed, epoch])
    buffer: list[list[Row]] = [[] for _ in sources]
    for source_index, row in (_sample_once if rule == "concat" else _sample_again)(sources, random, rule):
        buffer[source_index].append(row)
        if sum(map(len, buffer)) == size:
            yield buffer
            buffer = [[] for _ in sources]
    if any(buffer):
        yield buffer


def _sample_once(sources: list[StreamSource], random: np.random.Generator, rule: Rule) -> Iterator[tuple[int, Row]]:
    """Yield the index of a source and its next row, until all have ended."""
    readers = [source.rows() for source in sources]
    weights = np.array([source.weight for source in sources], float)
    while weights.any():
        # A single source takes no random numbers.
        source_index = _sample_source(weights, random) if len(sources) > 1 else 0
        row = next(readers[source_index], None)
        if row is None:
            weights[source_index] = 0
            continue
        yield source_index, row


def _sample_again(sources: list[StreamSource], random: np.random.Generator, rule: Rule) -> Iterator[tuple[int, Row]]:
    """Yield the index of a source and its next row, up to the last row of the first source that ends (`exhaust`) or
    of the last one, while the others are read again (`upsample`).
    """
    weights = np.array([source.weight for source in sources], float)
    readers = [source.rows() for source in sources]
    # One row ahead of what is yielded, to know which row is a source's last.
    upcoming = [next(reader, None) for reader in readers]
    has_ended = np.array([row is None for row in upcoming])
    while not (has_ended.any() if rule == "exhaust" else has_ended.all()):
        source_index = _sample_source(weights, random)
        row, upcoming[source_index] = upcoming[source_index], next(readers[source_index], None)
        if row is None:  # a source without rows
            continue
        yield source_index, row
        if upcoming[source_index] is None:
            has_ended[source_index] = True
            readers[source_index] = sources[source_index].rows()
            upcoming[source_index] = next(readers[source_index], None)


def _sample_source(weights: np.ndarray, random: np.random.Generator) -> int:
    """Sample a source by the weights. "right", so that a source of weight 0 is never sampled."""
    return int(np.searchsorted(np.cumsum(weights) / weights.sum(), random.random(), "right"))


def draw_number(epoch: int, buffer: int) -> int:
    """Return a distinct number for each buffer of each epoch (Cantor's pairing function)."""
    # epoch * buffers + buffer would need the number of buffers, which is unknown.
    return (epoch + buffer) * (epoch + buffer + 1) // 2 + buffer


def encode_buffer(sources: list[StreamSource], buffer: list[list[Row]], row_counts: list[RowCounts], num_proc: int = 1
                  ) -> RowSet:
    """Encode the rows of a buffer to a set in memory, counted in the `row_counts` of their sources."""
    stores = []
    for source, rows, source_counts in zip(sources, buffer, row_counts, strict=True):
        parts: list[tuple[list[Row], Encoded]] = list(encode_batches(iter(rows), source.encoder, num_proc))
        for batch, encoded in parts:
            # Counts accumulate over buffers; the store has the counts of its own rows.
            source_counts.add(batch, encoded)
        # A source without rows in this buffer still needs its columns.
        stores.append(MemoryStore(parts or [([], source.encoder([]))], source.info))
    return RowSet(stores)


def first_usable_buffer(sources: list[StreamSource], size: int, seed: int, rule: Rule = "concat") -> RowSet:
    """Return the first buffer with a usable row; the counts of its stores start with the stream.

    Raises:
        UserError: There is no such row in the whole stream.
    """
    row_counts = [RowCounts() for _ in sources]
    for buffer in shuffle_buffers(sources, size, seed, 0, rule):
        rows = encode_buffer(sources, buffer, row_counts)
        if len(rows):
            for store, source_counts in zip(rows.stores, row_counts, strict=True):
                store.info |= source_counts.summary()
            return rows
    raise _no_usable_rows(sources, row_counts)


def _no_usable_rows(sources: list[StreamSource], row_counts: list[RowCounts]) -> UserError:
    counts = "; ".join(f"{source.info['path']}: {describe_dropped(source_counts.summary())}"
                       for source, source_counts in zip(sources, row_counts, strict=True))
    return UserError(f"data.source: the whole stream has no usable row ({counts})")


@dataclass(frozen=True)
class Position:
    """Position in a stream.

    Args:
        epoch: Index of the pass over the stream.
        buffer: Index of the buffer within its epoch.
        done: Rows of the buffer that have been handed out (micro-batches under the order of earlier versions).
        rows_before: Rows that the current step already had when the buffer started.
    """

    epoch: int = 0
    buffer: int = 0
    done: int = 0
    rows_before: int = 0


class StreamLoader:
    """Endless training batches over epochs of a stream, with a position that can be saved.

    Args:
        arrange: Converts encoded rows to the dataset of items, with `lengths`.
        order_of: Maps (lengths, epoch, buffer, order rule of the run, rows that the current step has) to the global
            micro-batches of a buffer.
        batch_size: Rows per micro-batch.
        settings: Seed and size of the buffer; a position can only be continued with the same ones.
        mixing: Where a pass over the stream ends, as in `Mixing`.
    """

    def __init__(self, sources: list[StreamSource], arrange: Callable[[RowSet], Any],
                 order_of: Callable[[np.ndarray, int, int, OrderRule, int], BatchOrder],
                 collate: Callable[[list], Batch], shard: Shard, batch_size: int, settings: dict[str, int],
                 num_proc: int = 1, mixing: Rule = "concat") -> None:
        self._mixing = mixing
        self._sources, self._arrange, self._order_of, self._collate = sources, arrange, order_of, collate
        self._shard, self._batch_size, self._settings, self._num_proc = shard, batch_size, settings, num_proc
        self._rule, self._position = OrderRule(batch_size * shard.batches_per_step), Position()
        self._reported: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[Batch]:
        if self._rule.version == 1:
            yield from self._batches_by_buffer()
            return
        size, world_size = self._batch_size, self._shard.world_size
        # Each rank collates its share of the rows of a group; all ranks read all of them.
        own_rows = slice(self._shard.rank * size, (self._shard.rank + 1) * size)
        rows = self._rows()
        while group := list(islice(rows, size * world_size)):
            # Set before the batch is handed out: a checkpoint after its step must not repeat it.
            self._position = group[-1][0]
            yield self._collate([items[index] for _, items, index in group[own_rows]])

    def _rows(self) -> Iterator[tuple[Position, Any, int]]:
        """Yield every row from the position on: the position after it, its dataset and its index there."""
        rows_before, done = self._position.rows_before, self._position.done
        for epoch, buffer, items in self._read_ahead():
            rows = self._order_of(items.lengths, epoch, buffer, self._rule, rows_before).rows.tolist()
            for index in range(done, len(rows)):
                yield Position(epoch, buffer, index + 1, rows_before), items, rows[index]
            # A step that this buffer leaves incomplete is completed by the next one.
            rows_before, done = (rows_before + len(rows)) % self._rule.rows_per_step, 0

    def _batches_by_buffer(self) -> Iterator[Batch]:
        """Yield batches in the order of earlier versions: the last batch of a buffer may be short."""
        rank, world_size = self._shard.rank, self._shard.world_size
        done = self._position.done
        for epoch, buffer, items in self._read_ahead():
            order = self._order_of(items.lengths, epoch, buffer, self._rule, 0)
            for indices in batches_of_rank(order, done, rank, world_size):
                done = min(done + world_size, len(order))
                self._position = Position(epoch, buffer, done)
                yield self._collate([items[index] for index in indices])
            done = 0

    def _read_ahead(self) -> Iterator[tuple[int, int, Any]]:
        """Iterate over `_buffers`, encoding the next buffer in a thread while the current one is used."""
        with ThreadPoolExecutor(1) as ahead:
            buffers = self._buffers()
            upcoming = ahead.submit(next, buffers)
            while True:
                # Also raises what went wrong while reading.
                buffer = upcoming.result()
                upcoming = ahead.submit(next, buffers)
                yield buffer

    def _buffers(self) -> Iterator[tuple[int, int, Any]]:
        """Yield (epoch, buffer, dataset) from the position on, endlessly."""
        start = self._position.buffer
        for epoch in count(self._position.epoch):
            row_counts = [RowCounts() for _ in self._sources]
            useful = start > 0  # buffers before the position had usable rows
            size, seed = self._settings["window_size"], self._settings["seed"]
            for index, buffer in enumerate(shuffle_buffers(self._sources, size, seed, epoch, self._mixing)):
                # Sampled again, since later buffers depend on it, but not encoded.
                if index < start:
                    continue
                rows = encode_buffer(self._sources, buffer, row_counts, self._num_proc)
                self._report_new_reasons(row_counts)
                items = self._arrange(rows) if len(rows) else []
                if len(items):
                    useful = True
                    yield epoch, index, items
            if not useful:
                raise _no_usable_rows(self._sources, row_counts)
            self._report_dropped(epoch, row_counts)
            # Only the first epoch starts in the middle.
            start = 0

    def _report_new_reasons(self, row_counts: list[RowCounts]) -> None:
        for source, source_counts in zip(self._sources, row_counts, strict=True):
            for reason, entry in source_counts.summary()["dropped"].items():
                if (source.info["path"], reason) not in self._reported:
                    self._reported.add((source.info["path"], reason))
                    say(f"The stream {source.info['path']} drops rows: {reason} (first {entry['first'][0]}).")

    def _report_dropped(self, epoch: int, row_counts: list[RowCounts]) -> None:
        for source, source_counts in zip(self._sources, row_counts, strict=True):
            if (summary := source_counts.summary())["dropped"]:
                say(f"Pass {epoch + 1} of the stream {source.info['path']}: {describe_dropped(summary)}.")

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain JSON: epoch, buffer (`window`), its rows that were handed out, settings."""
        position, is_old = self._position, self._rule.version == 1
        counts = {"batches": position.done} if is_old else {"rows": position.done, "begun": position.rows_before}
        return {"epoch": position.epoch, "window": position.buffer, **counts, "batch_size": self._batch_size,
                **self._settings, **self._rule.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, also with another batch size or number of ranks.

        Raises:
            UserError: The position belongs to other settings, or is of an earlier version's order and another batch
                size.
        """
        check_same(state, self._settings)
        self._rule = OrderRule.from_state(state)
        self._rule.check(state, self._batch_size)
        # Version 1 counts micro-batches instead of rows.
        done: Any = state.get("rows", state.get("batches"))
        self._position = Position(state["epoch"], state["window"], done, state.get("begun", 0))
