"""What `jax_engine.distributed.devices` relies on."""

import socket

import jax
from jax._src import distributed

from jax_engine.distributed.devices import forget_the_others
from tests.forks import together


def leave_alone(port: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
    state = distributed.global_state
    assert None not in (state.client, state.service, state.preemption_sync_manager)
    forget_the_others()
    assert state.client is state.service is state.preemption_sync_manager is None
    print("left alone")


def test_a_process_leaves_without_the_others():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert "left alone" in together([str(port)], program=leave_alone)[0]
