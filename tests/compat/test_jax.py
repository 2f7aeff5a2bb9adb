"""Private API of JAX that jax_engine/distributed uses."""

import socket

import jax
import pytest
from jax._src import distributed
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

from jax_engine.distributed.devices import detach_process
from jax_engine.distributed.pool import ALLOCATOR, FRACTIONS, PREALLOCATE, Pool, larger_pool
from tests.forks import together


def leave_alone(port: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
    state = distributed.global_state
    assert None not in (state.client, state.service, state.preemption_sync_manager)
    detach_process()
    assert state.client is state.service is state.preemption_sync_manager is None
    print("left alone")


def test_a_process_detaches_without_the_others():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert "left alone" in together([str(port)], program=leave_alone)[0]


@pytest.mark.parametrize("environment", [{}, {FRACTIONS[0]: "0.4"}, {FRACTIONS[1]: "0.4"}, {PREALLOCATE: "false"},
                                         {PREALLOCATE: "0"}, {ALLOCATOR: "cuda_async"}], ids=str)
def test_a_gpu_starts_with_the_planned_memory_pool(monkeypatch, environment):
    """By the options that JAX derives from the environment when it starts its client; 0.75 is XLA's default."""
    for name in (*FRACTIONS, PREALLOCATE, ALLOCATOR):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    pool = Pool.from_environment()
    with larger_pool():
        options = generate_pjrt_gpu_plugin_options()
    assert options.get("memory_fraction", 0.75) == pool.fraction
    assert options.get("preallocate", True) is not pool.grows
    assert (options["allocator"] == "default") is pool.has_regions
