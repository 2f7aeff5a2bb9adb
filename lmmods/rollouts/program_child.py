"""Run an answer's program under limits: `program_child.py MODE MEMORY FILE_SIZE SECONDS CHANNEL`.

MODE `test` runs program.py and then a test in its namespace. `input` runs program.py as a script. `probe` only checks
whether the process can be isolated, with exit status 0 if so. This file imports nothing of this project, so programs
start fast.

CHANNEL is a socket to the judging process. The program runs in this process, so nothing that could claim a success may
be open, stored or known here. Therefore the test arrives only after the program has run:

1. The judge sends a key. This process returns it once the program has finished.
2. The judge sends a token and the test, without the literals that its asserts compare with.
3. This process sends the values to compare, and the token once the test has finished.
"""

import builtins
import ctypes
import marshal
import os
import pickle
import runpy
import signal
import struct
import sys
import types

HEADER = 4  # bytes with the length of a message
SECRET = HEADER + 32  # bytes of a key or token with its header
REPORT = "__report__"  # function by which a test sends a value to compare
MARKS = ("LMMODS_REWARDS",)  # variable by which processes are found that have left their session
NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000  # from Linux's sched.h
PARENT_DEATH_SIGNAL, NO_NEW_PRIVILEGES = 1, 38  # from Linux's prctl.h
# From Linux's landlock.h. RIGHTS has the rights to write, create and remove, by the version that introduced them.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RIGHTS = {1: 0x1FF2, 2: 1 << 13, 3: 1 << 14}
WRITE_FILE, VERSION, PATH_BENEATH = 1 << 1, 1, 1


