"""Sources of rows: file, folder, glob, URL, hub id, or a list of these. Imports no library, as help reads it too."""

import os
import stat
from collections import Counter
from dataclasses import dataclass, replace

from lmmods.core.errors import UserError


@dataclass
class Source:
    """One source of rows.

    Args:
        path: File, folder, glob, URL (s3://, gs://, hf://, https://), hub id, or a qlora dataset by name (alpaca,
            alpaca-clean, chip2, self-instruct, hh-rlhf, oasst1, longform, unnatural-instructions).
        name: Configuration of a hub dataset.
        split: Split of a hub dataset; slices such as `train[:10%]` work.
        revision: Branch, tag or commit of a hub dataset.
        columns: Column names in the file -> names that the layout expects: {question: instruction}; `body.messages`
            reaches into an object, `answers.0` into a list.
        limit: Use only the first rows, up to this number.
        weight: Number of times that each row counts per epoch; 0.5 is a seeded half of the rows. With `data.mixing`,
            the basis of the source's share. Default: 1.
        format: Layout of these rows. Default: `data.dataset_format`, otherwise detected.
    """

    path: str
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    columns: dict[str, str] | None = None
    limit: int | None = None
    weight: float | None = None
    format: str | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UserError(f"source {self.path}: limit is {self.limit}, but must be 1 or more")
        if self.weight is not None and self.weight <= 0:
            raise UserError(f"source {self.path}: weight is {self.weight}, but must be more than 0")
        duplicates = [name for name, count in Counter((self.columns or {}).values()).items() if count > 1]
        if duplicates:
            raise UserError(f"source {self.path}: columns maps several columns to {duplicates[0]!r}; map only one of "
                            "them")

    @property
    def times(self) -> float:
        """Number of times that a row counts in an epoch, without mixing."""
        return 1.0 if self.weight is None else self.weight


SourceLike = str | Source | list[str | Source]


def as_sources(source: SourceLike | dict, key: str, columns: dict[str, str] | None = None) -> list[Source]:
    """Return the sources of a `source` field; `columns` applies to sources without their own.

    Raises:
        UserError: The list is empty.
    """
    items = source if isinstance(source, list) else [source]
    if not items or not all(items):
        raise UserError(f"data.{key} is empty; set a file, folder, glob or hub id", f"data.{key}")
    sources = [Source(**item) if isinstance(item, dict) else item if isinstance(item, Source) else Source(item)
               for item in items]
    if key != "source" and any(item.times != 1 for item in sources):
        raise UserError(f"weight applies only to data.source, not to data.{key}, where each row counts once; remove it",
                        f"data.{key}")
    return [replace(item, columns=columns) if item.columns is None else item for item in sources]


# ---------------------------------------------------------------------------------------------------------------------
# Checks of a file by its name and type, before anything opens it.

CODECS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISDIR, "a folder"))


def check_regular(path: str) -> None:
    """Raise UserError if a local path is not a regular file: opening it could block for ever."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError as error:
        subject = f"this is a link to {os.readlink(path)}, which" if os.path.islink(path) else "the file"
        raise UserError(f"{path}: {subject} does not exist; fix or remove it") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    if not stat.S_ISREG(mode):
        kind = next((kind for is_kind, kind in KINDS if is_kind(mode)), "a device")
        raise UserError(f"{path}: this is {kind}, not a regular file; write its rows to a file, or "
                        "remove it from the data")


def file_type(path: str) -> str:
    """Return the extension that determines how `path` is read, without compression: `.jsonl` for `a.jsonl.gz`."""
    name = _name(path)
    for ending in CODECS:
        name = name.removesuffix(ending)
    return "." + name.rsplit(".", 1)[-1] if "." in name else ""


def compression(path: str) -> str | None:
    """Return fsspec's name for the compression of an extension; None for other extensions."""
    return next((codec for ending, codec in CODECS.items() if _name(path).endswith(ending)), None)


def _name(path: str) -> str:
    """Return the file name in lower case, without a URL's query; for a chain (zip://a.jsonl::box.zip) the first URL's.
    """
    if "://" in path:
        path = next((part for part in path.split("::") if "://" in part), path)
        path = path.split("?")[0] if path.startswith("http") else path
    return path.lower().rsplit("/", 1)[-1]
