"""The tokenised store: Arrow files in the cache, written once, memory-mapped by every process.

A store is a folder named by the fingerprint of everything that matters:

    encoded.arrow   one row per kept row: the encoder's columns, and `index`, which points into rows.arrow
    rows.arrow      one row per row read: `row` (JSON), `file` (number), `line`
    info.json       file names, counts, and notes for the report
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from lmmods.data.readers import Row
from lmmods.errors import UserError

ROWS_PER_BATCH = 1000
CHARACTERS_PER_BATCH = 1 << 20
EXAMPLES_PER_REASON = 3


class Ragged(NamedTuple):
    """A column of lists: all values in a row, and the length of each list."""

    values: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, lists: list[np.ndarray]) -> "Ragged":
        """Column of these int32 arrays."""
        values = np.concatenate(lists) if lists else np.empty(0, np.int32)
        return cls(values.astype(np.int32, copy=False), np.array([len(item) for item in lists], np.int64))


class Encoded(NamedTuple):
    """What an encoder made of a batch of rows.

    Args:
        columns: `input_ids` (Ragged) and others, one entry per kept row.
        positions: Place in the batch of each kept row.
        dropped: (place in the batch, reason) of each other row.
        counts: Sums for the report.
    """

    columns: dict[str, Ragged | np.ndarray]
    positions: np.ndarray
    dropped: list[tuple[int, str]]
    counts: Counter


class RowError(Exception):
    """A row that must stop the run: RowError(place in the batch, message)."""


class Encoder(Protocol):
    """Rows to token ids; picklable. Raises RowError."""

    def __call__(self, rows: list[dict[str, Any]]) -> Encoded: ...


def fingerprint(settings: dict[str, Any]) -> str:
    """Hash (32 hex digits) of settings and of the code of this package."""
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=repr).encode(), digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def build_store(
    folder: Path,
    rows: Iterable[Row],
    encoder: Encoder,
    num_proc: int = 1,
    info: dict[str, Any] | None = None,
) -> None:
    """Encode `rows` and write the store `folder`, or leave the one that another process finished first.

    Args:
        folder: Where the store is to be. Until it is complete it has another name.
        rows: What to encode; read once, never held as a whole.
        encoder: Rows to ids.
        num_proc: Processes that encode; 1 works in this process.
        info: Goes into info.json.

    Raises:
        UserError: A row is broken, or the cache cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    except OSError as error:
        raise UserError(
            f"{folder.parent}: the cache cannot be written ({error}); set data.cache_dir or LMMODS_CACHE "
            "to a folder that can"
        ) from error
    try:
        # a bar on terminals only, and only where there is something to wait for
        with (
            _Writer(temporary) as writer,
            tqdm(desc="tokenising", unit=" rows", disable=None, delay=2) as bar,
        ):
            for batch, encoded in encode_batches(rows, encoder, num_proc):
                writer.add(batch, encoded)
                bar.update(len(batch))
        (temporary / "info.json").write_text(json.dumps({**(info or {}), **writer.summary()}))
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "info.json").is_file():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Batches of about equal text, so that one with long documents takes no more memory than others."""
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += sum(len(value) for value in row.values.values() if isinstance(value, str))
        if len(batch) >= ROWS_PER_BATCH or size >= CHARACTERS_PER_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_batches(rows: Iterable[Row], encoder: Encoder, num_proc: int) -> Iterator[tuple[list[Row], Encoded]]:
    """Batches of rows and what the encoder makes of them, in order; a few are under way at a time.

    Raises:
        UserError: The encoder refuses a row.
    """
    batches = _batches(rows)
    with _executor(encoder, num_proc) as (pool, encode):
        waiting: deque = deque()
        try:
            while batch := next(batches, None):
                waiting.append((batch, pool.submit(encode, [row.values for row in batch])))
                if len(waiting) > 2 * num_proc:
                    yield _result(*waiting.popleft())
            while waiting:
                yield _result(*waiting.popleft())
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _executor(encoder: Encoder, num_proc: int) -> Iterator[tuple[Executor, Callable]]:
    """Where encoding runs. One process has two threads: one's Python works while the other's tokenizer does."""
    if num_proc == 1:
        with ThreadPoolExecutor(2) as threads:
            yield threads, encoder
        return
    # Not forked: this process may hold JAX's threads. Each worker has one core, so the tokenizer's own threads are off.
    with ProcessPoolExecutor(num_proc, get_context("forkserver"), _start_worker, (encoder,)) as processes:
        yield processes, _encode_in_worker


def _result(batch: list[Row], future: Future) -> tuple[list[Row], Encoded]:
    try:
        return batch, future.result()
    except RowError as error:
        place, message = error.args
        raise UserError(f"{batch[place].file}:{batch[place].line}: {message}") from error


_worker_encoder: Encoder | None = None


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_encoder = encoder


def _encode_in_worker(rows: list[dict[str, Any]]) -> Encoded:
    assert _worker_encoder is not None
    return _worker_encoder(rows)


class Tally:
    """Adds up what encoders counted and dropped."""

    def __init__(self) -> None:
        self._counts: Counter = Counter()
        self._dropped: dict[str, dict[str, Any]] = {}

    def add(self, batch: list[Row], encoded: Encoded) -> None:
        """Count one batch."""
        for place, reason in encoded.dropped:
            entry = self._dropped.setdefault(reason, {"rows": 0, "first": []})
            entry["rows"] += 1
            if len(entry["first"]) < EXAMPLES_PER_REASON:
                entry["first"].append(f"{batch[place].file}:{batch[place].line}")
        self._counts.update(encoded.counts)

    def summary(self) -> dict[str, Any]:
        """Counts, and for each reason to drop a row their number and the first places; plain JSON."""
        return {"dropped": self._dropped, "counts": dict(self._counts)}


class _Writer:
    """Writes the two tables batch by batch and adds up the counts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._encoded: pa.RecordBatchStreamWriter | None = None
        self._rows: pa.RecordBatchStreamWriter | None = None
        self._files: dict[str, int] = {}
        self._num_rows = self._num_kept = 0
        self.tally = Tally()

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *error: object) -> None:
        for writer in (self._encoded, self._rows):
            if writer is not None:
                writer.close()

    def add(self, batch: list[Row], encoded: Encoded) -> None:
        """Append a batch of rows and what became of them."""
        self._rows = self._write(
            self._rows,
            "rows.arrow",
            {
                "row": pa.array(
                    [json.dumps(row.values, default=str) for row in batch],
                    pa.large_string(),
                ),
                "file": np.array([self._files.setdefault(row.file, len(self._files)) for row in batch], np.int32),
                "line": np.array([row.line for row in batch], np.int64),
            },
        )
        columns = {name: _arrow_column(column) for name, column in encoded.columns.items()}
        columns["index"] = pa.array(encoded.positions.astype(np.int64) + self._num_rows)
        self._encoded = self._write(self._encoded, "encoded.arrow", columns)
        self.tally.add(batch, encoded)
        self._num_rows += len(batch)
        self._num_kept += len(encoded.positions)

    def _write(self, writer, name: str, columns: dict):  # noqa: ANN001, ANN202 - pyarrow's writer
        table = pa.record_batch(columns)
        writer = writer or pa.ipc.new_stream(str(self._folder / name), table.schema)
        writer.write_batch(table)
        return writer

    def summary(self) -> dict[str, Any]:
        """Counts of all batches, plain JSON."""
        return {
            "files": list(self._files),
            "rows_read": self._num_rows,
            "rows_kept": self._num_kept,
            **self.tally.summary(),
        }


