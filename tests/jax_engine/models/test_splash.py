"""Fused attention on TPUs: JAX's splash kernel, interpreted, against plain attention; the programs that call it."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.models import fused
from jax_engine.models.attention import attend, attention_mask
from jax_engine.models.fused import SPLASH, Fused, choose, find_mismatch
from lmmods.core.hardware import target_named

RANDOM = np.random.default_rng(0)
LENGTH = 256
POSITIONS = np.arange(LENGTH)
DOCUMENTS = np.stack([1 + (POSITIONS > 70), np.where(POSITIONS < 200, 1 + (POSITIONS > 130), 0)])
CAUSAL = Fused(num_heads=4, num_kv_heads=2, head_dim=8, dtype="float32", causal=True, scale=0.3, implementation=SPLASH)


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(kernels, "make_splash_mha", partial(kernels.make_splash_mha, interpret=True))
    monkeypatch.setattr(fused, "BLOCKS", (128,))
    fused.find_mismatch.cache_clear()
    yield
    fused.find_mismatch.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows", "causal", "window"), [
    ("segment_ids", DOCUMENTS, True, 40), ("attention_mask", (DOCUMENTS > 0).astype(int), False, None),
])
def test_splash_attention_equals_plain_attention(interpreted, name, rows, causal, window):
    batch = {"input_ids": jnp.zeros((2, LENGTH), jnp.int32), name: jnp.asarray(rows, jnp.int32)}
    kernel = replace(CAUSAL, causal=causal, window=window)
    q, k, v, weights = (jnp.asarray(RANDOM.normal(size=(2, LENGTH, heads, 8)), jnp.float32) for heads in (4, 2, 2, 4))
    weights = (weights * (rows > 0)[..., None, None]).reshape(2, LENGTH, -1)

    def run(function):
        def loss(*qkv):
            mixed = function(*qkv)
            return (mixed * weights).sum(), mixed

        (_, mixed), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
        return [np.asarray(mixed)[rows > 0], *gradients]

    plain = run(lambda *qkv: attend(*qkv, attention_mask(batch, causal, window), 0.3))
    for actual, expected in zip(run(kernel.for_batch(batch)), plain, strict=True):
        assert np.allclose(actual, expected, atol=1e-5)


@pytest.mark.slow
def test_splash_passes_its_check(interpreted):
    assert find_mismatch(replace(CAUSAL, dtype="bfloat16"), by_mask=False) is None


@pytest.mark.parametrize(("sizes", "layout"), [(None, "2x4"), ({"fsdp": 2, "tensor": 2}, "2"),
                                             ({"fsdp": 1, "tensor": 4}, "2x4")])
def test_the_program_for_a_tpu_calls_splash(sizes, layout):
    """Compile without running; on a mesh for each device's rows, and for its heads if key heads are divisible."""
    batch = {"input_ids": jnp.zeros((2, LENGTH), jnp.int32), "segment_ids": jnp.asarray(DOCUMENTS, jnp.int32)}
    kernel = replace(CAUSAL, dtype="bfloat16")

    def gradient(*qkv):
        return jax.grad(lambda *qkv: kernel.for_batch(batch)(*qkv).astype(jnp.float32).sum(), (0, 1, 2))(*qkv)

    def program():
        qkv = [jax.ShapeDtypeStruct((2, LENGTH, heads, 8), jnp.bfloat16) for heads in (4, 2, 2)]
        return jax.jit(gradient).trace(*qkv).lower(lowering_platforms=("tpu",)).as_text()

    if sizes is None:
        text = program()
    else:
        with jax.set_mesh(ShardedMesh(**sizes, devices=jax.devices()[:4]).mesh):
            text = program()
    calls = [line for line in text.splitlines() if "tpu_custom_call" in line]
    assert {name for line in calls for name in re.findall(r"splash_mha_(fwd|dq|dkv)", line)} == {"fwd", "dq", "dkv"}
    assert all(f"(tensor<1x1x1xi8>, tensor<1x1x1xi8>, tensor<{layout}x256x8xbf16>" in line for line in calls)


def test_rows_that_are_not_whole_blocks_use_plain_attention():
    assert CAUSAL.for_batch({"input_ids": jnp.zeros((2, 200), jnp.int32)}) is None
    with jax.set_mesh(ShardedMesh(sequence=2, devices=jax.devices()[:2]).mesh):
        assert CAUSAL.for_batch({"input_ids": jnp.zeros((2, LENGTH), jnp.int32)}) is None


def test_a_tpu_uses_splash_unless_the_recipe_says_eager(make_ref, capsys):
    arch = replace(make_ref("mistral", "causal").net.arch, head_dim=8)
    fused._report.cache_clear()
    target = target_named("v5e-8")
    assert choose(arch, jnp.dtype("bfloat16"), "causal", "eager", target) is None
    assert choose(arch, jnp.dtype("bfloat16"), "causal", None, target).implementation == SPLASH
    assert "Attention: splash's fused kernel, assumed" in capsys.readouterr().out
    fused._report.cache_clear()
