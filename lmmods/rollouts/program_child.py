"""A process that runs the program of an answer under limits: `program_child.py WAY PIPE MEMORY FILE_SIZE SECONDS`.

WAY is `test` to run program.py and then test.py with its names, `input` to run program.py as a script, and `probe` to
see only whether the process can be isolated. It imports nothing of this project, so that a program starts fast.
"""

import ctypes
import os
import runpy
import signal
import sys
import types

PASSED = b"passed"
MARKS = ("LMMODS_REWARDS",)  # variable by which processes of rewards are found, wherever they have gone
NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000  # of Linux's sched.h
PARENT_DEATH_SIGNAL = 1  # of Linux's prctl.h


def limit(memory: int, file_size: int, seconds: int) -> None:
    """Limit memory and sizes of files in bytes, and CPU time in seconds."""
    import resource  # which Windows lacks

    for what, most in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_FSIZE, file_size), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def end_with_parent() -> None:
    """Have Linux kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def isolate() -> bool:
    """Go on in a process without network, with which all that it starts ends; False if the system refuses."""
    if sys.platform != "linux" or ctypes.CDLL(None).unshare(NEW_USER | NEW_PROCESSES | NEW_NETWORK):
        return False
    child = os.fork()  # the first of the new processes: Linux ends the others with it
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    end_with_parent()
    return True


def run(way: str, pipe: int) -> None:
    """Run the program; a test that passes is reported to the pipe."""
    if way == "input":
        os.close(pipe)
        runpy.run_path("program.py", run_name="__main__")
        return
    # A module of its own, which is not __main__: what a program does as a script is no part of it.
    module = sys.modules["program"] = types.ModuleType("program")
    for name in ("program.py", "test.py"):
        with open(name, "rb") as file:
            exec(compile(file.read(), name, "exec"), module.__dict__)
    os.write(pipe, PASSED)


def main() -> None:
    way, pipe, memory, file_size, seconds = sys.argv[1], *map(int, sys.argv[2:])
    sys.argv[:] = ["program.py"]
    end_with_parent()
    isolated = isolate()
    if way == "probe":
        os.write(pipe, PASSED if isolated else b"no")
        return
    limit(memory, file_size, seconds)
    run(way, pipe)


if __name__ == "__main__":
    main()
