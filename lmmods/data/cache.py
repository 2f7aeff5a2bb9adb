"""Which store a source has, and building it when the cache lacks it."""

import os
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmmods.data.building import build_store, fingerprint
from lmmods.data.encoded import Encoder, describe_dropped
from lmmods.data.readers import Row
from lmmods.data.sources import SourceReader
from lmmods.data.store import Store
from lmmods.errors import UserError

BYTES_PER_PROCESS = 20_000_000  # below this a second process costs more to start than it saves


@dataclass
class Cache:
    """A folder of stores.

    Args:
        folder: Where; None is $LMMODS_CACHE, or lmmods in the user's cache folder.
        num_proc: Processes that tokenise; None decides by the size of the source.
    """

    folder: str | None
    num_proc: int | None
    _built: set[Path] = field(default_factory=set)

    def store(
        self,
        reader: SourceReader,
        settings: dict[str, Any],
        prepare: Callable[[], tuple[Iterable[Row], Encoder, dict[str, Any]]],
        rebuild: bool = False,
    ) -> Store:
        """The store of a source.

        Args:
            reader: The source.
            settings: Everything besides its contents that a token could depend on; `task` names the store.
            prepare: Gives rows, encoder and info of a store that must be built.
            rebuild: Build the store anew, once in the life of this object.

        Raises:
            UserError: The source is damaged or holds no usable row, or the cache cannot be written.
        """
        key = fingerprint({**settings, "source": reader.fingerprint()})
        folder = self._path() / f"{settings['task'].lower()}-{key}"
        if rebuild and folder not in self._built:
            _remove(folder)
        if not (folder / "info.json").is_file():
            rows, encoder, info = prepare()
            build_store(folder, rows, encoder, self._processes(reader), info=info)
        self._built.add(folder)
        store = Store(folder)
        if not len(store):
            raise UserError(f"{reader.source.path}: no usable row among {describe_dropped(store.info)}")
        return store

    def _path(self) -> Path:
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmmods"
        return Path(self.folder or os.environ.get("LMMODS_CACHE") or default).expanduser()

    def _processes(self, reader: SourceReader) -> int:
        if self.num_proc is not None:
            return self.num_proc
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        return max(1, min(cores, reader.num_bytes() // BYTES_PER_PROCESS))


def _remove(folder: Path) -> None:
    """Remove a store; renamed first, so that no process meets half of it."""
    if folder.exists():
        old = folder.with_name(f"{folder.name}.old-{os.getpid()}")
        folder.rename(old)
        shutil.rmtree(old, ignore_errors=True)
