"""The tokenised store: Arrow files in the cache, memory-mapped by every process.

A store is a folder named by the fingerprint of everything that it depends on, written once (cache.py):

    encoded.arrow   one row per kept row: the encoder's columns, and `index`, which points into rows.arrow
    rows.arrow      one row per row read: `row` (JSON), `file` (number), `line`
    info.json       file names, counts, and notes for the report
    manifest.json   size and checksum of each of these
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lmmods.core.fingerprints import first_damaged
from lmmods.data.encode.encoder import Encoded, Ragged, RowCounts, arrow_column
from lmmods.data.sources.readers import Row

MANIFEST = "manifest.json"
FILES = ("encoded.arrow", "rows.arrow", "info.json")


def damage(folder: Path, contents: bool = True, files: Sequence[str] = FILES) -> str | None:
    """Describe the damage of a store; None if there is none.

    Args:
        contents: Also verify the checksum of each file, at about 3 GiB per second.
        files: Files that it must hold.
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
    return f"{name} is not as it was written" if (folder / name).exists() else f"{name} is missing"


class Store:
    """A finished store, memory-mapped. Pickles by path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info: dict[str, Any] = json.loads((folder / "info.json").read_text())
        self._columns: dict[str, _ListColumn | np.ndarray] = {}
        for name, column in _open_table(folder / "encoded.arrow").items():
            # Numbers become one array in memory; lists, which are most of the bytes, stay in the mapped file.
            is_list = pa.types.is_list(column.type)
            self._columns[name] = _ListColumn(column) if is_list else _numbers(column.combine_chunks())
        self._rows = _open_table(folder / "rows.arrow")

    def __reduce__(self):  # noqa: ANN204
        # Worker processes map the files themselves, instead of receiving copies of the arrays.
        return Store, (self.folder,)

    @property
    def name(self) -> str:
        """Name that identifies this store."""
        return self.folder.name

    def __len__(self) -> int:
        """Number of kept rows."""
        return self.info["rows_kept"]

    def row(self, number: int) -> dict[str, Any]:
        """Return the encoder's columns of kept row `number`; lists as int32 arrays that map the file."""
        return {name: column[number] for name, column in self._columns.items()}

    def column(self, name: str) -> np.ndarray:
        """Return a column of numbers, or the lengths of a column of lists."""
        column = self._columns[name]
        return column.lengths if isinstance(column, _ListColumn) else column

    def source_row(self, index: int) -> dict[str, Any]:
        """Return the row as read. `index` counts all rows read."""
        return json.loads(self._rows["row"][index].as_py())

    def location(self, index: int) -> str:
        """Return file:line of the row as read."""
        return f"{self.info['files'][self._rows['file'][index].as_py()]}:{self._rows['line'][index].as_py()}"


class MemoryStore:
    """The rows of one shuffle buffer of a stream, with the interface of Store.

    Args:
        parts: Batches of rows with their encoded columns.
        info: Facts about the source.
    """

    def __init__(self, parts: list[tuple[list[Row], Encoded]], info: dict[str, Any]) -> None:
        self._rows = [row for batch, _ in parts for row in batch]
        # Positions count within a batch, `index` within the store.
        starts = np.cumsum([0] + [len(batch) for batch, _ in parts])
        self._columns: dict[str, _ListColumn | np.ndarray] = {}
        for name, column in parts[0][1].columns.items():
            pieces = [encoded.columns[name] for _, encoded in parts]
            self._columns[name] = (_ListColumn(pa.chunked_array([arrow_column(piece) for piece in pieces]))
                                   if isinstance(column, Ragged) else np.concatenate(pieces))
        self._columns["index"] = np.concatenate([encoded.positions + start for (_, encoded), start
                                                 in zip(parts, starts, strict=False)])
        row_counts = RowCounts()
        for batch, encoded in parts:
            row_counts.add(batch, encoded)
        self.info = {**info, **row_counts.summary()}

    def __len__(self) -> int:
        return self.info["rows_kept"]

    @property
    def name(self) -> str:
        """Name that identifies this buffer's source."""
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


def _numbers(array: pa.Array) -> np.ndarray:
    """View an array without nulls. Not Arrow's to_numpy: it imports pandas, which takes longer than everything else."""
    return np.from_dlpack(array)


class _ListColumn:
    """Rows of an Arrow list column as numpy views: no copy, about a microsecond each."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        # Per chunk: element i of the list column is values[offsets[i]:offsets[i + 1]].
        self._values = [_numbers(chunk.values) for chunk in column.chunks]
        self._offsets = [_numbers(chunk.offsets) for chunk in column.chunks]
        self._starts = np.cumsum([0] + [len(chunk) for chunk in column.chunks])
        self.lengths = np.concatenate([np.diff(offsets) for offsets in self._offsets] or [[]]).astype(np.int64)

    def __getitem__(self, number: int) -> np.ndarray:
        # The last chunk that starts at or before `number`; "right" passes over empty ones.
        chunk = int(np.searchsorted(self._starts, number, "right")) - 1
        place = number - self._starts[chunk]
        offsets = self._offsets[chunk]
        return self._values[chunk][offsets[place] : offsets[place + 1]]
