"""Files that may come from anybody, in an unpacked run or a downloaded model: read only where that ends."""

import errno
import os
import stat
from pathlib import Path

from lmmods.core.errors import UserError

MAX_BYTES = 256 * 2**20  # of what is parsed as a whole, such as JSON
MAX_TABLE_BYTES = 2**31  # of what has a line for each step


class NotRegular(OSError):
    """A folder, a pipe, a socket or a device: reading it may never end."""


class TooLarge(OSError):
    """More bytes than a file of this kind can have."""


def read_bytes(path: str | os.PathLike, most: int = MAX_BYTES) -> bytes:
    """Content of a regular file, or of one that a link leads to.

    Raises:
        NotRegular, TooLarge: It is none, or has more than `most` bytes.
        OSError: There is none, or it cannot be read.
    """
    # A pipe that nobody writes to would keep `open` waiting; regular files ignore the flag.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise NotRegular(f"{os.path.basename(path)} is no regular file")
        if found.st_size > most:
            raise TooLarge(f"{os.path.basename(path)} has {found.st_size / 2**20:,.0f} MiB, and at most "
                           f"{most / 2**20:,.0f} are read")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(descriptor)


def read_text(path: str | os.PathLike, most: int = MAX_BYTES, errors: str = "strict") -> str:
    """As `read_bytes`, in UTF-8 with any kind of line end. Raises UnicodeDecodeError where it is not."""
    return read_bytes(path, most).decode("utf-8", errors).replace("\r\n", "\n").replace("\r", "\n")


# What the system says of a path that a user has given wrongly; anything else about a file may be a bug of ours.
_WRONG_PATHS = {
    errno.ENAMETOOLONG: "is too long: a part of a path has at most 255 bytes, the whole 4095",
    errno.ENOTDIR: "leads through a file, where a folder must be",
    errno.EEXIST: "is there already, as another kind of thing",
    errno.EISDIR: "is a folder, where a file must be",
    errno.ELOOP: "is a link that leads back to itself",
    errno.EACCES: "may not be read or written by you",
    errno.EPERM: "may not be changed by you",
}


def wrong_path_in(error: BaseException | None) -> UserError | None:
    """What to tell where a path that nobody can use is behind an exception; None where another thing is."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _WRONG_PATHS and error.filename is not None:
            place = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else str(error.filename)
            shown = place if len(place) <= 200 else f"{place[:100]}… ({len(place)} characters)"
            return UserError(f"The path {shown} cannot be used: it {_WRONG_PATHS[error.errno]}. Name another one.")
        if isinstance(error, ValueError) and "embedded null" in str(error):
            return UserError("A path holds a NUL byte, which no name of a file has. Name another one.")
        error = error.__cause__ or error.__context__
    return None


def check_place(option: str, path: Path) -> None:
    """Raise UserError where no file can be written under this path, before work is done for it."""
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no such folder, or the name is a folder's. Name a file to write.")


def is_plain_name(name: object) -> bool:
    """Whether a text that was read from a file is the name of something in a folder, and leads nowhere else."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)
