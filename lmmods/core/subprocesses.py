"""Worker processes exit with their parent, even if that is killed."""

import os
import select
import signal
import threading
from multiprocessing import parent_process
from multiprocessing.connection import wait

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # absent on Windows


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


def end_group_with(pipe: int) -> None:
    """Kill this process, which leads its process group, and the group when the other end of a pipe closes.

    Linux sends the signal by itself. A thread, as elsewhere, does not run while C code holds the interpreter's lock, as
    a regular expression does.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
        if select.select([pipe], [], [], 0)[0]:  # it closed before
            os.killpg(0, signal.SIGKILL)
    else:
        threading.Thread(target=_kill_after, args=(pipe,), name="parent", daemon=True).start()


def _kill_after(pipe: int) -> None:
    wait([pipe])
    os.killpg(0, signal.SIGKILL)
