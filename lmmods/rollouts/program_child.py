"""A process that runs the program of an answer under limits: `program_child.py WAY MEMORY FILE_SIZE SECONDS CHANNEL`.

WAY is `test` to run program.py and then a test with its names, `input` to run program.py as a script, and `probe` to
see only whether the process can be isolated: its status is 0 then. It imports nothing of this project, so that a
program starts fast.

CHANNEL is a socket to the process that judges. A program runs in this very process, so nothing may be open, stored or
known here with which it could claim a success. Therefore a test comes only after the program has run:

1. The judge sends a key. This process sends it back once the program has run to its end.
2. The judge sends a token and the test, in which no literal that an assert compares with is left.
3. This process sends the values to compare, and the token once the test has run to its end.
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

HEADER = 4  # bytes that tell the length of a message
SECRET = HEADER + 32  # bytes of a key or token with its header
REPORT = "__report__"  # function by which a test sends a value to compare
MARKS = ("LMMODS_REWARDS",)  # variable by which processes of rewards are found, wherever they have gone
NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000  # of Linux's sched.h
PARENT_DEATH_SIGNAL, NO_NEW_PRIVILEGES = 1, 38  # of Linux's prctl.h
# Of Linux's landlock.h: the rights to write, make and remove by the version that brought them, and the rest.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RIGHTS = {1: 0x1FF2, 2: 1 << 13, 3: 1 << 14}
WRITE_FILE, VERSION, PATH_BENEATH = 1 << 1, 1, 1


def limit(memory: int, file_size: int | None = None, seconds: int | None = None) -> None:
    """Limit memory and sizes of files in bytes, and CPU time in seconds; allow no core dumps."""
    import resource  # which Windows lacks

    for what, most in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_FSIZE, file_size), (resource.RLIMIT_CORE, 0)):
        if most is not None:
            resource.setrlimit(what, (most, most))
    if seconds is not None:
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


def confine() -> None:
    """Let this process write only in its folder, and neither change nor signal processes outside; as far as Linux can.

    Landlock needs no privileges and works in containers, where `isolate` often does not.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    version = libc.syscall(CREATE_RULESET, None, 0, VERSION)
    if version < 1:
        return
    rights = sum(bits for since, bits in RIGHTS.items() if version >= since)
    # No TCP connections since version 4, no signals and abstract sockets out of here since version 6.
    fields = (rights,) + (3,) * (version >= 4) + (3,) * (version >= 6)
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    rules = libc.syscall(CREATE_RULESET, attributes, len(attributes), 0)
    if rules < 0:
        return
    for path, allowed in ((".", rights), ("/dev/null", WRITE_FILE | rights & RIGHTS[3])):
        file = os.open(path, os.O_PATH)
        libc.syscall(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", allowed, file), 0)
        os.close(file)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc.syscall(RESTRICT_SELF, rules, 0)
    os.close(rules)


def refuse_hooks(event: str, arguments: tuple) -> None:
    """Refuse, as an audit hook, what lets a program act inside of others' frames, or skip lines of a test."""
    # Literals, since a program could change variables.
    if event in {"sys.settrace", "sys.setprofile", "sys.monitoring.register_callback", "sys.addaudithook",
                 "gc.get_objects", "gc.get_referents", "gc.get_referrers"} or (
            event == "object.__setattr__" and arguments[1] == "__code__"):
        raise RuntimeError(f"{event} is not allowed in programs under test")


def plain(value: object) -> object:
    """Return a value as Python's own types, without what subclasses add; `object` stands for all that has no such."""
    if value is None or isinstance(value, bool):
        return value
    for kinds, copy in COPIES:
        if isinstance(value, kinds):
            return copy(value)
    for kind in (int, float, complex):  # numbers of libraries
        try:
            number = kind(value)
            if number == value:
                return number
        except Exception:
            continue
    return object


COPIES = (
    (str, str.__str__), (int, int.__int__), (float, float.__float__), (complex, complex.__complex__),
    ((bytes, bytearray), bytes), (list, lambda value: [plain(each) for each in list.__iter__(value)]),
    (tuple, lambda value: tuple([plain(each) for each in tuple.__iter__(value)])),
    (frozenset, lambda value: frozenset([plain(each) for each in frozenset.__iter__(value)])),
    ((set, type({}.keys()), type({}.items())), lambda value: {plain(each) for each in value}),
    (dict, lambda value: {plain(key): plain(each) for key, each in dict.items(value)}))


def test(channel: int) -> None:
    """Run the program, and then the test that the judge sends."""
    # A module of its own, which is not __main__: what a program does as a script is no part of it.
    module = sys.modules["program"] = types.ModuleType("program")
    with open("program.py", "rb") as file:
        program = compile(file.read(), "program.py", "exec")
    sys.addaudithook(refuse_hooks)
    names, signals = module.__dict__, signal.valid_signals()
    # One expression, so that while the program runs only the interpreter's stack holds the key, and the functions that
    # are called later: a program finds or replaces variables, but has no way to the stack.
    finish(channel, names, os.read, os.write, open, exec, marshal.loads, signal.pthread_sigmask, signal.SIG_UNBLOCK,
           signals, os.write(channel, os.read(channel, SECRET) + settle(
               channel, names, vars(builtins), dict(vars(builtins)), signal.pthread_sigmask, signal.SIG_BLOCK, signals,
               sys._current_frames, os.waitpid, os.WNOHANG, ChildProcessError, os.write, pickle.dumps,
               exec(program, names))))


def settle(channel, names, current, builtin, mask, block, signals, threads, wait, at_once, no_child, write,  # noqa: ANN001
           dumps, _) -> bytes:  # noqa: ANN001
    """See that nothing of the program runs until the test does, for it could read the token; return nothing to send.

    Raises:
        RuntimeError: Threads or processes of the program are still running.
    """
    def report(number: int, value: object) -> None:
        message = dumps((number, plain(value)), 4)
        message = len(message).to_bytes(HEADER, "big") + message
        while message:
            message = message[write(channel, message):]

    mask(block, signals)
    current.update(builtin)  # those that the program has replaced
    names.update({"__builtins__": current, REPORT: report})
    # In this module the program may have defined any name, so none is used that matters.
    if not [*threads()][1:]:
        try:
            while wait(-1, at_once)[0]:
                pass
        except no_child:
            return b""
    raise RuntimeError("threads or processes of the program are still running")


def finish(channel, names, read, write, open_, execute, loads, mask, unblock, signals, _) -> None:  # noqa: ANN001
    """Run the test with the names of the program; send the token if it ends without an exception."""
    # As in `test`, only the stack holds the token while the test runs.
    write(channel, read(channel, SECRET) + (execute((
        loads(open_(channel, "rb", closefd=False).read()), mask(unblock, signals))[0], names) or b""))


def main() -> None:
    way, memory, file_size, seconds, channel = sys.argv[1], *map(int, sys.argv[2:])
    sys.argv[:] = ["program.py"]
    os.set_inheritable(channel, False)
    end_with_parent()
    isolated = isolate()
    if way == "probe":
        sys.exit(not isolated)
    confine()
    limit(memory, file_size, seconds)
    if way == "test":
        test(channel)
    else:
        os.close(channel)
        runpy.run_path("program.py", run_name="__main__")


if __name__ == "__main__":
    main()
