"""What `source` may be (file, folder, glob, URL, hub id, or a list of these) and the rows that come out of it."""

import difflib
import glob
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import fsspec

from lmmods.data.readers import COMPRESSIONS, READERS, Row, file_type, read_file
from lmmods.errors import UserError
from lmmods.redaction import redact, redacted

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
BOOKKEEPING = {
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
}  # of datasets' save_to_disk
NAMED_FILES = {"chip2": "unified_chip2.jsonl"}
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass
class Source:
    """One place that rows come from.

    Args:
        path: File, folder, glob, URL (s3://, gs://, hf://, https://), hub id, or one of qlora's sets by name (alpaca,
            alpaca-clean, chip2, self-instruct, hh-rlhf, oasst1, longform, unnatural-instructions).
        name: Configuration of a hub data set.
        split: Split of a hub data set; slices such as `train[:10%]` work.
        revision: Branch, tag or commit of a hub data set.
        columns: Names in the file -> names that the format expects, for example {question: instruction}.
        limit: Use only this many rows, the first ones.
        weight: Rows count this many times in an epoch: 2 twice each, 0.5 a seeded half of them.
        format: Format of these rows; null means `dataset_format` of the data module, or detection.
    """

    path: str
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    columns: dict[str, str] | None = None
    limit: int | None = None
    weight: float = 1.0
    format: str | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UserError(f"source {self.path}: limit is {self.limit}, but must be 1 or more")
        if self.weight <= 0:
            raise UserError(f"source {self.path}: weight is {self.weight}, but must be more than 0")


SourceLike = str | Source | list[str | Source]


def as_sources(source: SourceLike | dict, key: str, columns: dict[str, str] | None = None) -> list[Source]:
    """The list of sources that a `source` field stands for; `columns` is for those that map none.

    Raises:
        UserError: The list is empty.
    """
    items = source if isinstance(source, list) else [source]
    if not items or not all(items):
        raise UserError(f"data.{key} is empty; give a file, folder, glob or hub id")
    sources = [
        Source(**item) if isinstance(item, dict) else item if isinstance(item, Source) else Source(item)
        for item in items
    ]
    if key != "source" and any(item.weight != 1 for item in sources):
        raise UserError(f"weight counts in data.source only, not in data.{key}: evaluation sees each row once")
    return [replace(item, columns=columns) if item.columns is None else item for item in sources]


class SourceReader:
    """Rows of one source, column names mapped, limited. Iterating it again reads again.

    Args:
        source: What to read.
        documents: What a document of a .txt file is, see `read_file`.
        streaming: Read a hub data set as it comes over the network instead of downloading it first.

    Raises:
        UserError: Nothing readable is found at the path.
    """

    def __init__(self, source: Source, documents: str = "file", streaming: bool = False) -> None:
        self.source = source
        self.documents = documents
        self.files = _find_files(source)
        unused = [key for key in ("name", "split", "revision") if getattr(source, key) is not None]
        if self.files and unused:
            raise UserError(f"{source.path}: {unused[0]} is for hub data sets, but this path holds files; leave it out")
        self._hub_rows = None if self.files else _load_from_hub(source, streaming)

    def __iter__(self) -> Iterator[Row]:
        rows = self._all_rows()
        if self.source.columns:
            rows = (Row(file, line, self._renamed(values, file, line)) for file, line, values in rows)
        for number, row in enumerate(rows):
            if self.source.limit is not None and number >= self.source.limit:
                return
            yield row

    def _all_rows(self) -> Iterator[Row]:
        if self._hub_rows is not None:
            for number, values in enumerate(self._hub_rows, 1):
                yield Row(self.source.path, number, values)
        for path in self.files:
            yield from read_file(path, self.documents)

    def _renamed(self, values: dict, file: str, line: int) -> dict:
        mapping = self.source.columns or {}
        missing = [name for name in mapping if name not in values]
        if missing:
            raise UserError(
                f"{file}:{line}: no column {missing[0]!r} (named in data.columns); "
                f"the columns are {', '.join(values)}{_did_you_mean(missing[0], list(values))}"
            )
        return {mapping.get(name, name): value for name, value in values.items()}

    def num_bytes(self) -> int:
        """Size of local files on disk, 0 for others."""
        return sum(os.path.getsize(path) for path in self.files if "://" not in path)

    def fingerprint(self) -> str:
        """Changes when a row could change: contents and paths of files, or the hub's own fingerprint; all settings.

        It is the same under another password or token.
        """
        digest = hashlib.blake2b(repr((redacted(asdict(self.source)), self.documents)).encode())
        for path in self.files:
            digest.update(redact(path).encode())
            digest.update(_content_key(path))
        if self._hub_rows is not None:
            digest.update(self._hub_rows._fingerprint.encode())
        return digest.hexdigest()


