"""Fingerprints: hashes of file contents, the same wherever a file is stored."""

import hashlib
import os
from collections.abc import Iterable

from lmmods.core.errors import UserError

SAMPLED_ABOVE = 16 * 2**20  # bytes
BLOCKS, BLOCK_BYTES = 256, 2**14


def joined(parts: Iterable[str]) -> str:
    """One fingerprint (32 hex digits) of several parts, in their order."""
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def whole_file(path: str | os.PathLike) -> str:
    """Hash of all bytes. Raises UserError where they cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from error


def sampled_file(path: str | os.PathLike) -> str:
    """Hash of the size and of 256 evenly spaced blocks, as weights and streams are too large to read twice.

    Files of up to 16 MiB are hashed whole. Raises UserError: it cannot be read.
    """
    try:
        size = os.path.getsize(path)
        if size <= SAMPLED_ABOVE:
            return whole_file(path)
        digest = hashlib.blake2b(str(size).encode(), digest_size=16)
        with open(path, "rb") as file:
            for number in range(BLOCKS):
                file.seek(number * (size - BLOCK_BYTES) // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
        return digest.hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
