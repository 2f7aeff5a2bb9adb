"""Reading of the rows of a source, with column names mapped, and the hash of its contents."""

import difflib
import glob
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cached_property
from typing import Any

import fsspec

from lmmods.core import fingerprints, hub
from lmmods.core.compat import rows_fingerprint
from lmmods.core.errors import UserError
from lmmods.core.redaction import redact, redacted
from lmmods.data.read.cells import is_longer_than, without_fillers
from lmmods.data.read.readers import LONGEST, READERS, TOO_LONG, Row, read_file, table_features
from lmmods.recipe.source import CODECS, Source, check_regular, file_type

NAMED_SETS = {
    "alpaca": "tatsu-lab/alpaca",
    "alpaca-clean": "yahma/alpaca-cleaned",
    "chip2": "laion/OIG",
    "self-instruct": "yizhongw/self_instruct",
    "hh-rlhf": "Anthropic/hh-rlhf",
    "oasst1": "timdettmers/openassistant-guanaco",
    "longform": "akoksal/LongForm",
    "unnatural-instructions": "mrm8488/unnatural-instructions-full",
}
HUB_ROWS = 100  # of a hub dataset with images that are read together
NAMED_FILES = {"chip2": "unified_chip2.jsonl"}


class SourceReader:
    """Rows of one source, with column names mapped and limited in number. Each iteration reads them again.

    Args:
        documents: Unit of a document in a .txt file, see `read_file`.
        streaming: Read a hub dataset over the network during iteration instead of downloading it first.

    Raises:
        UserError: Nothing readable is found at the path.
    """

    def __init__(self, source: Source, documents: str = "file", streaming: bool = False) -> None:
        self.source = source
        self.documents = documents
        self.replaced: Counter[str] = Counter()  # in the last reading: columns of rows that a mapped one replaced
        self.files = find_files(source.path)
        unused = [key for key in ("name", "split", "revision") if getattr(source, key) is not None]
        if self.files and unused:
            raise UserError(f"{source.path}: {unused[0]} is for hub datasets, but this path has files. Remove it")
        self._hub_rows = None if self.files else _load_from_hub(source, streaming)
        self._is_adopted = False
        self._hashes: list[str] = []  # of the files, if this process has hashed them
        self._is_sampled = False

    def __iter__(self) -> Iterator[Row]:
        self.replaced.clear()
        rows = self._all_rows()
        if self.source.columns:
            rows = (row if row.problem else row._replace(values=self._rename(*row[:3])) for row in rows)
        for index, row in enumerate(rows):
            if self.source.limit is not None and index >= self.source.limit:
                return
            yield row

    def _all_rows(self) -> Iterator[Row]:
        if self._hub_rows is not None:
            for index, values in enumerate(_plain_rows(self._hub_rows), 1):
                if is_longer_than(values, LONGEST):
                    yield Row(self.source.path, index, {}, TOO_LONG)
                else:
                    yield Row(self.source.path, index, without_fillers(values))
        for path in self.files:
            yield from read_file(path, self.documents)

    def _rename(self, file: str, line: int, values: dict) -> dict:
        mapping = self.source.columns or {}
        rest, renamed = dict(values), {}
        for name, new_name in mapping.items():
            # Columns are removed, so that they appear only under the new name.
            value = _pop_column(rest, name)
            if value is None:
                raise UserError(f"{file}:{line}: no column {name!r}, which `columns` renames to {new_name!r}; "
                                f"the columns are {', '.join(values)}{did_you_mean(name, list(values))}")
            renamed[new_name] = value[0]
        self.replaced.update(name for name in renamed if name in rest)
        return {name: value for name, value in rest.items() if name not in renamed} | renamed

    def class_names(self, column: str) -> list[str] | None:
        """Return the names of a column's numbers, if `datasets` stores them (`ClassLabel`); otherwise None.

        Args:
            column: Its name after mapping.
        """
        if self._hub_rows is not None:
            features = self._hub_rows.features.to_dict() if self._hub_rows.features else {}
        else:
            features = table_features(self.files[0])
        renamed = {new_name: name for name, new_name in (self.source.columns or {}).items()}
        feature = features.get(renamed.get(column, column))
        # A list of classes has their type inside, as an object or as a list of one.
        while isinstance(feature, dict) and "feature" in feature or isinstance(feature, list) and len(feature) == 1:
            feature = feature["feature"] if isinstance(feature, dict) else feature[0]
        names = feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None
        return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None

    def num_bytes(self) -> int:
        """Return the size of local files on disk, 0 for others."""
        return sum(os.path.getsize(path) for path in self.files if "://" not in path)

    def fingerprint(self) -> str:
        """Hash that changes when a row could change: content and paths of files, or the hub's own fingerprint; all
        settings.

        It does not depend on passwords or tokens.
        """
        # Redacted, or a new password would invalidate the store.
        parts = (redacted(asdict(self.source)), self.documents, list(map(redact, self.files)), self.content)
        return hashlib.blake2b(repr(parts).encode()).hexdigest()

    @cached_property
    def content(self) -> str | None:
        """Return the hash of all bytes of the files, local or remote, or the hub's own; None if there is none."""
        return self._content_by(sampled=False)

    def sampled_content(self) -> str | None:
        """Like `content`, from sampled blocks of each file, for files too large to be read before training starts."""
        return self._content_by(sampled=True)

    def describe(self) -> dict[str, Any]:
        """Return the manifest entry of the source: `path`, and `files` with size and hash, or the hub's fingerprint.

        Files that have been hashed are not read again.
        """
        description = {key: value for key, value in vars(self.source).items()
                       if key in ("path", "name", "split", "revision") and value is not None}
        if self._hub_rows is not None:
            return {**description, "rows": rows_fingerprint(self._hub_rows)}
        if len(self._hashes) != len(self.files):
            self._content_by(sampled=self._is_sampled)
        return {**description, "files": {path: {"remote": digest} if "://" in path else
                                         fingerprints.describe_file(path, digest, self._is_sampled)
                                         for path, digest in zip(self.files, self._hashes, strict=True)}}

    def adopt(self, content: str | None) -> None:
        """Adopt the content hash of another process of the run.

        Raises:
            UserError: This process has computed another hash.
        """
        # `content` is a cached property: setting it spares this process the hashing.
        if "content" not in vars(self):
            self.content, self._is_adopted = content, True
        self._check_same(content)

    def check_adopted(self) -> None:
        """Verify an adopted hash before a store is built here. Raises UserError if it differs."""
        if self._is_adopted:
            self._check_same(self._content_by(sampled=False))

    def _check_same(self, content: str | None) -> None:
        if content != self.content:
            raise UserError(f"{self.source.path}: the data on this machine differs from the first machine's. Copy "
                            "the same files to every machine.")

    def _content_by(self, sampled: bool) -> str | None:
        if self._hub_rows is not None:
            return rows_fingerprint(self._hub_rows)  # None for a stream from the hub
        hashed = fingerprints.hash_sampled if sampled else fingerprints.whole_file
        self._hashes = [_remote_key(path) if "://" in path else hashed(path) for path in self.files]
        self._is_sampled = sampled
        return fingerprints.combine_fingerprints(self._hashes)


