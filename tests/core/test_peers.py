"""Processes that watch each other: what the others do if one is killed, fails or exits."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmmods.core.errors import UserError
from lmmods.core.peers import Peers, Rendezvous, check_address, check_environment, check_timeout
from tests.forks import Fork, environments, train

# One process: it finds the others through a file, marks itself as ready, and ends as its argument says.
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

watch = peers.Peers.current()
with watch.end_together():
    watch.connect_all(rank, 3, share, timeout)
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
GONE = "killed, or its machine cannot be reached. The other processes exit. --ckpt_path auto resumes from the last"


def run_processes(folder: Path, *endings: str, timeout: int = 30) -> tuple[list[int], list[str]]:
    """Return exit statuses and last lines of processes that end in these ways, within ten seconds.

    A hanging process continues when the ones before it have exited.
    """
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS, str(rank), str(folder), end, str(timeout)], text=True,
                                  stderr=subprocess.PIPE, env={**os.environ, "MASTER_ADDR": "127.0.0.1"})
                 for rank, end in enumerate(endings)]
    outputs = []
    try:
        for process, end in zip(processes, endings):
            if end == "hangs" and outputs:
                process.send_signal(signal.SIGCONT)
            outputs.append(process.communicate(timeout=10)[1].strip())
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], [text.split("\n")[-1] for text in outputs]


def test_the_first_process_reports_which_process_is_lost(tmp_path):
    statuses, outputs = run_processes(tmp_path, "waits", "misses", "dies")
    assert statuses == [75, 75, -9]
    assert outputs[0].startswith("error: Lost process 2 on ") and GONE in outputs[0] and outputs[1:] == ["", ""]


def test_two_lost_processes_are_reported_together(tmp_path):
    statuses, (output, *_) = run_processes(tmp_path, "misses", "dies", "dies")
    assert statuses == [75, -9, -9]
    assert "process 1 on " in output.replace("2 on", "1 on") and output.count(" (PID ") == 2


def test_all_processes_report_the_loss_of_the_first(tmp_path):
    statuses, outputs = run_processes(tmp_path, "dies", "waits", "misses")
    assert statuses == [-9, 75, 75]
    assert all(text.startswith("error: Lost process 0 on ") and GONE in text for text in outputs[1:])


def test_a_stopped_process_is_reported_as_missing_its_heartbeat(tmp_path):
    """The others exit after the timeout, and the stopped process as soon as it continues."""
    statuses, outputs = run_processes(tmp_path, "waits", "waits", "hangs", timeout=2)
    assert statuses == [75, 75, 75] and outputs[1:] == ["", ""]
    assert outputs[0].startswith("error: No heartbeat from process 2 on ") and "for 2 seconds: it or" in outputs[0]


@pytest.mark.skipif(not hasattr(socket, "TCP_CORK"), reason="needs TCP_CORK of Linux")
def test_the_last_message_arrives_despite_unread_data():
    """Closing a connection with unread data resets it and loses data that waits to be sent."""
    process = """
import select, socket, sys
from lmmods.core.peers import Connection, Peers

peers, connection = Peers(), Connection(socket.create_connection(("127.0.0.1", int(sys.argv[1]))), 30)
select.select([connection.socket], [], [])
connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
peers._connections.append(connection)
peers._end(75)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = subprocess.Popen([sys.executable, "-c", process, str(server.getsockname()[1])])
        connection = server.accept()[0]
        connection.sendall(b"alive\n")
        connection.settimeout(10)
        received = b"".join(iter(lambda: connection.recv(4096), b""))
        connection.close()
    assert (received, child.wait(10)) == (b"75\n", 75)


def test_a_failing_process_ends_the_others(tmp_path, monkeypatch):
    statuses, outputs = run_processes(tmp_path, "waits", "fails", "waits")
    assert statuses == [1, 1, 1] and outputs[1] == "RuntimeError: of this process"
    assert outputs[0].startswith("error: Process 1 on ") and outputs[0].endswith("failed, so this process exits.")


@pytest.mark.parametrize(("end", "status", "output"), [
    ("done", 0, ""), ("mistaken", 1, "lmmods.core.errors.UserError: of all processes"),
    ("stopped", 1, "lmmods.core.signals.Interrupted: at once")])
def test_processes_that_end_alike_do_not_report_each_other(tmp_path, end, status, output):
    assert run_processes(tmp_path, end, end, end) == ([status] * 3, [output] * 3)


def test_a_single_process_and_a_null_timeout_need_no_watch():
    for size, timeout in ((1, 30), (8, None)):
        peers = Peers()
        with peers.end_together():
            peers.connect_all(0, size, lambda value: pytest.fail("no address is needed"), timeout)
    with pytest.raises(UserError, match="trainer.heartbeat_timeout is 1, but must be 2 or more seconds"):
        check_timeout(1)


def test_a_foreign_connection_is_closed(tmp_path):
    """A foreign program connects to the port and leaves."""
    peers, addresses = Peers(), []
    peers.connect_all(0, 2, addresses.append, 30)
    with socket.create_connection(("127.0.0.1", addresses[0][1])) as stranger:
        stranger.settimeout(10)
        stranger.sendall(b"hello 1 on elsewhere\n")
        assert stranger.recv(1) == b""
    peers._leave("done")


def test_a_process_connects_by_the_host_name_if_master_addr_is_wrong(monkeypatch):
    first, second, addresses = Peers(), Peers(), []
    first.connect_all(0, 2, addresses.append, 30)
    _, port, token = addresses[0]
    monkeypatch.setenv("MASTER_ADDR", "no-such-machine.invalid")
    second.connect_all(1, 2, lambda _: ("127.0.0.1", port, token), 30)
    assert second._is_connected.is_set()
    for peers in (first, second):
        peers._leave("done")


