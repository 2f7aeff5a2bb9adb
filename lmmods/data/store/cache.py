"""The cache of stores: finds the store of a source, and builds it if it is missing or damaged."""

import base64
import errno
import gc
import hashlib
import json
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

import lmmods
from lmmods.core.console import tell
from lmmods.core.errors import UserError
from lmmods.core.fingerprints import stamps
from lmmods.core.hardware import cache_folder, num_cores
from lmmods.core.subprocesses import end_with_parent
from lmmods.data.encode.encoder import Encoded, Encoder, RowCounts, RowError, arrow_column, describe_dropped
from lmmods.data.read.readers import Row
from lmmods.data.read.source_reader import SourceReader
from lmmods.data.store.arrow_store import FILES, MANIFEST, Store, damage

BYTES_PER_PROCESS = 20_000_000  # below this, starting another process costs more than it saves
SOURCE = "recipe/source.py"  # outside the data package, but determines how rows are read
ATTEMPTS = 3  # at opening a store that other processes may replace meanwhile
Prepare = Callable[[], tuple[Iterable[Row], Encoder, dict[str, Any]]]


@dataclass
class Cache:
    """A folder of stores.

    Args:
        folder: Its path; None is $LMMODS_CACHE, or lmmods in the user's cache folder.
        num_proc: Processes that tokenise; None decides by the size of the source.
    """

    folder: str | None
    num_proc: int | None
    _checked: set[Path] = field(default_factory=set)  # stores that this object has built or checked

    def store(self, reader: SourceReader, settings: dict[str, Any], prepare: Prepare, rebuild: bool = False,
              contents: bool = True) -> Store:
        """Return the store of a source.

        Args:
            reader: Reader of the source.
            settings: Everything but the contents that tokens could depend on; `task` is part of the store's name.
            prepare: Returns rows, encoder and info for a store that must be built.
            rebuild: Rebuild the store, once in the life of this object.
            contents: Verify the checksums of an existing store, once in the life of this object; otherwise only its
                sizes, because another process verifies it.

        Raises:
            UserError: The source is damaged or contains no usable row, or the cache cannot be written.
        """
        key = fingerprint({**settings, "source": reader.fingerprint()})
        # A store is never changed: other settings, contents or code are another folder.
        folder = cache_folder(self.folder) / f"{settings['task'].lower()}-{key}"
        store = self._open(folder, reader, prepare, rebuild, contents)
        self._checked.add(folder)
        if not len(store):
            layout = f"; layout: {store.info['format']}" if "format" in store.info else ""
            raise UserError(f"{reader.source.path}: no usable row among {describe_dropped(store.info)}{layout}")
        return store

    def _open(self, folder: Path, reader: SourceReader, prepare: Prepare, rebuild: bool, contents: bool) -> Store:
        """Open the store, rebuilt if missing or damaged. Other processes may do the same at the same time."""
        wrong: object = None
        for _ in range(ATTEMPTS):
            with _reported(folder):
                if rebuild and folder not in self._checked:
                    remove(folder)
                elif os.path.lexists(folder):
                    # The inode distinguishes the damaged store from a new one that another process may put in its place
                    # meanwhile.
                    identity = folder.lstat().st_ino
                    wrong = wrong or damage(folder, contents and folder not in self._checked)
                    if wrong is not None:
                        tell(f"The cached data in {folder} are damaged ({wrong}); rebuilding them from "
                             f"{reader.source.path}.")
                        remove(folder, identity)
                is_there = os.path.lexists(folder)
            if not is_there:
                rows, encoder, info = prepare()
                build_store(folder, rows, encoder, self._processes(reader), info=info)
            try:
                with _reported(folder):
                    return Store(folder)
            except FileNotFoundError:  # another process found it damaged and removed it
                rebuild, wrong = False, None
            except (ValueError, KeyError, TypeError, pa.ArrowException) as error:  # only sizes were compared
                rebuild, wrong = False, error
        raise UserError(f"{folder}: the cache cannot be read, and rebuilding it does not help ({wrong}). Set "
                        "data.cache_dir or LMMODS_CACHE to another folder")

    def _processes(self, reader: SourceReader) -> int:
        if self.num_proc is not None:
            return self.num_proc
        return max(1, min(num_cores(), reader.num_bytes() // BYTES_PER_PROCESS))


@contextmanager
def _reported(folder: Path) -> Iterator[None]:
    """Convert errors of the file system to one message; a missing file is left to the caller."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{folder}: this cache entry cannot be used ({error}). Set data.cache_dir or "
                        "LMMODS_CACHE to a folder that can be read and written") from error


def remove(folder: Path, identity: int | None = None) -> None:
    """Remove a store; renamed first, so that no process sees half of it.

    Args:
        identity: Inode of the store to remove; a new one that another process has put there is kept.
    """
    # In the same folder, as a rename is atomic only within a file system.
    renamed = folder.with_name(f"{folder.name}.old-{os.getpid()}")
    try:
        if identity is not None and folder.lstat().st_ino != identity:
            return
        folder.rename(renamed)
    except FileNotFoundError:
        return
    if renamed.is_dir() and not renamed.is_symlink():
        shutil.rmtree(renamed, ignore_errors=True)
    else:
        renamed.unlink()


# ---------------------------------------------------------------------------------------------------------------------
# Writing a store: rows are encoded in parallel and appended batch by batch, so that memory stays bounded.

ROWS_PER_BATCH = 1000
CHARACTERS_PER_BATCH = 1 << 20


def fingerprint(settings: dict[str, Any]) -> str:
    """Hash (32 hex digits) of settings and of all code that reads and encodes data."""
    # Code is hashed as text: any change in these files, even of a comment, invalidates every store.
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=repr).encode(), digest_size=16)
    package = Path(lmmods.__path__[0])
    for path in [*sorted((package / "data").rglob("*.py")), package / SOURCE]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def build_store(folder: Path, rows: Iterable[Row], encoder: Encoder, num_proc: int = 1,
                info: dict[str, Any] | None = None) -> None:
    """Encode `rows` and write the store `folder`, or keep the one that another process finished first.

    Args:
        folder: Path of the store. It has a temporary name until it is complete.
        rows: Rows to encode; iterated once, never held as a whole.
        encoder: Encoder of the rows.
        num_proc: Processes that encode; 1 works in this process.
        info: Added to info.json.

    Raises:
        UserError: A row is broken, or the cache cannot be written.
    """
    with reporting_writes(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    frozen_before = gc.get_freeze_count() > 0  # frozen for good by the command line
    gc.freeze()  # otherwise each collection walks through all objects of torch: 10 % of the time
    try:
        # bar on terminals only, and only after two seconds
        with _Writer(temporary) as writer, tqdm(desc="tokenising", unit=" rows", disable=None, delay=2) as bar:
            for batch, encoded in encode_batches(rows, encoder, num_proc):
                with reporting_writes(folder.parent):
                    writer.add(batch, encoded)
                bar.update(len(batch))
            summary = {**(info or {}), **writer.summary()}
            if not summary["rows_read"]:
                raise UserError(f"{summary.get('path', 'the source')}: the dataset is empty")
            with reporting_writes(folder.parent):
                writer.finish(summary)
        with reporting_writes(folder.parent):
            commit(temporary, folder)
    finally:
        if not frozen_before:
            gc.unfreeze()
        shutil.rmtree(temporary, ignore_errors=True)


def commit(temporary: Path, folder: Path, files: Sequence[str] = FILES) -> None:
    """Rename a finished folder of these files to its final name, unless another process was faster."""
    try:
        # Fails if the folder exists: another process was faster, and its store is equal if it is whole.
        temporary.rename(folder)
    except OSError:
        if damage(folder, contents=False, files=files):
            raise


@contextmanager
def reporting_writes(folder: Path) -> Iterator[None]:
    """Convert failed writes to one message."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space, or set" if full else "set"
        raise UserError(f"{folder}: the cache cannot be written ({error}); {remedy} data.cache_dir or LMMODS_CACHE to "
                        f"a folder {'with more space' if full else 'that can'}") from error


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield batches with about equal amounts of text, so that long documents do not need more memory."""
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += sum(_length(value) for value in row.values.values())
        if len(batch) >= ROWS_PER_BATCH or size >= CHARACTERS_PER_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _length(value: Any) -> int:
    """Return the length of a text or of bytes, also of those of images: {"bytes": ...}, or a list of these."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and "bytes" in value[0]:
        return sum(map(_length, value))
    value = value.get("bytes") if isinstance(value, dict) else value
    return len(value) if isinstance(value, str | bytes) else 0


def _as_json(value: Any) -> Any:
    """Convert a value that JSON does not have; bytes such as images become {"bytes": base64}."""
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else str(value)


def encode_batches(rows: Iterable[Row], encoder: Encoder, num_proc: int) -> Iterator[tuple[list[Row], Encoded]]:
    """Yield batches of rows with their encoded columns, in order; a bounded number is in flight.

    Raises:
        UserError: The encoder rejects a row.
    """
    batches = _batches(rows)
    with _executor(encoder, num_proc) as (pool, encode):
        waiting: deque = deque()
        try:
            while batch := next(batches, None):
                waiting.append((batch, pool.submit(encode, [row.values for row in batch if row.problem is None])))
                # Bounds memory: without it all rows would be read into the queue.
                if len(waiting) > 2 * num_proc:
                    yield _result(*waiting.popleft())
            while waiting:
                yield _result(*waiting.popleft())
        finally:
            # The reader of these batches may stop early, or an error end it.
            pool.shutdown(cancel_futures=True)


@contextmanager
def _executor(encoder: Encoder, num_proc: int) -> Iterator[tuple[Executor, Callable]]:
    """Executor of the encoding. One process has two threads: Python code of one overlaps with the other's tokenizer."""
    if num_proc == 1:
        with ThreadPoolExecutor(2) as threads:
            yield threads, encoder
        return
    # Not forked: this process may have JAX's threads. Each worker has one core, so the tokenizer's own threads are off.
    with ProcessPoolExecutor(num_proc, get_context("forkserver"), _start_worker, (encoder,)) as processes:
        yield processes, _encode_in_worker


def _result(batch: list[Row], future: Future) -> tuple[list[Row], Encoded]:
    # Only these rows were sent to the encoder: convert its positions back to those in the batch.
    usable = [index for index, row in enumerate(batch) if row.problem is None]
    try:
        encoded = future.result()
        if len(usable) == len(batch):
            return batch, encoded
        dropped = [*((usable[index], reason) for index, reason in encoded.dropped),
                   *((index, row.problem) for index, row in enumerate(batch) if row.problem is not None)]
        positions = np.array(usable, np.int64)[encoded.positions]
        return batch, encoded._replace(positions=positions, dropped=sorted(dropped))
    except RowError as error:
        index, message = error.args
        index = usable[index]
        raise UserError(f"{batch[index].file}:{batch[index].line}: {message}") from error
    except BrokenExecutor as error:
        raise UserError("a tokenising process was killed, most likely for lack of memory. Lower "
                        "data.num_proc") from error


_worker_encoder: Encoder | None = None


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_encoder = encoder


def _encode_in_worker(rows: list[dict[str, Any]]) -> Encoded:
    assert _worker_encoder is not None
    return _worker_encoder(rows)


class _Writer:
    """Writes the two tables batch by batch and sums up the counts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tables: dict[str, tuple[pa.NativeFile, pa.RecordBatchStreamWriter]] = {}
        self._files: dict[str, int] = {}
        self.row_counts = RowCounts()

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError, pa.ArrowException):  # abandoned after an error that has been reported
            self._close()

    def _close(self) -> None:
        while self._tables:
            _, (file, writer) = self._tables.popitem()
            with file:
                writer.close()

    def finish(self, info: dict[str, Any]) -> None:
        """Close the tables, write info.json and, last, the manifest: a store without one counts as damaged."""
        self._close()
        (self._folder / "info.json").write_text(json.dumps(info))
        manifest = stamps(sorted(self._folder.iterdir()))
        (self._folder / MANIFEST).write_text(json.dumps(manifest))

    def add(self, batch: list[Row], encoded: Encoded) -> None:
        """Append a batch of rows and their encoded columns."""
        files = [self._files.setdefault(row.file, len(self._files)) for row in batch]
        self._write("rows.arrow", {
            "row": pa.array([json.dumps(row.values, default=_as_json) for row in batch], pa.large_string()),
            "file": np.array(files, np.int32),
            "line": np.array([row.line for row in batch], np.int64),
        })
        columns = {name: arrow_column(column) for name, column in encoded.columns.items()}
        # Positions count within a batch, rows.arrow all rows read.
        columns["index"] = pa.array(encoded.positions.astype(np.int64) + self.row_counts.num_rows)
        self._write("encoded.arrow", columns)
        self.row_counts.add(batch, encoded)

    def _write(self, name: str, columns: dict) -> None:
        table = pa.record_batch(columns)
        if name not in self._tables:
            # All batches have the schema of the first one.
            file = pa.OSFile(str(self._folder / name), "wb")
            self._tables[name] = file, pa.ipc.new_stream(file, table.schema)
        self._tables[name][1].write_batch(table)

    def summary(self) -> dict[str, Any]:
        """Counts of all batches, plain JSON."""
        return {"files": list(self._files), **self.row_counts.summary()}
