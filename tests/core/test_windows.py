"""Windows: all modules can be imported without what it lacks, and run folders are locked with msvcrt."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmmods.runs.lock import FILE

ROOT = Path(__file__).parents[2]
IMPORT_ALL = """
import builtins, importlib, os, pkgutil, signal

import datasets, lightning, peft, torch, transformers  # these support Windows

import lmmods
LACKING = {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "readline", "syslog", "curses"}
real = builtins.__import__

def import_on_windows(name, globals=None, *rest):
    if name.partition(".")[0] in LACKING and (globals or {}).get("__name__", "").startswith("lmmods"):
        raise ModuleNotFoundError(f"No module named {name!r}")
    if name == "msvcrt":
        return None
    return real(name, globals, *rest)

builtins.__import__ = import_on_windows
for name in ("register_at_fork", "pread", "pwrite", "O_CLOEXEC"):
    delattr(os, name)
del signal.SIGUSR1
names = [module.name for module in pkgutil.walk_packages(lmmods.__path__, "lmmods.")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""
# Locks of msvcrt are per process and byte, like those of POSIX.
MSVCRT = """
import fcntl, os, sys, types
from pathlib import Path

import psutil  # imports msvcrt to detect the system

def locking(file, mode, count, lockf=fcntl.lockf):
    assert mode == "LK_NBLCK" and count == 1
    try:
        lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, count, os.lseek(file, 0, os.SEEK_CUR))
    except OSError as error:
        raise PermissionError(13, "Permission denied") from error

sys.modules.update(fcntl=None, msvcrt=types.SimpleNamespace(LK_NBLCK="LK_NBLCK", locking=locking))
from lmmods.core.errors import UserError
from lmmods.runs.lock import FolderLock, lock_file
"""
HOLD = MSVCRT + """
lock = FolderLock(Path(sys.argv[1]))
lock.take("fit")
print("held", flush=True)
sys.stdin.read()
lock.release()
"""
TRY = MSVCRT + """
try:
    FolderLock(Path(sys.argv[1])).take("validate")
except UserError as error:
    sys.exit(str(error))
"""
WAIT = MSVCRT + """
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
print("waiting", flush=True)
lock_file(file, wait=True)
print("free", flush=True)
"""
SCORE = """
import sys

from lmmods.core.errors import UserError
from lmmods.rollouts.reward_processes import RewardProcesses
sys.platform = "win32"
try:
    RewardProcesses(1).load({"reward": None})
except UserError as error:
    sys.exit(str(error))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs no stand-ins on Windows")
def test_every_module_can_be_imported_without_what_windows_lacks():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 200


def start(program: str, folder: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", program, str(folder)], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE)


@pytest.mark.skipif(sys.platform == "win32", reason="test_lock.py tests the real locks")
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_run_folder_is_locked_without_fcntl(tmp_path, is_killed):
    def attempt() -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-c", TRY, str(tmp_path / "run")], cwd=ROOT, capture_output=True,
                              text=True)

    with start(HOLD, tmp_path / "run") as holder:
        assert holder.stdout.readline() == "held\n"
        assert json.loads((tmp_path / "run" / FILE).read_text())["pid"] == holder.pid
        assert f"is in use by process {holder.pid} on " in attempt().stderr
        holder.kill() if is_killed else holder.stdin.close()
        holder.wait()
    assert (tmp_path / "run").exists() is is_killed
    assert attempt().returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="test_lock.py tests the real locks")
def test_a_lock_is_waited_for_without_fcntl(tmp_path):
    with start(HOLD, tmp_path / "run") as holder:
        assert holder.stdout.readline() == "held\n"
        with start(WAIT, tmp_path / "run" / FILE) as other:
            assert other.stdout.readline() == "waiting\n"
            time.sleep(0.2)
            assert other.poll() is None
            holder.kill()
            assert other.stdout.readline() == "free\n"


def test_scoring_answers_on_windows_is_an_error():
    done = subprocess.run([sys.executable, "-c", SCORE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.strip().endswith("Train in WSL 2")
