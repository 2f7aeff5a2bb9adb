"""What the name and the kind of a file say before anything opens it."""

import os
import stat

from lmmods.core.errors import UserError

CODECS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISDIR, "a folder"))


def check_regular(path: str) -> None:
    """Raise UserError for a local path that is no regular file: opening it could wait or read for ever."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError as error:
        what = f"this is a link to {os.readlink(path)}, which" if os.path.islink(path) else "the file"
        raise UserError(f"{path}: {what} does not exist; mend or remove it") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    if not stat.S_ISREG(mode):
        kind = next((kind for is_kind, kind in KINDS if is_kind(mode)), "a device")
        raise UserError(f"{path}: this is {kind}, not a regular file, and is not opened; write its rows to a file, or "
                        "remove it from the data")


def file_type(path: str) -> str:
    """Extension that decides how `path` is read, without that of a compression: `a.jsonl.gz` gives `.jsonl`."""
    name = _name(path)
    for ending in CODECS:
        name = name.removesuffix(ending)
    return "." + name.rsplit(".", 1)[-1] if "." in name else ""


def compression(path: str) -> str | None:
    """fsspec's name of the compression that the extension stands for."""
    return next((codec for ending, codec in CODECS.items() if _name(path).endswith(ending)), None)


def _name(path: str) -> str:
    """Last component in lower case, of a URL without its query; of a chain (zip://a.jsonl::box.zip) its first URL's."""
    if "://" in path:
        path = next((part for part in path.split("::") if "://" in part), path)
        path = path.split("?")[0] if path.startswith("http") else path
    return path.lower().rsplit("/", 1)[-1]
