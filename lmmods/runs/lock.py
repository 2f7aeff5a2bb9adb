"""Lock of a run folder, for one process at a time. The system releases it when its holder exits or is killed."""

import contextlib
import errno
import json
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from lmmods.core.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # absent on Windows
    import msvcrt

FILE = ".run-lock"
LOCKED_BYTE = 2**30  # on Windows a locked byte cannot be read, so lock one far behind the record
# Error numbers of flock on file systems without lock support.
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
# Mount options and types whose locks are visible on this machine only.
LOCAL_ONLY = re.compile(r"\b(nolock|local_lock=(all|flock)|localflock|nobrl)\b| - fuse\.(?!fuse-overlayfs)")


def lock_file(file: int, wait: bool = False) -> None:
    """Lock an open file until it is closed, at the latest when this process ends.

    Args:
        file: A descriptor, open for writing.
        wait: Wait until the file is free.

    Raises:
        BlockingIOError: Another process holds the lock, and `wait` is False.
        OSError: The file system does not support locks.
    """
    if fcntl:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return
    while True:
        os.lseek(file, LOCKED_BYTE, os.SEEK_SET)
        try:
            return msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]  # only on Windows
        except PermissionError as error:
            if not wait:
                raise BlockingIOError(*error.args) from error
        time.sleep(0.05)


class FolderLock:
    """A lock on a file in the run folder that names its holder: host, process, command, start time.

    The file exists while a process holds the lock; a file left by a killed process blocks nobody. If other machines
    cannot see the lock, the content of the file decides, and a file written by another host must be deleted by hand.

    Args:
        folder: The run folder; created if missing, and removed again if nothing has been written into it.
    """

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self._file: int | None = None
        self._new_folders: list[Path] = []

    def take(self, command: str) -> None:
        """Acquire the lock. Raises UserError: another process holds it, or may hold it."""
        try:
            # Try again if the file or folder was deleted meanwhile.
            while self._file is None:
                self._make_folders()
                self._file = self._open(command)
        except UserError:
            self._remove_folders()
            raise
        _HELD.add(self)

    def release(self) -> None:
        """Release the lock if it is held."""
        if self._file is not None:
            if fcntl:
                self.path.unlink(missing_ok=True)  # before unlocking: waiting processes must see that it is gone
            self.close()
            if not fcntl:
                with contextlib.suppress(PermissionError):  # Windows cannot delete a file that a process has open
                    self.path.unlink(missing_ok=True)
        self._remove_folders()

    def close(self) -> None:
        """Close the file without deleting it."""
        _HELD.discard(self)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self, command: str) -> int | None:
        """Return the file, locked and with a record of this process; None if another process has just deleted it."""
        try:
            # O_NOFOLLOW, which Windows lacks, raises an error if the file is a link.
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            try:
                self._lock(file)
                # If the last holder has deleted the file meanwhile, this lock has no effect.
                if not os.path.samestat(os.fstat(file), os.stat(self.path)):
                    raise FileNotFoundError
                record = {"host": socket.gethostname(), "pid": os.getpid(), "command": command,
                          "started": time.strftime("%Y-%m-%d %H:%M:%S %z"), "job": _job()}
                os.ftruncate(file, 0)
                os.lseek(file, 0, os.SEEK_SET)
                os.write(file, json.dumps(record).encode())
            except BaseException:
                os.close(file)
                raise
            return file
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{self.path} cannot be written ({error.strerror}), so the folder cannot be locked. Free "
                            "some space, delete the file, or set another trainer.default_root_dir.") from error

    def _lock(self, file: int) -> None:
        """Lock the open file. Raises UserError: the folder is in use."""
        try:
            lock_file(file)
            reaches_all = not LOCAL_ONLY.search(mount_of(self.path))
        except BlockingIOError as error:
            raise self._in_use(_read(file)) from error
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            reaches_all = False
        record = _read(file)
        # If other machines do not see the lock, the holder's record decides.
        if not reaches_all and record and not _is_dead(record):
            raise self._in_use(record)

    def _in_use(self, record: dict[str, Any]) -> UserError:
        holder, remedy = "another process", ""
        if record:
            holder = "process {pid} on {host} ({command}, since {started})".format_map(record)
        if record.get("host") != socket.gethostname():
            remedy = f" If that process is gone and this persists, delete {self.path}."
        return UserError(f"{self.path.parent} is in use by {holder}. Wait until it ends, or set another "
                         f"trainer.default_root_dir.{remedy}")

    def _make_folders(self) -> None:
        folder = self.path.parent
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self._new_folders = self._new_folders or missing  # a second attempt finds those of the first one

    def _remove_folders(self) -> None:
        for folder in self._new_folders:
            try:
                folder.rmdir()
            except OSError:  # not empty, or removed by another process
                break
        self._new_folders = []


_HELD: set[FolderLock] = set()


def _close_all() -> None:
    for lock in list(_HELD):
        lock.close()


# A forked child that outlives this process must not keep its locks. Python's files are closed by an exec.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


def mount_of(path: Path) -> str:
    """Return the line of Linux's mount table for the file system of a path; empty on other systems."""
    table = Path("/proc/self/mountinfo")
    if not table.exists():
        return ""
    device = os.stat(path).st_dev
    # Mount points are listed by device number, "major:minor".
    name = f" {os.major(device)}:{os.minor(device)} "
    return next((line for line in table.read_text(encoding="utf-8", errors="replace").splitlines() if name in line), "")


def _read(file: int) -> dict[str, Any]:
    """Return the record in the lock file; {} if it is not written yet."""
    try:
        os.lseek(file, 0, os.SEEK_SET)
        record = json.loads(os.read(file, 4096))
    except ValueError:
        return {}
    keys = ("host", "pid", "command", "started")
    return record if isinstance(record, dict) and all(key in record for key in keys) else {}


def _job() -> list[str] | None:
    """Return the id and the restart count of this process's batch job, None without one."""
    job = os.environ.get("SLURM_JOB_ID")
    return [job, os.environ.get("SLURM_RESTART_COUNT", "0")] if job else None


def _is_dead(record: dict[str, Any]) -> bool:
    """True if the process that wrote a record is known to have exited.

    False for a process on another host, unless it belongs to an earlier start of this job, which has ended.
    """
    job, old_job = _job(), record.get("job")
    if job and isinstance(old_job, list) and old_job[0] == job[0] and old_job[1] != job[1]:
        return True
    if record["host"] != socket.gethostname():
        return False
    try:
        pid = int(record["pid"])
    except ValueError:
        return True
    return pid == os.getpid() or not psutil.pid_exists(pid)
