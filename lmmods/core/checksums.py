"""Size and CRC-32 of files: checkpoints and the data cache are verified by them before they are used."""

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lmmods.core.files import is_plain_name

BLOCK = 2**24  # bytes


def stamp(path: Path) -> list[int]:
    """Size and CRC-32 of a file."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            checksum = zlib.crc32(block, checksum)
    return [path.stat().st_size, checksum]


def stamps(paths: Iterable[Path]) -> dict[str, list[int]]:
    """Stamp of each file by its name."""
    return {path.name: stamp(path) for path in paths}


def first_damaged(folder: Path, manifest: Any, contents: bool = True) -> str | None:
    """Name of the first file of a folder that is missing, truncated or altered.

    Args:
        manifest: Stamps by file name, as read from disk, so not to be trusted.
        contents: Also verify contents; otherwise only sizes.

    Raises:
        OSError: A file exists, but cannot be read.
        ValueError: The manifest is malformed.
    """
    if not isinstance(manifest, dict) or not manifest:
        raise ValueError("it names no file")
    for name, noted in manifest.items():
        if not is_plain_name(name):
            raise ValueError(f"it names {name!r}, which is no file of this folder")
        path = folder / name
        if not isinstance(noted, list) or len(noted) != 2:
            raise ValueError(f"it has no size and checksum of {name}")
        if not path.is_file() or path.stat().st_size != noted[0] or (contents and stamp(path) != noted):
            return name
    return None
