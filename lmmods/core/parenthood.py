"""Worker processes end with the process that they work for, even where that one is killed without a word."""

import os
import threading
from multiprocessing import parent_process
from multiprocessing.connection import wait


def end_with_parent(*_: object) -> None:
    """Call it first in a worker of multiprocessing, of any start method and system.

    The parent's end of a pipe closes when it dies. Workers of a forkserver are the server's children, which lives as
    long as they do, so neither their parent's id nor a signal at its death would tell.
    """
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), name="parent", daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
