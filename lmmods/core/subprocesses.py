"""Worker processes exit with their parent, even if that is killed."""

import os
import threading
from multiprocessing import parent_process
from multiprocessing.connection import wait


def end_with_parent(*_: object) -> None:
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