@pytest.mark.parametrize(("environment", "expected"), [
    ({}, None),
    ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}, None),
    ({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}, (3, "a", 29502, False)),
    ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"},
     (1, "a", 29502, True)),
    ({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5000",
      "LMMODS_LAUNCHER": "17"}, (1, "127.0.0.1", 5002, True)),
    ({"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "5000"}, None),
    ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NODELIST": "gpu[03-05,07],other",
      "SLURM_JOB_ID": "123456"}, (5, "gpu03", 15000 + 3456 + 2, False)),
    ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "a-1,a-2", "SLURM_JOB_ID": "7777"},
     (0, "a-1", 15000 + 7777 + 2, False))])
def test_the_rendezvous_is_read_from_the_environment_of_the_launcher(environment, expected):
    point = Rendezvous.from_environment(environment)
    values = point and (point.rank, point.host, point.port, point.launcher is not None)
    assert values == expected
    if point:
        assert Rendezvous.from_environment({**environment, "MASTER_ADDR": "elsewhere"}).token != point.token


EARLY = """
import os, pathlib, sys, time
from lmmods.core.errors import UserError
from lmmods.core.peers import Peers

if sys.argv[1] == "comes late":
    time.sleep(2)
Peers.current().begin()
with Peers.current().end_together():
    if sys.argv[1] == "refuses":
        time.sleep(1)
    if sys.argv[1].startswith("refuses"):
        raise UserError("of this process alone")
    pathlib.Path(sys.argv[2], os.environ["RANK"]).touch()
    time.sleep(60)
"""


def start_early(folder: Path, *endings: str) -> list[subprocess.Popen]:
    """Start processes that wait to be connected by a library."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [subprocess.Popen(
        [sys.executable, "-c", EARLY, end, str(folder)], text=True, stderr=subprocess.PIPE,
        env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(endings)),
             "RANK": str(rank)}) for rank, end in enumerate(endings)]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_killed_before_connecting_is_reported(tmp_path, lost):
    processes = start_early(tmp_path, "waits", "waits", "waits")
    deadline = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)  # the others have connected to the first
    processes[lost].kill()
    outputs = [process.communicate(timeout=20)[1] for process in processes]
    assert [process.returncode for process in processes] == [-9 if rank == lost else 75 for rank in range(3)]
    message = f"error: Lost process {lost} on {socket.gethostname()} (PID {processes[lost].pid}): killed"
    assert message in outputs[1 - lost]


def test_an_error_of_the_first_process_ends_those_that_wait_for_it(tmp_path):
    first, second = start_early(tmp_path, "refuses", "waits")
    assert "UserError: of this process alone" in first.communicate(timeout=30)[1] and first.returncode == 1
    output = second.communicate(timeout=30)[1]
    assert second.returncode == 1
    assert f"error: Process 0 on {socket.gethostname()} (PID {first.pid}) failed" in output


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_ends_processes_that_start_later(tmp_path, failing):
    """Tasks of one job may start at different times."""
    endings = ("refuses at once", "comes late") if failing == 0 else ("comes late", "refuses at once")
    processes = start_early(tmp_path, *endings)
    outputs = [process.communicate(timeout=30)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], outputs
    assert f"error: Process {failing} on " in outputs[1 - failing] and "of this process alone" in outputs[failing]


def test_a_fork_does_not_keep_connections_of_a_dead_process_open(tmp_path):
    """Data workers outlive a killed parent by seconds, or longer if they are busy."""
    program = EARLY.replace("    pathlib.Path", "    if os.environ['RANK'] == '0' and os.fork() == 0:\n"
                            "        time.sleep(8)\n        os._exit(0)\n    pathlib.Path")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "EARLY", program)
        first, second = start_early(tmp_path, "waits", "waits")
    deadline = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    first.kill()
    assert second.wait(5) == 75
    first.stderr.close(), second.stderr.close()


@pytest.mark.parametrize(("name", "value"), [("MASTER_PORT", "abc"), ("MASTER_PORT", "99999"), ("WORLD_SIZE", "two"),
                                             ("RANK", "-1"), ("LOCAL_RANK", "0.5"), ("NODE_RANK", "²")])
def test_invalid_launcher_variables_are_rejected(name, value):
    check_environment({"MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": ""})
    with pytest.raises(UserError, match=rf"environment variable {name} is '{re.escape(value)}', but must be an int"):
        check_environment({name: value})


@pytest.mark.parametrize("host", ["no-such-machine.invalid", "x" * 80, "a..b"])
def test_an_unknown_master_address_is_an_error(host):
    check_address("localhost", 29500)
    with pytest.raises(UserError, match=f"cannot meet at {host}, port 29501: .* Set MASTER_ADDR to an"):
        check_address(host, 29501, patience=0)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "distance"), [("torch", 0), ("jax", 1)])
def test_a_port_in_use_is_an_error(engine, distance, recipe):
    environment, second_environment = environments(2)
    port = int(environment["MASTER_PORT"]) + distance
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        arguments = recipe(engine=engine, trainer__strategy="ddp", trainer__devices=2 if engine == "torch" else 1)
        fork, _ = (Fork(train, "fit", *arguments, **variables, LOCAL_RANK=variables["RANK"], NODE_RANK="0")
                   for variables in (environment, second_environment))
        output = fork.communicate()
    assert fork.returncode == 2 and "Traceback" not in output, output
    message = f"error: The processes of this run cannot meet at 127.0.0.1, port {port}: .*in use"
    assert re.search(message, output), output