def _pop_column(values: dict, name: str) -> tuple[Any] | None:
    """Remove and return a column of a row, or the value at `a.b` in objects or `a.0` in a list; None if missing."""
    if name in values:
        return (values.pop(name),)
    first, _, inner_name = name.partition(".")
    inner = values.get(first)
    if not inner_name or not isinstance(inner, dict | list):
        return None
    # Copied, as the caller's row must not change.
    values[first] = inner = dict(inner) if isinstance(inner, dict) else {
        str(index): item for index, item in enumerate(inner)}
    return _pop_column(inner, inner_name)


def _remote_key(path: str) -> str:
    """Return fsspec's key for the version of a remote file."""
    filesystem, name = fsspec.core.url_to_fs(path)
    by_name = "http" in filesystem.protocol  # its key is a hash of the name alone, so redact secrets
    return str(filesystem.ukey(redact(name) if by_name else name))


def _load_from_hub(source: Source, streaming: bool):  # noqa: ANN202 - datasets is imported only when used
    """Return the split of a hub dataset as a memory-mapped table. Raises UserError if it cannot be loaded."""
    import datasets

    repository = NAMED_SETS.get(source.path, source.path)
    try:
        with hub.loading("data set", repository, "dataset", source.revision):
            return datasets.load_dataset(repository, source.name, data_files=NAMED_FILES.get(source.path),
                                         split=source.split or "train", revision=source.revision, streaming=streaming)
    except UserError:
        raise
    except Exception as error:  # datasets raises many types, all about this path
        raise UserError(f"{source.path}: not a local file or folder, and the hub dataset {repository!r} cannot be "
                        f"loaded ({type(error).__name__}: {redact(str(error))[:300]})") from error


def _plain_rows(rows: Any) -> Iterable[dict]:
    """Return the rows of a hub dataset, with images as in its files, {"bytes", "path"}, instead of decoded pictures."""
    if rows_fingerprint(rows) is None or "Image(" not in str(rows.features):
        return rows
    # `cast` would write a copy of the dataset.
    return (row for table in rows.with_format("arrow").iter(HUB_ROWS) for row in table.to_pylist())


# ---------------------------------------------------------------------------------------------------------------------
# Resolution of a path, folder, glob or URL to data files.
#
# Only regular files are ever opened: a pipe would block, and a device would never end. Nothing that may contain rows is
# skipped silently: whatever looks like a data file but is not one is rejected by name.

# Metadata written by datasets' save_to_disk.
BOOKKEEPING = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
READABLE = f"supported are {', '.join(sorted(READERS))} and .gz of these"


