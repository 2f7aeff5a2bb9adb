"""One process per run folder; a killed trainer leaves no process."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.runs import lock as locks
from lmmods.runs.folder import RunFolder
from lmmods.runs.lock import FolderLock

ROOT = Path(__file__).parent.parent.parent
HOLDER = "import sys, time; from lmmods.runs.lock import FolderLock; from pathlib import Path; " \
         "FolderLock(Path(sys.argv[1])).take('fit'); print('held', flush=True); time.sleep(600)"


@pytest.fixture
def holder(tmp_path):
    """Start another process that holds the lock of tmp_path/run."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize("command", ["fit", "resume", "validate"])
def test_a_run_folder_in_use_is_rejected(recipe, tmp_path, holder, engine, command, capfd):
    extra = ["--ckpt_path", "last"] if command == "resume" else []
    assert main(["validate" if command == "validate" else "fit", *recipe(engine=engine), *extra]) == 2
    error = capfd.readouterr().err
    assert f"is in use by process {holder.pid} on {socket.gethostname()} (fit, since " in error
    assert os.listdir(tmp_path / "run") == [locks.FILE]


def test_a_killed_process_releases_its_lock(tmp_path, holder):
    holder.kill()
    holder.wait()
    lock = FolderLock(tmp_path / "run")
    lock.take("fit")
    lock.release()
    assert os.listdir(tmp_path / "run") == []


def test_child_processes_do_not_hold_the_lock(tmp_path):
    lock = FolderLock(tmp_path / "run")
    lock.take("fit")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # outlives its parent, like a data worker of a killed trainer
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        lock.release()
        other = FolderLock(tmp_path / "run")
        other.take("fit")
        other.release()
    finally:
        os.close(write)
        os.waitpid(child, 0)
        os.close(read)
    assert not (tmp_path / "run").exists()


def test_a_command_that_fails_leaves_no_lock_and_no_folder(tmp_path):
    run = RunFolder(tmp_path / "a" / "run")
    with pytest.raises(KeyboardInterrupt), run.lock("fit"):
        assert run.root.exists()
        raise KeyboardInterrupt
    assert not (tmp_path / "a").exists()


def write_lock_file(folder: Path, **changes) -> None:
    folder.mkdir()
    content = {"host": socket.gethostname(), "pid": 1, "command": "fit", "started": "yesterday"}
    (folder / locks.FILE).write_text(json.dumps(content | changes))


@pytest.mark.parametrize("lock", ["unsupported", "local"])
def test_without_locks_across_hosts_the_lock_file_contents_decide(tmp_path, monkeypatch, lock):
    if lock == "local":
        monkeypatch.setattr(locks, "mount_of", lambda path: "36 35 0:50 / /mnt rw - nfs host:/x rw,local_lock=all")
    else:
        def flock(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", flock)
    write_lock_file(tmp_path / "run", host="elsewhere")
    with pytest.raises(UserError, match=r"process 1 on elsewhere \(fit, since yesterday\).*delete .*run-lock"):
        FolderLock(tmp_path / "run").take("fit")
    write_lock_file(tmp_path / "dead", pid=2**22 + 1)  # above the largest possible process id
    FolderLock(tmp_path / "dead").take("fit")
    write_lock_file(tmp_path / "alive", pid=os.getppid())
    with pytest.raises(UserError, match=f"process {os.getppid()} on"):
        FolderLock(tmp_path / "alive").take("fit")


def test_a_requeued_job_may_take_its_own_old_lock(tmp_path, monkeypatch):
    """A requeued job that restarts on another machine, which the lock does not reach."""
    monkeypatch.setattr(locks, "mount_of", lambda path: "36 35 0:50 / /mnt rw - nfs host:/x rw,local_lock=all")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    write_lock_file(tmp_path / "before", host="elsewhere", job=["17", "0"])
    FolderLock(tmp_path / "before").take("fit")
    for name, job in (("now", ["17", "1"]), ("other", ["16", "0"])):
        write_lock_file(tmp_path / name, host="elsewhere", job=job)
        with pytest.raises(UserError, match="process 1 on elsewhere"):
            FolderLock(tmp_path / name).take("fit")


def test_a_stale_lock_file_is_ignored_where_locks_reach_other_hosts(tmp_path):
    write_lock_file(tmp_path / "run", host="elsewhere")
    lock = FolderLock(tmp_path / "run")
    lock.take("fit")
    lock.release()


# Orphans ---------------------------------------------------------------------------------------------------------


def find_processes(session: int) -> list[str]:
    """Return the processes of a session that have not ended."""
    names = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, fields = path.read_text().rpartition(") ")
        except OSError:  # it has just ended
            continue
        if int(fields.split()[3]) == session and fields[0] != "Z":
            names.append(name)
    return names


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_killing_the_trainer_leaves_no_process(recipe, tmp_path, engine):
    arguments = recipe(engine=engine, trainer__max_steps=100000, data__init_args__num_workers=2,
                       model__init_args__quantize=None, trainer__limit_val_batches=0)
    process = subprocess.Popen([sys.executable, "train.py", "fit", *arguments], cwd=ROOT, start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (tmp_path / "run" / "metrics.csv").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    assert len(find_processes(process.pid)) > 3  # workers and their servers
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while find_processes(process.pid):
        assert time.monotonic() < deadline, find_processes(process.pid)
        time.sleep(0.05)


SLOW_ENCODER = """
import sys, time
from lmmods.data.store.cache import encode_batches
from lmmods.data.read.readers import Row

def sleep(rows):
    print("working", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    list(encode_batches((Row("file", n, {"text": "x" * 2**20}) for n in range(4)), sleep, 2))
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_killing_the_trainer_while_it_tokenises_leaves_no_process(tmp_path):
    (tmp_path / "encode.py").write_text(SLOW_ENCODER)
    process = subprocess.Popen([sys.executable, str(tmp_path / "encode.py")], start_new_session=True,
                               stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert process.stdout.readline() == b"working\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while find_processes(process.pid):
        assert time.monotonic() < deadline, find_processes(process.pid)
        time.sleep(0.05)
    process.stdout.close()
