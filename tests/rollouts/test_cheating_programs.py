"""Programs that try to pass tests without being right must fail, and honest but unusual programs must pass."""

import ctypes
import os
import secrets
import subprocess
import sys
import time

import pytest

from lmmods.rollouts import code_tests
from lmmods.rollouts.asserts import compile_test
from lmmods.rollouts.named_rewards import Unscorable
from tests.rollouts.test_rewards import needs_isolation, reward

EQUAL = "assert add(1, 2) == 3"  # compared by the judge
NEAR = "three, x = 3, add(1, 2)\nassert abs(x - three) < three / 1e9\nx = None"  # compared in the program's process
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)"
CHECKS = "def more(f):\n    assert f(2, 2) == 4\ndef check(f):\n    assert f(1, 2) == 3\n    more(f)\ncheck(add)"


def has_landlock() -> bool:
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, 0, 1) >= 1


needs_landlock = pytest.mark.skipif(not has_landlock(), reason="needs Landlock")


def score(program: str, tests, seconds: float = 20) -> float:
    return code_tests.run_tests(program, tests, seconds, count_all=True)


WRITES = """
import os
def claim():
    for fd in range(3, 30):
        try:
            os.write(fd, b"passed")
        except OSError:
            pass
"""
EVERYTHING = """
class Everything:
    def __eq__(self, other): return True
    def __lt__(self, other): return True
    def __sub__(self, other): return self
    def __abs__(self): return self
"""
SPEAKS = """
import gc, os, sys
def secrets():
    frame, found = sys._getframe(), []
    while frame:
        values = [*frame.f_locals.values(), *frame.f_globals.values(), *gc.get_referents(frame)]
        values += [part for value in values if isinstance(value, (tuple, list)) for part in value]
        found += [value for value in values if type(value) is bytes and len(value) == 36]
        frame = frame.f_back
    return set(found) or {(32).to_bytes(4, "big") + bytes(32)}
def speak():
    for fd in range(3, 30):
        for secret in secrets():
            try:
                os.write(fd, secret)
                os.write(fd, os.read(fd, 10 ** 6)[:36])
            except OSError:
                pass
"""
LISTENS = """
import __main__, os, select, stat, time
__main__.len = lambda _: 1
def add(a, b): return 4
def echo(fd):
    if stat.S_ISSOCK(os.fstat(fd).st_mode):
        os.write(fd, os.read(fd, 10 ** 6)[:36])
def later(*_):
    for fd in range(3, 30):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and select.select([fd], [], [], 0.005)[0]:
                os.write(fd, os.read(fd, 10 ** 6)[:36])
        except OSError:
            pass
"""
JUMPS = """
import sys
def add(a, b):
    frame = sys._getframe(1)
    def jump(frame, event, argument):
        if frame.f_lineno == 2:
            frame.f_lineno = 3
        return jump
    frame.f_trace = jump
    sys.settrace(jump)
"""