def limit(memory: int, file_size: int | None = None, seconds: int | None = None) -> None:
    """Limit memory and file sizes in bytes and CPU time in seconds; forbid core dumps."""
    import resource  # Windows does not have it

    for kind, value in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_FSIZE, file_size), (resource.RLIMIT_CORE, 0)):
        if value is not None:
            resource.setrlimit(kind, (value, value))
    if seconds is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def end_with_parent() -> None:
    """Make Linux kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def isolate() -> bool:
    """Continue in a process without network, whose end ends its children. Return False if the system refuses."""
    if sys.platform != "linux" or ctypes.CDLL(None).unshare(NEW_USER | NEW_PROCESSES | NEW_NETWORK):
        return False
    child = os.fork()  # the first process of the namespace: Linux ends the others with it
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    end_with_parent()
    return True


def confine() -> None:
    """Restrict writing to the working folder, and forbid signals to other processes, as far as this Linux can.

    Landlock needs no privileges and works in containers, where `isolate` often does not.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    version = libc.syscall(CREATE_RULESET, None, 0, VERSION)
    if version < 1:
        return
    rights = sum(bits for introduced, bits in RIGHTS.items() if version >= introduced)
    # Version 4 can also forbid TCP connections, version 6 signals and abstract sockets to the outside.
    fields = (rights,) + (3,) * (version >= 4) + (3,) * (version >= 6)
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    rules = libc.syscall(CREATE_RULESET, attributes, len(attributes), 0)
    if rules < 0:
        return
    for path, allowed_rights in ((".", rights), ("/dev/null", WRITE_FILE | rights & RIGHTS[3])):
        file = os.open(path, os.O_PATH)
        libc.syscall(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", allowed_rights, file), 0)
        os.close(file)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc.syscall(RESTRICT_SELF, rules, 0)
    os.close(rules)


def refuse_hooks(event: str, arguments: tuple) -> None:
    """Audit hook: reject calls by which a program could act inside other frames or skip lines of a test."""
    # Literals, as a program could change variables.
    if event in {"sys.settrace", "sys.setprofile", "sys.monitoring.register_callback", "sys.addaudithook",
                 "gc.get_objects", "gc.get_referents", "gc.get_referrers"} or (
            event == "object.__setattr__" and arguments[1] == "__code__"):
        raise RuntimeError(f"{event} is not allowed in programs under test")


def to_plain(value: object) -> object:
    """Convert a value to Python's own types, without what subclasses add; `object` for values of any other type."""
    if value is None or isinstance(value, bool):
        return value
    for source_types, copy in COPIES:
        if isinstance(value, source_types):
            return copy(value)
    for number_type in (int, float, complex):  # of libraries such as NumPy
        try:
            converted = number_type(value)
            if converted == value:
                return converted
        except Exception:
            continue
    return object


COPIES = (
    (str, str.__str__), (int, int.__int__), (float, float.__float__), (complex, complex.__complex__),
    ((bytes, bytearray), bytes), (list, lambda value: [to_plain(item) for item in list.__iter__(value)]),
    (tuple, lambda value: tuple([to_plain(item) for item in tuple.__iter__(value)])),
    (frozenset, lambda value: frozenset([to_plain(item) for item in frozenset.__iter__(value)])),
    ((set, type({}.keys()), type({}.items())), lambda value: {to_plain(item) for item in value}),
    (dict, lambda value: {to_plain(key): to_plain(item) for key, item in dict.items(value)}))


def test(channel: int) -> None:
    """Run the program, then the test that the judge sends."""
    # Its own module, not __main__, so that code for running as a script does not run.
    module = sys.modules["program"] = types.ModuleType("program")
    with open("program.py", "rb") as file:
        program = compile(file.read(), "program.py", "exec")
    sys.addaudithook(refuse_hooks)
    names, signals = module.__dict__, signal.valid_signals()
    # One expression, so that only the interpreter's stack has the key and the functions that are called later. A
    # program can find or replace variables, but cannot reach the stack.
    finish(channel, names, os.read, os.write, open, exec, marshal.loads, signal.pthread_sigmask, signal.SIG_UNBLOCK,
           signals, os.write(channel, os.read(channel, SECRET) + settle(
               channel, names, vars(builtins), dict(vars(builtins)), signal.pthread_sigmask, signal.SIG_BLOCK, signals,
               sys._current_frames, os.waitpid, os.WNOHANG, ChildProcessError, os.write, pickle.dumps,
               exec(program, names))))


def settle(channel, names, current, builtin, mask, block, signals, threads, wait, at_once, no_child, write,  # noqa: ANN001
           dumps, _) -> bytes:  # noqa: ANN001
    """Check that nothing of the program is still running, as it could read the token; return nothing to send.

    Raises:
        RuntimeError: Threads or processes of the program are still running.
    """
    def report(index: int, value: object) -> None:
        message = dumps((index, to_plain(value)), 4)
        message = len(message).to_bytes(HEADER, "big") + message
        while message:
            message = message[write(channel, message):]

    mask(block, signals)
    current.update(builtin)  # restores what the program has replaced
    names.update({"__builtins__": current, REPORT: report})
    # The program may have changed any name of this module, so nothing here depends on one.
    if not [*threads()][1:]:
        try:
            while wait(-1, at_once)[0]:
                pass
        except no_child:
            return b""
    raise RuntimeError("threads or processes of the program are still running")


def finish(channel, names, read, write, open_, execute, loads, mask, unblock, signals, _) -> None:  # noqa: ANN001
    """Run the test in the program's namespace; send the token if it ends without an exception."""
    # As in `test`, only the stack has the token while the test runs.
    write(channel, read(channel, SECRET) + (execute((
        loads(open_(channel, "rb", closefd=False).read()), mask(unblock, signals))[0], names) or b""))


def main() -> None:
    mode, memory, file_size, seconds, channel = sys.argv[1], *map(int, sys.argv[2:])
    sys.argv[:] = ["program.py"]
    os.set_inheritable(channel, False)
    end_with_parent()
    is_isolated = isolate()
    if mode == "probe":
        sys.exit(not is_isolated)
    confine()
    limit(memory, file_size, seconds)
    if mode == "test":
        test(channel)
    else:
        os.close(channel)
        runpy.run_path("program.py", run_name="__main__")


if __name__ == "__main__":
    main()
