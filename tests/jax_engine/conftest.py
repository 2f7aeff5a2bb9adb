"""Eight CPU devices, and a compilation cache for the session."""

import os

FLAG = "--xla_force_host_platform_device_count"
if FLAG not in os.environ.get("XLA_FLAGS", ""):  # read when the first device is asked for, not at the import of jax
    # Eight devices on a busy machine of two cores may wait for each other for longer than XLA's forty seconds.
    patience = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}=8 {patience}".strip()

import jax  # noqa: E402
import pytest  # noqa: E402
from toy import Toy  # noqa: E402


@pytest.fixture(autouse=True, scope="session")
def compilation_cache(tmp_path_factory):
    """Tests compile the same steps over and over."""
    names = {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("xla")),
             "jax_persistent_cache_min_compile_time_secs": 0.2}
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def toy() -> Toy:
    return Toy()
