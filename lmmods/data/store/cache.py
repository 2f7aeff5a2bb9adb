"""Which store a source has, and building it when the cache lacks it or holds a damaged one."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from lmmods.core.console import tell
from lmmods.core.errors import UserError
from lmmods.core.machine import cache_folder, num_cores
from lmmods.data.encode.encoder import Encoder, describe_dropped
from lmmods.data.sources.readers import Row
from lmmods.data.sources.source_reader import SourceReader
from lmmods.data.store.arrow_store import Store, damage
from lmmods.data.store.building import build_store, fingerprint

BYTES_PER_PROCESS = 20_000_000  # below this a second process costs more to start than it saves
ATTEMPTS = 3  # to open a store that other processes replace at the same time
Prepare = Callable[[], tuple[Iterable[Row], Encoder, dict[str, Any]]]


@dataclass
class Cache:
    """A folder of stores.

    Args:
        folder: Where; None is $LMMODS_CACHE, or lmmods in the user's cache folder.
        num_proc: Processes that tokenise; None decides by the size of the source.
    """

    folder: str | None
    num_proc: int | None
    _checked: set[Path] = field(default_factory=set)  # stores that this object has built or checked

    def store(self, reader: SourceReader, settings: dict[str, Any], prepare: Prepare, rebuild: bool = False,
              contents: bool = True) -> Store:
        """The store of a source.

        Args:
            settings: Everything besides its contents that a token could depend on; `task` names the store.
            prepare: Gives rows, encoder and info of a store that must be built.
            rebuild: Build the store anew, once in the life of this object.
            contents: Hold each byte of a store that is found against its checksum, once in the life of this object;
                otherwise the sizes only, where another process does that.

        Raises:
            UserError: The source is damaged or holds no usable row, or the cache cannot be written.
        """
        key = fingerprint({**settings, "source": reader.fingerprint()})
        folder = cache_folder(self.folder) / f"{settings['task'].lower()}-{key}"
        store = self._opened(folder, reader, prepare, rebuild, contents)
        self._checked.add(folder)
        if not len(store):
            raise UserError(f"{reader.source.path}: no usable row among {describe_dropped(store.info)}")
        return store

    def _opened(self, folder: Path, reader: SourceReader, prepare: Prepare, rebuild: bool, contents: bool) -> Store:
        """The store, made anew where it is missing or damaged. Other processes may do the same at the same time."""
        wrong: object = None
        for _ in range(ATTEMPTS):
            with _reported(folder):
                if rebuild and folder not in self._checked:
                    remove(folder)
                elif os.path.lexists(folder):
                    identity = folder.lstat().st_ino
                    wrong = wrong or damage(folder, contents and folder not in self._checked)
                    if wrong is not None:
                        tell(f"The cached data in {folder} are damaged ({wrong}); they are made anew from "
                             f"{reader.source.path}.")
                        remove(folder, identity)
                is_there = os.path.lexists(folder)
            if not is_there:
                rows, encoder, info = prepare()
                build_store(folder, rows, encoder, self._processes(reader), info=info)
            try:
                with _reported(folder):
                    return Store(folder)
            except FileNotFoundError:  # another process found it damaged and took it away
                rebuild, wrong = False, None
            except (ValueError, KeyError, TypeError, pa.ArrowException) as error:  # where only sizes were compared
                rebuild, wrong = False, error
        raise UserError(f"{folder}: the cache cannot be read, and writing it anew does not help ({wrong}); set "
                        "data.cache_dir or LMMODS_CACHE to another folder")

    def _processes(self, reader: SourceReader) -> int:
        if self.num_proc is not None:
            return self.num_proc
        return max(1, min(num_cores(), reader.num_bytes() // BYTES_PER_PROCESS))


@contextmanager
def _reported(folder: Path) -> Iterator[None]:
    """Errors of the file system as one message; a file that is gone is the caller's matter."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{folder}: this entry of the cache cannot be used ({error}); set data.cache_dir or "
                        "LMMODS_CACHE to a folder that can be read and written") from error


def remove(folder: Path, identity: int | None = None) -> None:
    """Remove a store; renamed first, so that no process meets half of it.

    Args:
        identity: Inode of the one that is meant; where another process has put a new one, that stays.
    """
    old = folder.with_name(f"{folder.name}.old-{os.getpid()}")
    try:
        if identity is not None and folder.lstat().st_ino != identity:
            return
        folder.rename(old)
    except FileNotFoundError:
        return
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink()
