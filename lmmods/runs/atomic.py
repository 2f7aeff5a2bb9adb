"""Atomic writes: readers see the old file or folder or the complete new one, even if the writer is killed."""

import errno
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError

from lmmods.core.errors import UserError
from lmmods.core.files import MAX_TABLE_BYTES, read_bytes
from lmmods.runs.checkpoint_files import keep_foreign_files
from lmmods.runs.inside import inside

REPLACED = ".replaced-"


def write_text(path: Path, text: str) -> None:
    """Replace a file's text atomically. A link of this name is replaced itself; its target is left alone."""
    _replace(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content atomically; it is on disk when this returns."""
    _replace(path, content)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def append_json(path: Path, value: Any) -> None:
    """Append a line to a small .jsonl file. The file is on disk when this returns."""
    # Rewritten as a whole: an append that is cut off would leave half a line.
    before = read_bytes(path, MAX_TABLE_BYTES) if path.exists() else b""
    _replace(path, before + json.dumps(value, ensure_ascii=False).encode() + b"\n")


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's content; `target` is replaced as by `write_text`."""
    _replace(target, read_bytes(source, MAX_TABLE_BYTES))


def open_to_append(path: Path) -> TextIO:
    """Open a text file written by `write_text` for appending. Raises OSError if it has become a link."""
    flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    return open(os.open(path, flags), "a", newline="", encoding="utf-8")


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # An unguessable, unused name: nobody can have placed a link there.
    temporary = path.with_name(f".{path.name[:50]}-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            # Without this, a crash after the rename could leave an empty file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:  # the disk is full: leave no partial file
        temporary.unlink(missing_ok=True)
        raise


def files_in(folder: Path) -> set[str]:
    """Return the paths of all files and links in `folder`, relative to it; none if there is no such folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def commit_folder(temporary: Path, final: Path) -> None:
    """Rename a finished folder to its final name, replacing an older one, after its files have reached the disk."""
    sync(temporary)
    # A folder cannot be renamed over another that is not empty: move the old one aside first. If the process is killed
    # between the two renames, `restore` puts it back at the next start.
    old = final.with_name(f"{REPLACED}{final.name}")
    restore(old)
    if final.is_symlink():
        final.unlink()
    elif final.exists():
        os.replace(final, old)
    os.replace(temporary, final)
    restore(old)
    _flush(final.parent)


def restore(old: Path) -> None:
    """Complete an interrupted `commit_folder`: remove the old folder if the new one exists, else put it back."""
    final = old.with_name(old.name.removeprefix(REPLACED))
    if old.is_symlink():
        old.unlink()  # not created by this program
    elif old.is_dir() and final.exists():
        keep_foreign_files(old, final)
    elif old.is_dir():
        os.replace(old, final)


def commit_files(temporary: Path, final: Path) -> None:
    """Like `commit_folder`, file by file, for a folder that must not be replaced: a link, a mount, one with other
    files.

    Raises:
        UserError: A folder in it is a link.
    """
    sync(temporary)
    # All places are checked before the first file is moved.
    places = {name: inside(final, name) for name in sorted(files_in(temporary))}
    for name, place in places.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(temporary / name, place)
    # Reverse order: inner folders come before those that contain them.
    for folder in sorted((path for path in temporary.rglob("*") if path.is_dir()), reverse=True):
        folder.rmdir()
    temporary.rmdir()
    _flush(final)


def sync(folder: Path) -> None:
    """Flush all files of a folder to disk."""
    # Folders too, as the entry of a new file is part of its folder.
    for path in (*folder.rglob("*"), folder):
        _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------------------
# Errors of a failing disk: recognising and reporting them.

# Disk full, quota exceeded, file too large, input/output error, read-only file system.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def disk_error_in(error: BaseException | None) -> UserError | None:
    """Return the error to report if a failing disk caused an exception, while writing any file; else None."""
    while error is not None:
        # Libraries wrap the system's error in their own.
        if (reason := disk_problem(error)) is not None:
            where = f" ({error.filename})" if getattr(error, "filename", None) else ""
            return UserError(f"The disk cannot be written: {reason}{where}. Make room; a run resumes with "
                             "--ckpt_path last.")
        error = error.__cause__ or error.__context__
    return None


def disk_problem(error: BaseException) -> str | None:
    """Return the system's message for a disk failure, None for any other error.

    safetensors reports the error number in its text only.
    """
    told = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, SafetensorError) else None
    number = int(told[1]) if told else getattr(error, "errno", None)
    return os.strerror(number) if number in _DISK_ERRORS else None
