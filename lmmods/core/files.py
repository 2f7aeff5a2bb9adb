"""Files that may come from anybody, in an unpacked run or a downloaded model: read only where that ends."""

import os
import stat

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


def is_plain_name(name: object) -> bool:
    """Whether a text that was read from a file is the name of something in a folder, and leads nowhere else."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)
