"""Settings that a run makes before XLA starts."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median

import jax
import pytest

from jax_engine.distributed.devices import keep_float32

STEPS = """
import resource
import jax, jax.numpy as jnp
from jax_engine.distributed.devices import keep_freed_memory
keep_freed_memory()
step = jax.jit(lambda x: jnp.sin(x @ x).sum())
x = jnp.ones((2048, 2048))
faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
for _ in range(20):
    step(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(*faults)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
@pytest.mark.parametrize("environment", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}], ids=["default", "environment"])
def test_a_step_reuses_freed_memory(environment):
    """A step needs 16 MiB, or 4,096 pages. The first steps and a few later ones must extend the heap."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "XLA_FLAGS"))}
    process = subprocess.run([sys.executable, "-c", STEPS], cwd=Path(__file__).parent.parent.parent, timeout=120,
                             env={**plain, **environment}, capture_output=True, text=True, check=True)
    faults_per_step = median(after - before for before, after in pairwise(map(int, process.stdout.split())))
    assert faults_per_step > 3_000 if environment else faults_per_step < 400, process.stdout


@pytest.mark.parametrize(("precision", "platform", "configured", "expected"), [
    ("32-true", "gpu", None, "highest"), ("32-true", "tpu", None, "highest"), ("32-true", "cpu", None, None),
    ("bf16-mixed", "gpu", None, None), ("32-true", "gpu", "tensorfloat32", "tensorfloat32")])
def test_float32_products_are_computed_in_float32(precision, platform, configured, expected):
    before = jax.config.jax_default_matmul_precision
    try:
        jax.config.update("jax_default_matmul_precision", configured)
        keep_float32(precision, platform)
        assert jax.config.jax_default_matmul_precision == expected
    finally:
        jax.config.update("jax_default_matmul_precision", before)
