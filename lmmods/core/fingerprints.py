"""Fingerprints: hashes of file contents, independent of the file's location."""

import hashlib
import os
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmmods.core.errors import UserError
from lmmods.core.files import is_plain_name

if TYPE_CHECKING:
    import numpy as np

SAMPLED_ABOVE = 16 * 2**20  # bytes
BLOCKS, BLOCK_BYTES = 256, 2**14


def combine_fingerprints(parts: Iterable[str]) -> str:
    """Combine the fingerprints of several parts, in order, into one of 32 hex digits."""
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def of_array(array: "np.ndarray") -> str:
    """Return the hash of an array's values."""
    return hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()


def whole_file(path: str | os.PathLike) -> str:
    """Return the hash of all bytes. Raises UserError if they cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from error


def hash_sampled(path: str | os.PathLike) -> str:
    """Return the hash of the size and of 256 evenly spaced blocks, as weights and streams are too large to read twice.

    Files of up to 16 MiB are hashed whole. Raises UserError if the file cannot be read.
    """
    try:
        size = os.path.getsize(path)
        if size <= SAMPLED_ABOVE:
            return whole_file(path)
        digest = hashlib.blake2b(str(size).encode(), digest_size=16)
        with open(path, "rb") as file:
            for index in range(BLOCKS):
                file.seek(index * (size - BLOCK_BYTES) // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
        return digest.hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from error


# Entries of a manifest: size of a file, and a hash with the name of its method -------------------------------------


def describe_file(path: str | os.PathLike, digest: str | None = None, sampled: bool = True) -> dict[str, Any]:
    """Return `bytes` and `hash` of an input: `blake2b:…` of all bytes, `blocks:…` of 256 blocks, or `sha256:…`.

    Large files in the hub's cache are named by their SHA-256, so the hash of weights is known without reading them.

    Args:
        digest: Result of `whole_file`, or of `hash_sampled` if `sampled`; None computes it.

    Raises:
        UserError: The file cannot be read.
    """
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    if digest is None and os.path.basename(folder) == "blobs" and re.fullmatch("[0-9a-f]{64}", name):
        return {"bytes": os.path.getsize(target), "hash": f"sha256:{name}"}
    digest = digest or (hash_sampled(path) if sampled else whole_file(path))
    size = os.path.getsize(path)
    return {"bytes": size, "hash": f"{'blocks' if sampled and size > SAMPLED_ABOVE else 'blake2b'}:{digest}"}


def sha256(path: str | os.PathLike) -> dict[str, Any]:
    """Return `bytes` and `hash` of a run's file, as shown by `sha256sum` and the hub. Raises UserError."""
    try:
        with open(path, "rb") as file:
            return {"bytes": os.path.getsize(path), "hash": f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from error


def is_as_described(path: str | os.PathLike, described: dict[str, Any]) -> bool:
    """Return True if a file has this `bytes` and `hash`; a file of another size is not read. Raises UserError."""
    method = described["hash"].partition(":")[0]
    if os.path.getsize(path) != described["bytes"]:
        return False
    compute = {"sha256": lambda: sha256(path)["hash"], "blake2b": lambda: f"blake2b:{whole_file(path)}",
               "blocks": lambda: f"blocks:{hash_sampled(path)}"}[method]
    return compute() == described["hash"]


# ---------------------------------------------------------------------------------------------------------------------
# Size and CRC-32 of files, by which checkpoints and the data cache are verified before use.

BLOCK = 2**24  # bytes


def stamp(path: Path) -> list[int]:
    """Return size and CRC-32 of a file."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            checksum = zlib.crc32(block, checksum)
    return [path.stat().st_size, checksum]


def stamps(paths: Iterable[Path]) -> dict[str, list[int]]:
    """Return the stamp of each file by its name."""
    return {path.name: stamp(path) for path in paths}


def first_damaged(folder: Path, manifest: object, contents: bool = True) -> str | None:
    """Return the name of the first file of a folder that is missing, truncated or altered; None if all are intact.

    Args:
        manifest: Stamps by file name, as read from disk, so untrusted.
        contents: Also verify contents; otherwise only sizes.

    Raises:
        OSError: A file exists, but cannot be read.
        ValueError: The manifest is malformed.
    """
    if not isinstance(manifest, dict) or not manifest:
        raise ValueError("it names no file")
    for name, recorded in manifest.items():
        if not is_plain_name(name):
            raise ValueError(f"it names {name!r}, which is not a file of this folder")
        path = folder / name
        if not isinstance(recorded, list) or len(recorded) != 2:
            raise ValueError(f"it has no size and checksum of {name}")
        if not path.is_file() or path.stat().st_size != recorded[0] or (contents and stamp(path) != recorded):
            return name
    return None