def _arrow_column(column: Ragged | np.ndarray) -> pa.Array:
    if not isinstance(column, Ragged):
        return pa.array(column)
    offsets = np.concatenate([[0], np.cumsum(column.lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(column.values))


class Store:
    """A finished store, memory-mapped. Pickles by path.

    Args:
        folder: The store's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info: dict[str, Any] = json.loads((folder / "info.json").read_text())
        self._columns: dict[str, _ListColumn | np.ndarray] = {}
        for name, column in _open_table(folder / "encoded.arrow").items():
            is_list = pa.types.is_list(column.type)
            self._columns[name] = _ListColumn(column) if is_list else column.to_numpy()
        self._rows = _open_table(folder / "rows.arrow")

    def __reduce__(self):  # noqa: ANN204
        return Store, (self.folder,)

    @property
    def name(self) -> str:
        """Tells this store from others."""
        return self.folder.name

    def __len__(self) -> int:
        """Number of kept rows."""
        return self.info["rows_kept"]

    def row(self, number: int) -> dict[str, Any]:
        """The encoder's columns of kept row `number`; lists as int32 arrays that read the file."""
        return {name: column[number] for name, column in self._columns.items()}

    def column(self, name: str) -> np.ndarray:
        """A column of numbers, or the lengths of a column of lists."""
        column = self._columns[name]
        return column.lengths if isinstance(column, _ListColumn) else column

    def source_row(self, index: int) -> dict[str, Any]:
        """The row as read. `index` counts all rows read."""
        return json.loads(self._rows["row"][index].as_py())

    def location(self, index: int) -> str:
        """file:line of the row as read."""
        return f"{self.info['files'][self._rows['file'][index].as_py()]}:{self._rows['line'][index].as_py()}"


class MemoryStore:
    """The rows of one window of a stream, with the interface of Store.

    Args:
        parts: Batches of rows and what the encoder made of them.
        info: What was found out about the source.
    """

    def __init__(self, parts: list[tuple[list[Row], Encoded]], info: dict[str, Any]) -> None:
        self._rows = [row for batch, _ in parts for row in batch]
        starts = np.cumsum([0] + [len(batch) for batch, _ in parts])
        self._columns: dict[str, _ListColumn | np.ndarray] = {}
        for name, column in parts[0][1].columns.items():
            pieces = [encoded.columns[name] for _, encoded in parts]
            self._columns[name] = (
                _ListColumn(pa.chunked_array([_arrow_column(piece) for piece in pieces]))
                if isinstance(column, Ragged)
                else np.concatenate(pieces)
            )
        self._columns["index"] = np.concatenate(
            [encoded.positions + start for (_, encoded), start in zip(parts, starts, strict=False)]
        )
        tally = Tally()
        for batch, encoded in parts:
            tally.add(batch, encoded)
        self.info = {**info, "rows_read": len(self._rows), "rows_kept": len(self._columns["index"]), **tally.summary()}

    def __len__(self) -> int:
        return self.info["rows_kept"]

    @property
    def name(self) -> str:
        """Tells this window's source from others."""
        return self.info["path"]

    row = Store.row
    column = Store.column

    def source_row(self, index: int) -> dict[str, Any]:
        """The row as read."""
        return self._rows[index].values

    def location(self, index: int) -> str:
        """file:line of the row."""
        return f"{self._rows[index].file}:{self._rows[index].line}"


def _open_table(path: Path) -> dict[str, pa.ChunkedArray]:
    table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    return dict(zip(table.column_names, table.columns, strict=False))


class _ListColumn:
    """Rows of an Arrow list column as numpy views: no copy, about a microsecond each."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._values = [chunk.values.to_numpy() for chunk in column.chunks]
        self._offsets = [chunk.offsets.to_numpy() for chunk in column.chunks]
        self._starts = np.cumsum([0] + [len(chunk) for chunk in column.chunks])
        self.lengths = np.concatenate([np.diff(offsets) for offsets in self._offsets] or [[]]).astype(np.int64)

    def __getitem__(self, number: int) -> np.ndarray:
        chunk = int(np.searchsorted(self._starts, number, "right")) - 1
        place = number - self._starts[chunk]
        offsets = self._offsets[chunk]
        return self._values[chunk][offsets[place] : offsets[place + 1]]
