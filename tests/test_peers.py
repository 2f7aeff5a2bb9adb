"""Processes that watch each other: what the others do where one of them is killed, fails, or ends."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lmmods.core.errors import UserError
from lmmods.core.peers import Peers

# A process: it meets the others through a file, says that it works, and goes on as its last argument says.
PROCESS = """
import json, os, pathlib, signal, sys, time
from lmmods.core import peers
from lmmods.core.errors import UserError
from lmmods.core.signals import Interrupted

rank, folder, end, timeout = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
peers.ENDING, peers.HEARING = 0.5, 1.0

def share(value):
    if value is not None:
        (folder / "new").write_text(json.dumps(value))
        (folder / "new").rename(folder / "address")
    while not (folder / "address").exists():
        time.sleep(0.01)
    return json.loads((folder / "address").read_text())

watch = peers.Peers(timeout)
with watch.end_together():
    watch.meet(rank, 3, share)
    (folder / f"works-{rank}").touch()
    while len(list(folder.glob("works-*"))) < 3:
        time.sleep(0.01)
    time.sleep(0.2)
    if end == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "hangs":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    if end == "fails":
        raise RuntimeError("of this process")
    if end == "mistaken":
        raise UserError("of all processes")
    if end == "stopped":
        raise Interrupted("at once")
    if end == "misses":
        time.sleep(0.1)
        raise RuntimeError("connection reset")
    if end == "waits":
        time.sleep(60)
"""
GONE = "killed, or its machine cannot be reached. The other processes end, too. --ckpt_path auto goes on from the last"


def ends(folder: Path, *how: str, timeout: int = 30) -> tuple[list[int], list[str]]:
    """Statuses and last lines of three processes that end so; it takes them less than ten seconds.

    Those that are stopped go on when those before them have ended.
    """
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS, str(rank), str(folder), end, str(timeout)], text=True,
                                  stderr=subprocess.PIPE, env={**os.environ, "MASTER_ADDR": "127.0.0.1"})
                 for rank, end in enumerate(how)]
    said = []
    try:
        for process, end in zip(processes, how):
            if end == "hangs" and said:
                process.send_signal(signal.SIGCONT)
            said.append(process.communicate(timeout=10)[1].strip())
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], [text.split("\n")[-1] for text in said]


def test_the_first_tells_which_are_lost(tmp_path):
    statuses, said = ends(tmp_path, "waits", "misses", "dies")
    assert statuses == [75, 75, -9]
    assert said[0].startswith("error: Lost process 2 on ") and GONE in said[0] and said[1:] == ["", ""]


def test_two_are_told_of_together(tmp_path):
    statuses, (said, *_) = ends(tmp_path, "misses", "dies", "dies")
    assert statuses == [75, -9, -9] and "process 1 on " in said.replace("2 on", "1 on") and said.count(" (PID ") == 2


def test_all_tell_where_the_first_is_lost(tmp_path):
    statuses, said = ends(tmp_path, "dies", "waits", "misses")
    assert statuses == [-9, 75, 75]
    assert all(text.startswith("error: Lost process 0 on ") and GONE in text for text in said[1:])


def test_a_process_that_is_stopped_is_told(tmp_path):
    """The others live, and wait for longer than the limit; it ends, too, as soon as it can."""
    statuses, said = ends(tmp_path, "waits", "waits", "hangs", timeout=2)
    assert statuses == [75, 75, 75] and said[1:] == ["", ""]
    assert said[0].startswith("error: No sign of life of process 2 on ") and "for 2 seconds: it is stopped" in said[0]


@pytest.mark.skipif(not hasattr(socket, "TCP_CORK"), reason="Linux's way of keeping words back")
def test_the_last_word_is_heard_though_others_are_unread():
    """A connection that is closed with words unread is reset, and loses what waits to be sent."""
    process = """
import select, socket, sys
from lmmods.core.peers import Line, Peers

peers, line = Peers(30), Line(socket.create_connection(("127.0.0.1", int(sys.argv[1]))), 30, "0")
select.select([line.connection], [], [])
line.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
peers._lines.append(line)
peers._end(75)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = subprocess.Popen([sys.executable, "-c", process, str(server.getsockname()[1])])
        connection = server.accept()[0]
        connection.sendall(b"alive\n")
        connection.settimeout(10)
        heard = b"".join(iter(lambda: connection.recv(4096), b""))
        connection.close()
    assert (heard, child.wait(10)) == (b"75\n", 75)


def test_a_process_that_fails_takes_the_others_along(tmp_path, monkeypatch):
    statuses, said = ends(tmp_path, "waits", "fails", "waits")
    assert statuses == [1, 1, 1] and said[1] == "RuntimeError: of this process"
    assert said[0].startswith("error: Process 1 on ") and said[0].endswith("has ended with an error, so this one ends, "
                                                                          "too.")


@pytest.mark.parametrize(("end", "status", "said"), [("done", 0, ""),
                                                     ("mistaken", 1, "lmmods.core.errors.UserError: of all processes"),
                                                     ("stopped", 1, "lmmods.core.signals.Interrupted: at once")])
def test_processes_that_end_alike_say_nothing_of_each_other(tmp_path, end, status, said):
    assert ends(tmp_path, end, end, end) == ([status] * 3, [said] * 3)


def test_nobody_is_watched_alone_or_without_a_limit():
    for peers, size in ((Peers(30), 1), (Peers(None), 8)):
        with peers.end_together():
            peers.meet(0, size, lambda value: pytest.fail("no address is needed"))
    with pytest.raises(UserError, match="trainer.heartbeat_timeout is 1, but must be 2 or more seconds"):
        Peers(1)


def test_a_stranger_is_no_process(tmp_path):
    """Somebody connects to the port and goes."""
    peers, found = Peers(30), []
    peers.meet(0, 2, found.append)
    with socket.create_connection(("127.0.0.1", found[0][1])) as stranger:
        stranger.settimeout(10)
        stranger.sendall(b"hello 1 on elsewhere\n")
        assert stranger.recv(1) == b""
    peers._leave("done")
