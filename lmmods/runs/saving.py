"""Saving where the disk may fail: one message, nothing half-written left, and what stood before still stands."""

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

# No room, no room within the quota, larger than a file may be, the disk itself fails or can no longer be written.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@contextmanager
def saving(checkpoint: Path, temporary: Path, num_bytes: int, is_share: bool = False) -> Iterator[None]:
    """While a checkpoint is written: where the disk fails, take away what is half written, and say so.

    Args:
        temporary: What it is called until it stands.
        num_bytes: Of its arrays.
        is_share: Whether other processes write into the same folder.

    Raises:
        UserError: The disk failed, here or for another process that writes a part of it. The checkpoints before are as
            they were.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = disk_problem(error)
        if is_share and reason is None and not temporary.exists():
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
    """All at once, so that processes which write into it find it whole or gone."""
    dropped = folder.with_name(f"{folder.name}-dropped")  # goes with what killed writers leave, should this one be
    with suppress(OSError):
        os.replace(folder, dropped)
    shutil.rmtree(dropped, ignore_errors=True)


def disk_error_in(error: BaseException | None) -> UserError | None:
    """What to tell where a failing disk is behind an exception: other files than checkpoints grow too."""
    while error is not None:
        if (reason := disk_problem(error)) is not None:
            where = f" ({error.filename})" if getattr(error, "filename", None) else ""
            return UserError(f"The disk cannot be written: {reason}{where}. Make room; a run goes on with "
                             "--ckpt_path last.")
        error = error.__cause__ or error.__context__
    return None


def disk_problem(error: BaseException) -> str | None:
    """What the system says of a disk that fails; None for any other error. safetensors puts the number in its text."""
    told = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, SafetensorError) else None
    number = int(told[1]) if told else getattr(error, "errno", None)
    return os.strerror(number) if number in _DISK_ERRORS else None
