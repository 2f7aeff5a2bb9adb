"""Bounded reads of untrusted files, such as the files of an unpacked run; errors of paths and disks."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from lmmods.core.errors import UserError

MAX_BYTES = 256 * 2**20  # for files that are parsed as a whole, such as JSON
MAX_TABLE_BYTES = 2**31  # for files with a line per step


class NotRegular(OSError):
    """Error: a folder, a pipe, a socket or a device, which may be endless."""


class TooLarge(OSError):
    """Error: the file has more bytes than expected."""


def read_bytes(path: str | os.PathLike, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file, or of the target of a link.

    Raises:
        NotRegular, TooLarge: It is not a regular file, or has more than `max_bytes` bytes.
        OSError: It does not exist or cannot be read.
    """
    # Without O_NONBLOCK, opening a pipe without a writer would block; regular files ignore the flag.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotRegular(f"{os.path.basename(path)} is not a regular file")
        if status.st_size > max_bytes:
            raise TooLarge(f"{os.path.basename(path)} has {status.st_size / 2**20:,.0f} MiB, more than "
                           f"{max_bytes / 2**20:,.0f} MiB")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes)
    finally:
        os.close(descriptor)


def read_text(path: str | os.PathLike, max_bytes: int = MAX_BYTES, errors: str = "strict") -> str:
    """Like `read_bytes`, decoded from UTF-8, with any kind of line end. Raises UnicodeDecodeError."""
    return read_bytes(path, max_bytes).decode("utf-8", errors).replace("\r\n", "\n").replace("\r", "\n")


# System errors caused by a wrong path from the user; any other one may be a bug here.
_WRONG_PATHS = {
    errno.ENAMETOOLONG: "is too long: a part of a path has at most 255 bytes, the whole 4095",
    errno.ENOTDIR: "leads through a file, where a folder must be",
    errno.EEXIST: "already exists as something else",
    errno.EISDIR: "is a folder, where a file must be",
    errno.ELOOP: "is a link that leads back to itself",
    errno.EACCES: "cannot be read or written with your permissions",
    errno.EPERM: "cannot be changed with your permissions",
}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes: libraries wrap the system's error in their own."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def wrong_path_in(error: BaseException | None) -> UserError | None:
    """Return the error to report if an unusable path caused an exception; None for other causes."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in _WRONG_PATHS and cause.filename is not None:
            path = os.fsdecode(cause.filename) if isinstance(cause.filename, bytes) else str(cause.filename)
            shown = path if len(path) <= 200 else f"{path[:100]}… ({len(path)} characters)"
            return UserError(f"The path {shown} cannot be used: it {_WRONG_PATHS[cause.errno]}. Use another path.")
        if isinstance(cause, ValueError) and "embedded null" in str(cause):
            return UserError("A path contains a NUL byte, which is not allowed. Use another path.")
    return None


# Disk full, quota exceeded, file too large, input/output error, read-only file system.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def disk_error_in(error: BaseException | None) -> UserError | None:
    """Return the error to report if a failing disk caused an exception, while writing any file; None otherwise."""
    for cause in _causes(error):
        if (reason := disk_problem(cause)) is not None:
            name = getattr(cause, "filename", None)
            file = f" ({name})" if name else ""
            return UserError(f"The disk cannot be written: {reason}{file}. Free some space; a run resumes with "
                             "--ckpt_path last.")
    return None


def disk_problem(error: BaseException) -> str | None:
    """Return the system's message for a disk failure, None for any other error.

    safetensors reports the error number only in its message.
    """
    match = re.search(r"\(os error (\d+)\)", str(error)) if type(error).__name__ == "SafetensorError" else None
    code = int(match[1]) if match else getattr(error, "errno", None)
    return os.strerror(code) if code in _DISK_ERRORS else None


def check_output_path(option: str, path: Path) -> None:
    """Raise UserError if no file can be written at this path, before work is done for it."""
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"{option} {path}: its folder does not exist, or it is a folder. Use the path of a file.")


def is_plain_name(name: object) -> bool:
    """Return True if a name read from a file is a plain file name, which cannot lead out of its folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)
