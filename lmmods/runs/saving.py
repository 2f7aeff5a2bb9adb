"""Errors of a failing disk: recognising and reporting them."""

import errno
import os
import re

from safetensors import SafetensorError

from lmmods.core.errors import UserError

# Disk full, quota exceeded, file too large, input/output error, read-only file system.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


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
