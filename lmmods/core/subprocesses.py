"""Worker processes: they exit with their parent, even if that is killed, and print above its status line."""

import os
import threading
from multiprocessing import parent_process
from multiprocessing.connection import wait

from lmmods.core.progress_bar import keep_last_line


def begin_worker(*_: object) -> None:
    """Set up a worker of multiprocessing, with any start method. Must be called first."""
    keep_last_line(erases=True)
    end_with_parent()


def end_with_parent() -> None:
    """Exit this worker when its parent dies.

    It waits for the parent's end of a pipe to close. The parent's process id or a death signal would not do: workers of
    a forkserver are children of the server, which lives as long as they do.
    """
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), name="parent", daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
