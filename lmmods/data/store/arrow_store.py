"""The tokenised store: Arrow files in the cache, memory-mapped by every process.

A store is a folder named by the fingerprint of everything that it depends on, written once (cache.py):

    encoded.arrow   one row per kept row: the encoder's columns, and `index`, which points into rows.arrow
    rows.arrow      one row per row read: `row` (JSON), `file` (number), `line`
    info.json       file names, counts, and notes for the report
    manifest.json   size and checksum of each of these
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lmmods.core.fingerprints import first_damaged
from lmmods.data.encode.encoder import Encoded, RowCounts, arrow_column
from lmmods.data.read.readers import Row

MANIFEST = "manifest.json"
FILES = ("encoded.arrow", "rows.arrow", "info.json")


def damage(folder: Path, contents: bool = True, files: Sequence[str] = FILES) -> str | None:
    """Describe the damage of a store; None if there is none.

    Args:
        contents: Also verify the checksum of each file, at about 3 GiB per second.
        files: Files that it must contain.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        name = first_damaged(folder, manifest, contents)
        missing = [file for file in files if file not in manifest]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (NotADirectoryError, IsADirectoryError, ValueError, RecursionError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    if name is None:
        return f"{MANIFEST} does not name {missing[0]}" if missing else None
    return f"{name} has changed since it was written" if (folder / name).exists() else f"{name} is missing"


class _EncodedRows:
    """Kept rows as encoded, which both kinds of stores have."""

    info: dict[str, Any]
    _columns: "_Columns"

    def __len__(self) -> int:
        """Number of kept rows."""
        return self.info["rows_kept"]

    def row(self, index: int) -> dict[str, Any]:
        """Return the encoder's columns of kept row `index`; lists as int32 arrays that map the file."""
        return self._columns.row(index)

    def column(self, name: str) -> np.ndarray:
        """Return a column of numbers, or the lengths (int32) of a column of lists. Each call makes a new array."""
        return self._columns.to_array(name)

    def lists(self, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield a column of lists chunk by chunk: the values of all its lists, and the length of each list."""
        return self._columns.lists(name)


class Store(_EncodedRows):
    """A finished store, memory-mapped. Pickles by path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info = json.loads((folder / "info.json").read_text())
        self._columns = _Columns(_open_table(folder / "encoded.arrow"))
        self._rows = _open_table(folder / "rows.arrow")

    def __reduce__(self):  # noqa: ANN204
        # Worker processes map the files themselves, instead of receiving copies of the arrays.
        return Store, (self.folder,)

    @property
    def name(self) -> str:
        """Name that identifies this store."""
        return self.folder.name

    def source_row(self, index: int) -> dict[str, Any]:
        """Return the row as read. `index` counts all rows read."""
        return json.loads(self._rows["row"][index].as_py())

    def location(self, index: int) -> str:
        """Return file:line of the row as read."""
        return f"{self.info['files'][self._rows['file'][index].as_py()]}:{self._rows['line'][index].as_py()}"


class MemoryStore(_EncodedRows):
    """The rows of one shuffle buffer of a stream, with the interface of Store.

    Args:
        parts: Batches of rows with their encoded columns.
        info: Facts about the source.
    """

    def __init__(self, parts: list[tuple[list[Row], Encoded]], info: dict[str, Any]) -> None:
        self._rows = [row for batch, _ in parts for row in batch]
        # Positions count within a batch, `index` within the store.
        starts = np.cumsum([0] + [len(batch) for batch, _ in parts])
        columns = {name: [arrow_column(encoded.columns[name]) for _, encoded in parts] for name in parts[0][1].columns}
        columns["index"] = [pa.array(encoded.positions + start) for (_, encoded), start
                            in zip(parts, starts, strict=False)]
        self._columns = _Columns({name: pa.chunked_array(chunks) for name, chunks in columns.items()})
        row_counts = RowCounts()
        for batch, encoded in parts:
            row_counts.add(batch, encoded)
        self.info = {**info, **row_counts.summary()}

    @property
    def name(self) -> str:
        """Name that identifies this buffer's source."""
        return self.info["path"]

    def source_row(self, index: int) -> dict[str, Any]:
        """Return the row as read."""
        return self._rows[index].values

    def location(self, index: int) -> str:
        """file:line of the row."""
        return f"{self._rows[index].file}:{self._rows[index].line}"


def _open_table(path: Path) -> dict[str, pa.ChunkedArray]:
    table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    return dict(zip(table.column_names, table.columns, strict=False))


def _to_numpy(array: pa.Array) -> np.ndarray:
    """View an array without nulls. Not Arrow's to_numpy: it imports pandas, which takes longer than everything else."""
    return np.from_dlpack(array)


class _Columns:
    """Arrow columns in equal chunks, as numpy views that are made when a chunk is first used.

    Millions of rows are thousands of chunks, and a start needs few of them.
    """

    def __init__(self, columns: dict[str, pa.ChunkedArray]) -> None:
        self._columns = columns
        sizes = [len(chunk) for chunk in next(iter(columns.values())).chunks]
        self._starts = np.cumsum([0, *sizes])
        self._views: list[dict[str, tuple[np.ndarray, np.ndarray | None]] | None] = [None] * len(sizes)

    def row(self, index: int) -> dict[str, Any]:
        """Return the columns of row `index`, lists as views."""
        # The last chunk that starts at or before `index`; "right" passes over empty ones.
        chunk = int(np.searchsorted(self._starts, index, "right")) - 1
        offset = int(index - self._starts[chunk])
        return {name: values[offset] if offsets is None else values[offsets[offset] : offsets[offset + 1]]
                for name, (values, offsets) in self._chunk(chunk).items()}

    def _chunk(self, index: int) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
        """Return values and, for lists, offsets by column: element i is values[offsets[i]:offsets[i + 1]]."""
        views = self._views[index]
        if views is None:
            chunks = {name: column.chunk(index) for name, column in self._columns.items()}
            views = self._views[index] = {
                name: (_to_numpy(chunk.values), _to_numpy(chunk.offsets)) if pa.types.is_list(chunk.type)
                else (_to_numpy(chunk), None) for name, chunk in chunks.items()}
        return views

    def lists(self, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield values and lengths of a column of lists, chunk by chunk."""
        for chunk in self._columns[name].chunks:
            offsets = _to_numpy(chunk.offsets)
            yield _to_numpy(chunk.values)[offsets[0] : offsets[-1]], np.diff(offsets)

    def to_array(self, name: str) -> np.ndarray:
        """Return a column of numbers, or the lengths (int32) of a column of lists."""
        column = self._columns[name]
        if not pa.types.is_list(column.type):
            return _to_numpy(column.combine_chunks())
        lengths = np.empty(len(column), np.int32)
        for start, chunk in zip(self._starts, column.chunks, strict=False):
            offsets = _to_numpy(chunk.offsets)
            np.subtract(offsets[1:], offsets[:-1], out=lengths[start : start + len(chunk)])
        return lengths