def find_files(location: str) -> list[str]:
    """Return the sorted data files of a local path, folder, glob or URL; empty if the path can only name a hub dataset.

    Raises:
        UserError: Nothing readable is there.
    """
    path = os.path.expanduser(location)
    if "://" in path:
        local = _local_path(path)
        if local is None:
            return _find_remote(path)
        path = local
    if os.path.isdir(path):
        return _files_in_folder(path)
    if os.path.lexists(path):
        check_regular(path)
        return [path]
    if glob.has_magic(path):
        files = sorted({name for name in _glob(path) if not os.path.isdir(name)})
        if not files:
            raise UserError(f"{location}: no file matches this pattern (working directory {os.getcwd()})")
        for name in files:
            check_regular(name)
        return files
    if hub.HUB_ID.fullmatch(path) and not _looks_like_file(path):
        return []
    folder, name = os.path.split(path)
    names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    raise UserError(f"{location}: no such file or folder (working directory {os.getcwd()}){did_you_mean(name, names)}")


def did_you_mean(name: str, candidates: list[str]) -> str:
    near = difflib.get_close_matches(name, candidates, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _looks_like_file(path: str) -> bool:
    return file_type(path) in READERS or path.endswith(tuple(CODECS)) or path.startswith((".", "/"))


def _is_data(name: str) -> bool:
    return not name.startswith(".") and name not in BOOKKEEPING and file_type(name) in READERS


def _files_in_folder(folder: str) -> list[str]:
    paths = [os.path.join(here, name) for here, names in _walk(folder) for name in names if _is_data(name)]
    if not paths:
        raise UserError(f"{folder}: no readable file in this folder; {READABLE}")
    for path in paths:
        check_regular(path)
    return sorted(paths)


def _walk(folder: str) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and its subfolders, each with the names of its files; hidden ones are skipped.

    Links to folders are followed last, and each folder is visited once, so that loops of links end and no folder is
    read twice.
    """
    met: set[tuple[int, int]] = set()
    links: list[str] = []
    waiting = [folder]
    while waiting or links:
        here = waiting.pop(0) if waiting else links.pop(0)
        try:
            status = os.stat(here)
            # The inode identifies a folder under all its names.
            if (status.st_dev, status.st_ino) in met:
                continue
            met.add((status.st_dev, status.st_ino))
            names = sorted(os.listdir(here))
        except OSError as error:
            raise UserError(f"{here}: this folder cannot be read ({error}); fix its permissions, or name files"
                            ) from error
        folders = [name for name in names if os.path.isdir(os.path.join(here, name))]
        for name in folders:
            path = os.path.join(here, name)
            if not name.startswith("."):
                (links if os.path.islink(path) else waiting).append(path)
        yield here, [name for name in names if name not in set(folders)]


def _glob(pattern: str) -> Iterator[str]:
    """Like glob.iglob, but `**` visits each folder once, even if links form a loop."""
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.glob(pattern)
        return
    index = parts.index("**")
    # Whatever follows the first `**` is matched in each folder below.
    head, tail = "/".join(parts[:index]), "/".join(parts[index + 1 :]) or "*"
    roots = glob.glob(head) if head else ["/" if pattern.startswith("/") else "."]
    for root in filter(os.path.isdir, roots):
        for folder, _ in _walk(root):
            inside = "" if folder == "." else folder.removeprefix("./")
            yield from _glob(os.path.join(glob.escape(inside), tail))


def _local_path(url: str) -> str | None:
    """Return the path of a file:// URL; None for other URLs, whose local parts are checked."""
    for part in url.split("::")[1:]:
        local = _local_path(part) if "://" in part else part
        if local is not None and os.path.lexists(local):
            check_regular(local)
    scheme, _, path = url.partition("://")
    if scheme not in ("file", "local"):
        return None
    if not path:
        raise UserError(f"{url}: this URL does not name a file")
    return fsspec.url_to_fs(url)[1]


def _find_remote(url: str) -> list[str]:
    # A chain such as zip://*.csv::https://…: fsspec expands the pattern of one part, the others are put back around it.
    first, chained, target = url.partition("::")
    before, after = ("", chained + target) if "://" in first else (first + chained, "")
    if "hf://" in url:
        hub.check_answers(url)
    try:
        filesystem, path = fsspec.url_to_fs(url)
        if glob.has_magic(path):
            names = filesystem.glob(path)
        elif filesystem.isdir(path):
            names = [name for name in filesystem.find(path) if _is_data(name.rsplit("/", 1)[-1])]
        else:
            return [url]
    except Exception as error:  # each file system raises its own types, all about this URL
        raise UserError(f"{url}: cannot be opened ({type(error).__name__}: {redact(str(error))[:300]})") from error
    if not names:
        raise UserError(f"{url}: no readable file there; {READABLE}")
    return sorted(before + filesystem.unstrip_protocol(name) + after for name in names)
