"""Error handling for a failing disk: one message, no partial files, and earlier checkpoints untouched."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from lmmods.core.errors import UserError
from lmmods.runs.folder import checkpoint_names

# Disk full, quota exceeded, file too large, input/output error, read-only file system.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@contextmanager
def saving(checkpoint: Path, temporary: Path, num_bytes: int, is_shard: bool = False) -> Iterator[None]:
    """Wrap the writing of a checkpoint: if the disk fails, delete the partial files and report it.

    Args:
        temporary: Its path until it is complete.
        num_bytes: Size of its arrays.
        is_shard: True if other processes write into the same folder.

    Raises:
        UserError: The disk failed, here or for another process that writes a part of it. Earlier checkpoints are
            untouched.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = disk_problem(error)
        if is_shard and reason is None and not temporary.exists():
            raise UserError(f"{checkpoint} could not be saved: another process could not write its part of it, and "
                            "says why.") from error
        _take_away(temporary)
        if reason is None:
            raise
        before = checkpoint_names(checkpoint.parent)
        free = shutil.disk_usage(checkpoint.parent).free if checkpoint.parent.is_dir() else 0
        stands = (f"The checkpoint before it, {before[-1]}, is whole: make room, then go on with --ckpt_path last."
                  if before else "There is none before it: make room, then start again with --overwrite true.")
        raise UserError(f"{checkpoint} could not be saved: {reason}. It takes {num_bytes / 2**20:,.1f} MiB, and "
                        f"{free / 2**20:,.1f} MiB are free there. {stands}") from error


def _take_away(folder: Path) -> None:
    """Delete a folder that other processes write into: renamed first, so that they see it whole or not at all."""
    dropped = folder.with_name(f"{folder.name}-dropped")  # a name that `remove_unfinished` cleans up
    with suppress(OSError):
        os.replace(folder, dropped)
    shutil.rmtree(dropped, ignore_errors=True)


def disk_error_in(error: BaseException | None) -> UserError | None:
    """Return the error to report if a failing disk caused an exception, while writing any file; else None."""
    while error is not None:
        if (reason := disk_problem(error)) is not None:
            where = f" ({error.filename})" if getattr(error, "filename", None) else ""
            return UserError(f"The disk cannot be written: {reason}{where}. Make room; a run goes on with "
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
