"""Worker processes: they exit with their parent, even if that one is killed, and print above its status line."""

import os
import threading
from multiprocessing import parent_process
from multiprocessing.connection import wait

from lmmods.core.progress_bar import keep_last_line


def begin_worker(*_: object) -> None:
    """What a worker of multiprocessing calls first, with any start method."""
    keep_last_line(erases=True)
    end_with_parent()


def end_with_parent() -> None:
    """Exit this worker when its parent dies.

    It waits for the parent's end of a pipe to close. The parent's process id or a signal at its death would not do:
    workers of a forkserver are children of the server, which lives as long as they do.
    """
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), name="parent", daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