def _find_files(source: Source) -> list[str]:
    """Sorted data files of a local path or URL; empty when the path names a hub data set."""
    path = os.path.expanduser(source.path)
    if "://" in path:
        return _find_remote(path)
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        return _files_in_folder(path)
    if glob.has_magic(path):
        files = sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))
        if not files:
            raise UserError(f"{source.path}: no file matches this pattern (working directory {os.getcwd()})")
        return files
    if source.path in NAMED_SETS or (HUB_ID.fullmatch(path) and not _looks_like_file(path)):
        return []
    folder, name = os.path.split(path)
    names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    raise UserError(
        f"{source.path}: no such file or folder (working directory {os.getcwd()}){_did_you_mean(name, names)}"
    )


def _looks_like_file(path: str) -> bool:
    return file_type(path) in READERS or path.endswith(COMPRESSIONS) or path.startswith((".", "/"))


def _files_in_folder(folder: str) -> list[str]:
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [
            os.path.join(root, name)
            for name in names
            if not name.startswith(".") and name not in BOOKKEEPING and file_type(name) in READERS
        ]
    if not found:
        raise UserError(
            f"{folder}: no readable file in this folder; readable are {', '.join(sorted(READERS))} and .gz of these"
        )
    return sorted(found)


def _find_remote(path: str) -> list[str]:
    try:
        opened = fsspec.open_files(path, "rb") if glob.has_magic(path) else [fsspec.open(path, "rb")]
        if not glob.has_magic(path) and opened[0].fs.isdir(opened[0].path):
            filesystem = opened[0].fs
            names = [name for name in filesystem.find(opened[0].path) if file_type(name) in READERS]
            return sorted(filesystem.unstrip_protocol(name) for name in names)
        return sorted(item.full_name for item in opened)
    except (OSError, ImportError, ValueError) as error:
        raise UserError(f"{path}: cannot be opened ({error})") from error


def _content_key(path: str) -> bytes:
    if "://" in path:
        filesystem, name = fsspec.core.url_to_fs(path)
        by_name = "http" in filesystem.protocol  # its key is a hash of the name alone, which nobody has to look up
        return str(filesystem.ukey(redact(name) if by_name else name)).encode()
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "blake2b").digest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from error


def _load_from_hub(source: Source, streaming: bool):  # noqa: ANN202 - datasets is imported only when used
    """The split of a hub data set as a memory-mapped table. Raises UserError when it cannot be had."""
    import datasets

    repository = NAMED_SETS.get(source.path, source.path)
    try:
        return datasets.load_dataset(
            repository,
            source.name,
            data_files=NAMED_FILES.get(source.path),
            split=source.split or "train",
            revision=source.revision,
            streaming=streaming,
        )
    except Exception as error:  # datasets raises many kinds, all of them about this path
        raise UserError(
            f"{source.path}: not a local file or folder, and the hub data set {repository!r} cannot be "
            f"loaded ({type(error).__name__}: {redact(str(error))[:300]})"
        ) from error


def _did_you_mean(name: str, candidates: list[str]) -> str:
    near = difflib.get_close_matches(name, candidates, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