CHEATS = {
    "leaves": ("import os; os._exit(0)", EQUAL),
    "exits": ("import sys; sys.exit(0)", EQUAL),
    "leaves in the test": ("import os\ndef add(a, b): os._exit(0)", NEAR),
    "exits in the test": ("import sys\ndef add(a, b): sys.exit(0)", NEAR),
    "claims": (WRITES + "claim()\nos._exit(0)", EQUAL),
    "claims in the test": (WRITES + "def add(a, b):\n    claim()\n    os._exit(0)", NEAR),
    "claims at the exit": (WRITES + "import atexit; atexit.register(claim)\nadd = None", EQUAL),
    "claims in a thread": (
        WRITES + "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), claim(), os._exit(0))).start()\nadd = None", EQUAL),
    "claims in a fork": (WRITES + "if os.fork() == 0:\n    claim()\n    os._exit(0)\nadd = None", EQUAL),
    "claims at length": ("import os\nfor fd in range(3, 30):\n    try: os.write(fd, b'\\xff' * 10 ** 5)\n"
                     "    except OSError: pass", EQUAL),
    "prints": ("print('passed')\nimport os; os._exit(0)", EQUAL),
    "speaks": (SPEAKS + "speak()\nos._exit(0)", NEAR),
    "speaks in the test": (SPEAKS + "def add(a, b):\n    speak()\n    os._exit(0)", NEAR),
    "listens in a thread": (LISTENS + "import _thread\n"
                            "for fd in range(3, 30): _thread.start_new_thread(echo, (fd,))\n"
                            "time.sleep(0.1)", NEAR),
    "listens in a process": (LISTENS + "for fd in range(3, 30):\n    if os.fork() == 0:\n        echo(fd)\n"
                             "        os._exit(0)\ntime.sleep(0.1)", NEAR),
    "listens at a signal": (LISTENS + "import signal\nsignal.signal(signal.SIGALRM, later)\n"
                            "signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)", NEAR),
    "listens when it is deleted": (LISTENS + "import builtins\nclass Late: __del__ = later\n"
                                   "builtins.abs = Late()", NEAR),
    "reads the test": ("import re\ntext = open('test.py').read()\n"
                       "def add(a, b): return int(re.search(r'== (\\d+)', text)[1])", EQUAL),
    "reads the caller": ("import sys\ndef add(a, b):\n"
                         "    return max(c for c in sys._getframe(1).f_code.co_consts if type(c) is int)", EQUAL),
    "reads the caller's caller": (
        "import sys\ndef add(a, b):\n    return max(c for c in sys._getframe(1).f_code.co_consts if type(c) is int)",
        CHECK),
    "tries the values": ("n = 0\ndef add(a, b):\n    global n\n    n += 1\n    return n", [EQUAL] * 3),
    "equals everything": (EVERYTHING + "def add(a, b): return Everything()", EQUAL),
    "silences the asserts of a check": (
        "def add(a, b):\n    globals()['__report__'] = lambda *_: None\n    return 3", CHECKS),
    "silences an assert of a check": (
        "def add(a, b):\n    for cell in globals()['__report__'].__closure__:\n"
        "        if getattr(cell.cell_contents, '__name__', '') == 'write':\n"
        "            cell.cell_contents = lambda _, message: len(message)", CHECKS),
    "equals everything in a check": (EVERYTHING + "def add(a, b): return Everything()", CHECK),
    "equals everything in a list": (EVERYTHING + "def add(a, b): return [Everything()]", "assert add(1, 2) == [3]"),
    "equals everything on the right": (EVERYTHING + "def add(a, b): return Everything()", "assert 3 == add(1, 2)"),
    "equals everything in a tuple": (EVERYTHING + "def add(a, b): return Everything()", "assert add(1, 2) in (3, 4)"),
    "is less than everything": (EVERYTHING + "def add(a, b): return Everything()", "assert add(1, 2) < 3"),
    "is far from nothing": (EVERYTHING + "def add(a, b): return Everything()",
                            "assert abs(add(1, 2) - 3) < 1e-9"),
    "equals everything as a number": ("class N(int):\n    __eq__ = lambda *_: True\n    __hash__ = int.__hash__\n"
                                      "def add(a, b): return N()", EQUAL),
    "says to be a number": ("class N:\n    __class__ = int\n    __eq__ = lambda *_: True\n    __int__ = lambda _: 4\n"
                            "def add(a, b): return N()", EQUAL),
    "sends code": ("class N:\n    __class__ = bool\n    def __reduce__(self): return eval, ('3',)\n"
                   "def add(a, b): return N()", EQUAL),
    "runs nothing": ("import builtins; builtins.exec = lambda *_: None", EQUAL),
    "runs nothing of the caller": ("import __main__; __main__.exec = lambda *_: None", "assert False"),
    "opens nothing": ("import builtins, io; builtins.open = lambda *_, **__: io.BytesIO(b'')", EQUAL),
    "compiles nothing": ("import builtins; f = compile; builtins.compile = lambda *_, **__: f('', 'a', 'exec')", EQUAL),
    "replaces its caller": ("import __main__\nfor f in list(vars(__main__).values()):\n"
                            "    if hasattr(f, '__code__'): f.__code__ = (lambda *_, **__: b'').__code__", EQUAL),
    "replaces a builtin": ("import builtins; builtins.abs = lambda _: 0\ndef add(a, b): return 0", NEAR),
    "replaces the builtins": ("import builtins\n__builtins__ = {**vars(builtins), 'abs': lambda _: 0}\n"
                              "def add(a, b): return 0", NEAR),
    "jumps over lines": (JUMPS, NEAR),
    "jumps over lines compared elsewhere": (JUMPS, f"add(1, 2)\n{EQUAL}\nx = None"),
    "replaces the error": ("import builtins; builtins.AssertionError = type('A', (Exception,), {})\nadd = max", NEAR),
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheating_programs_fail(name):
    program, tests = CHEATS[name]
    start = time.monotonic()
    assert score(program, tests) < 1
    assert time.monotonic() - start < 10


SEARCHES = """
import glob, re
for path in ["/proc/self/cmdline", "/proc/self/environ", *glob.glob("/proc/{pid}/[ce][mn]*"),
             *glob.glob("**", recursive=True), *glob.glob("../**", recursive=True)]:
    try:
        print(re.search("right-[0-9a-f]{{32}}", open(path, errors="replace").read())[0])
        break
    except (OSError, TypeError):
        pass
"""


def test_a_program_cannot_find_the_expected_output(tmp_path, monkeypatch):
    monkeypatch.setattr(code_tests.tempfile, "tempdir", str(tmp_path))
    right = f"right-{secrets.token_hex(16)}"
    assert score(SEARCHES.format(pid=os.getpid()), {"inputs": ["a"], "outputs": [right]}) == 0


@needs_landlock
def test_a_program_cannot_read_the_memory_of_the_judge():
    assert score(f"open('/proc/{os.getpid()}/mem', 'rb')\nprint('read')", {"inputs": [""], "outputs": ["read"]}) == 0


@needs_landlock
def test_a_program_cannot_write_outside_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for path in (tmp_path / "kept", "/dev/shm/lmmods-test-kept"):
        assert score(f"open({str(path)!r}, 'w').write('a')", ["assert True"]) == 0
        assert not os.path.exists(path)
    program = "import os, tempfile\nfile = tempfile.NamedTemporaryFile('w')\nfile.write('a')\nopen('own', 'w').close()"
    assert score(program, ["assert os.path.dirname(file.name) == os.getcwd()", "open(os.devnull, 'w').write('a')"]) == 1


@pytest.mark.parametrize("program", [
    "import os\nfor _ in range(1100):\n    os.mkdir('a')\n    os.chdir('a')", "open('a', 'w').close()"])
def test_the_files_of_a_program_are_deleted(tmp_path, monkeypatch, program):
    monkeypatch.setattr(code_tests.tempfile, "tempdir", str(tmp_path))
    try:
        assert score(program, ["assert False"]) == 0
        assert not list(tmp_path.iterdir())
    finally:  # pytest cannot remove such deep folders
        subprocess.run(["rm", "-rf", *tmp_path.iterdir()], check=True)


def test_a_program_that_sends_forever_is_stopped_in_time():
    start = time.monotonic()
    assert score("", "while True:\n    assert 1 == 1", 0.5) == 0
    assert time.monotonic() - start < 5


@needs_isolation
def test_a_program_cannot_kill_the_judge():
    assert score("import os, signal; os.kill(-1, signal.SIGKILL); os.kill(os.getppid(), 9)", ["assert False"]) == 0


# Honest programs ------------------------------------------------------------------------------------------------------

HONEST = {
    "tuples with names": ("from collections import namedtuple\nP = namedtuple('P', 'x y', defaults=(0,))\n"
                          "def f(): return P(1)", ["assert f() == (1, 0)", "assert f().x == 1"]),
    "dicts": ("from collections import Counter, OrderedDict, defaultdict\nd = defaultdict(list)\nd['a'].append(1)",
              ["assert Counter('aab') == {'a': 2, 'b': 1}", "assert d == {'a': [1]}",
               "assert OrderedDict(a=(1, {2})) == {'a': (1, {2})}", "assert {'a': 1}.keys() == {'a'}",
               "assert d.get('b') is None"]),
    "numbers": ("from fractions import Fraction\nfrom decimal import Decimal\nfrom enum import Enum\n"
                "class E(str, Enum):\n    A = 'a'",
                ["assert Fraction(1, 2) == 0.5", "assert Decimal('3') == 3",
                 "assert Fraction(1, 3) != 0.3333333333333333",
                 "assert 1 == True", "assert 2 ** 20000 != 3", "assert float('nan') != 1.0", "assert 1j * 1j == -1",
                 "assert E.A == 'a'", "assert complex(0, 1) == 1j", "assert 0.1 + 0.2 != 0.3", "assert -3 < 2.5"]),
    "texts": ("s = 'ä\\ud800'", ["assert s == 'ä\\ud800'", "assert bytearray(b'a') == b'a'", "assert 'ä' in s",
                                 "assert s not in ('a', 'b')", "assert frozenset('a') == {'a'}",
                                 "import os\nassert 'HOME' in os.environ"]),
    "own objects": ("class V:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x",
                    ["assert V(1) == V(1)", "assert V(1) is not None", "assert [V(1)] != []", "assert not V(1) == V(2)",
                     "v = V([1])\nv.x.append(2)\nassert v.x == [1, 2]"]),
    "exceptions": ("def f(x):\n    if x < 0: raise ValueError('negative')\n    return x",
                   ["try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'negative'",
                    "try:\n    assert f(1) == 2\nexcept AssertionError:\n    assert f(1) == 1"]),
    "a check": ("def add(a, b):\n    return a + b", [CHECK, NEAR, "for x in range(3):\n    assert add(x, -x) == 0",
                                                     "assert add(1, 2) == 3 and add(2, 2) == 4 and add(1, 1)",
                                                     "assert 1 < add(1, 1) < 3, 'between'", "assert add(1, 2) in [3]"]),
    "names of the test": ("def f(x): return Node(x + 1)",
                          ["class Node:\n    def __init__(self, v): self.v = v\nassert f(1).v == 2"]),
    "names like builtins": ("def max(a, b):\n    return a if a > b else b", ["assert max(1, 2) == 2"]),
    "a thread that has ended": ("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
                                ["assert t"]),
    "long values": ("def f(): return list(range(10 ** 5))", ["assert f() != []", "assert 5 in f()"]),
    "future": ("from __future__ import annotations\nimport inspect\ndef f(x: Later): return x",
               ["from __future__ import annotations\nassert inspect.getsource(f)[-9:] == 'return x\\n'",
                "assert f.__annotations__ == {'x': 'Later'}"]),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_pass(name):
    program, tests = HONEST[name]
    assert [score(program, test) for test in tests] == [1] * len(tests)


@pytest.mark.parametrize("test", [
    "assert f(1) == 2", "assert 2 == f(1)", "assert f(1) is True", "assert f(1) != 1", "assert f([]) is not f([])",
    "assert f(1) == 1 and f(1) == 2", "assert f(1) == 2 and f(1) == 1", "assert f('a') < 3", "assert f(1) in (2, 3)",
    "def check():\n    assert f(1) == 2\ncheck()", "for x in (1, 2):\n    assert f(x) == 1",
    "with open('/dev/null'):\n    assert f(1) == 2", "assert f([1]) == (1,)", "assert f(float('nan')) == 1.0"])
def test_wrong_programs_fail(test):
    program = "one = []\ndef f(x): return one if x == [] else x"
    assert score(program, test) == 0


def test_literals_of_tests_stay_with_the_judge():
    code, comparisons = compile_test("assert f(1) == 'secret' and g(2) > 12345\nassert h() in 'word'")
    assert not any(literal in code for literal in (b"secret", (12345).to_bytes(4, "little"), b"word"))
    assert [comparison.literal for comparison in comparisons] == ["secret", 12345, "word"]


@pytest.mark.parametrize(("test", "message"), [
    ("def check(candidate):\n    assert candidate(1) == 1", "only defines functions or variables. Call them"),
    ('"""Doc."""\nimport math\nMETADATA = {"author": "x"}\ndef check(f): assert f(1)', "only defines"),
    ("# nothing", "only defines"), ("x = 1\nassert x ==", "a test is not Python code: line 2: invalid syntax"),
    ("print 1", "a test is not Python code: line 1: Missing parentheses"), ("a\0", "null bytes"),
    ("assert " + "(" * 1000 + ")" * 1000, "too")])
def test_tests_without_an_assertion_are_rejected(test, message):
    with pytest.raises(Unscorable, match=f"column tests: .*{message}"):
        reward("x = 1", test, name="code")
