"""Eight CPU devices, and reference models of transformers, built once per session."""

import os

FLAG = "--xla_force_host_platform_device_count"
if FLAG not in os.environ.get("XLA_FLAGS", ""):  # read when the first device is requested, not when jax is imported
    # On a busy machine with two cores, eight devices may wait for each other longer than XLA's forty seconds.
    patience = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}=8 {patience}".strip()

import pytest  # noqa: E402
from hf_reference import HFReference  # noqa: E402
from toy import Toy  # noqa: E402


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture(scope="session")
def make_ref(tmp_path_factory):
    """Return a function that builds, once per session, the reference for a family with a head."""
    refs = {}

    def make(name: str, head: str = "causal", **changes) -> HFReference:
        key = (name, head, repr(changes))
        if key not in refs:
            refs[key] = HFReference(name, head, tmp_path_factory.mktemp(f"{name}-{head}"), **changes)
        return refs[key]

    return make
