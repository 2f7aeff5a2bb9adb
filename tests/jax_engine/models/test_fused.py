"""Calls of the fused kernel, replaced by XLA's implementation, against plain attention; and the kernel's check.

cuDNN's kernel runs only on GPUs, where a check compares it each time a network is built.
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_reference import VOCAB

from jax_engine.distributed import target
from jax_engine.distributed.interface import shard_sequence
from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.models import fused, hub
from jax_engine.models.attention import attend, attention_mask
from jax_engine.models.fused import Fused, choose, find_mismatch, keep_passing_uses, unsupported_reason
from jax_engine.models.relative import Relative
from lmmods.core.hardware import Target, target_named
from lmmods.core.hf_config import load_config

RANDOM = np.random.default_rng(0)
LENGTHS = np.array([[1] * 10, [1] * 7 + [0] * 3])
PACKED = np.array([[1] * 4 + [2] * 6, [1] * 3 + [2] * 4 + [0] * 3])
KINDS = {"full": {}, "padded": {"attention_mask": LENGTHS}, "packed": {"segment_ids": PACKED}}
CAUSAL = Fused(num_heads=4, num_kv_heads=2, head_dim=8, dtype="float32", causal=True, scale=0.3, implementation="xla")


def make_rows(kind: str, length: int = 10) -> dict:
    ids = np.concatenate([RANDOM.integers(3, VOCAB, (2, 7)), RANDOM.integers(3, VOCAB, (2, 3))], 1)
    return {name: jnp.asarray(x[:, :length], jnp.int32) for name, x in ({"input_ids": ids} | KINDS[kind]).items()}


@pytest.mark.parametrize("window", [None, 3, 10])
@pytest.mark.parametrize(("kind", "length"), [(kind, 10) for kind in KINDS] + [("full", 9), ("padded", 9)])
@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention_equals_plain_attention(kind, length, causal, window):
    if window and not causal:
        return
    batch, kernel = make_rows(kind, length), replace(CAUSAL, causal=causal, window=window)
    q, k, v, weights = (jnp.asarray(RANDOM.normal(size=(2, length, heads, 8)), jnp.float32) for heads in (4, 2, 2, 4))
    real = np.asarray(batch.get("attention_mask", batch.get("segment_ids", np.ones((2, length)))) > 0)
    weights = (weights * real[..., None, None]).reshape(2, length, -1)

    def run(function):
        def loss(*qkv):
            mixed = function(*qkv)
            return (mixed * weights).sum(), mixed

        (_, mixed), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return [np.asarray(mixed)[real], *gradients]

    plain = run(lambda *qkv: attend(*qkv, attention_mask(batch, causal, window), 0.3, 0.0, None))
    for actual, expected in zip(run(kernel.for_batch(batch)), plain, strict=True):
        assert np.allclose(actual, expected, atol=1e-5)


def test_padded_rows_of_a_causal_model_need_no_mask(monkeypatch):
    monkeypatch.setattr(fused, "attention_mask", None)
    q, k, v = (jnp.ones((2, 10, heads, 8)) for heads in (4, 2, 2))
    assert CAUSAL.for_batch(make_rows("padded"))(q, k, v).shape == (2, 10, 32)
    with pytest.raises(TypeError):
        CAUSAL.for_batch(make_rows("packed"))


def test_the_kernel_gets_even_lengths(monkeypatch):
    """cuDNN's has no gradient for odd ones."""
    shapes = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **_: shapes.append((q.shape, k.shape)) or q)
    q, k, v = (jnp.ones((2, 9, heads, 8)) for heads in (4, 2, 2))
    assert CAUSAL.for_batch(make_rows("padded", 9))(q, k, v).shape == (2, 9, 32)
    assert shapes == [((2, 10, 4, 8), (2, 10, 2, 8))]


def test_rows_that_the_kernel_does_not_support_use_plain_attention():
    assert CAUSAL.for_batch(make_rows("padded", 1)) is None
    assert CAUSAL.for_batch(make_rows("packed", 9)) is None and CAUSAL.for_batch(make_rows("padded", 9)) is not None
    assert replace(CAUSAL, by_mask=False).for_batch(make_rows("packed")) is None
    assert replace(CAUSAL, by_length=False, by_mask=False).for_batch(make_rows("padded")) is None


@pytest.mark.parametrize(("name", "head", "kind"), [
    ("llama", "causal", "packed"), ("mistral", "causal", "padded"), ("bert", "masked", "padded"),
])
def test_a_model_computes_the_same_with_and_without_the_kernel(make_ref, name, head, kind):
    net = make_ref(name, head).net
    batch, params = make_rows(kind), make_ref(name, head).params
    if kind == "packed":
        batch["position_ids"] = jnp.asarray([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2, 3, 0, 0, 0]])
    real = np.asarray(batch.get("attention_mask", batch.get("segment_ids", np.ones((2, 10)))) > 0)
    arch = net.arch
    kernel = Fused(arch.num_heads, arch.num_kv_heads, arch.head_dim, "float32", arch.causal, arch.attention_scales[0],
                   arch.windows[0], by_length=head != "qa", implementation="xla")

    def run(kernel):
        net.fused, calls = kernel, []
        if kernel is not None:
            net.fused = SimpleNamespace(for_batch=lambda batch: calls.append(1) or kernel.for_batch(batch))

        def loss(params):
            logits = net.logits(params, net.hidden(params, batch))
            return (jnp.tanh(logits) * real[..., None]).sum(), logits

        (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        assert len(calls) == (kernel is not None)
        return np.asarray(logits)[real], gradients

    try:
        (plain, plain_gradients), (actual, gradients) = run(None), run(kernel)
    finally:
        net.fused = None
    assert np.allclose(actual, plain, atol=1e-4 * np.abs(plain).max())
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(plain_gradients))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * largest), gradients, plain_gradients)


@pytest.mark.parametrize(("kind", "sizes", "shape"), [
    ("packed", {"tensor": 2}, (2, 10, 16)), ("padded", {"sequence": 2}, (2, 5, 32))])
def test_rows_and_heads_stay_sharded_over_a_mesh(kind, sizes, shape):
    batch = {name: jnp.tile(x, (4, 1)) for name, x in make_rows(kind).items()}
    q, k, v = (jnp.asarray(RANDOM.normal(size=(8, 10, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    expected = CAUSAL.for_batch(batch)(q, k, v)
    with jax.set_mesh(ShardedMesh(data=2, fsdp=2, **sizes).mesh):
        actual = jax.jit(lambda batch, *qkv: CAUSAL.for_batch(batch)(*qkv))(batch, q, k, v)
    assert actual.sharding.spec[0] == ("data", "fsdp") and actual.addressable_shards[0].data.shape == shape
    assert np.allclose(actual, expected, atol=1e-5)


def test_sequence_shards_are_exchanged_for_heads_and_never_gathered():
    """Check forward and backward passes, with products before and after; each device has all weights."""
    def loss(x, weights):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, weight) for weight in weights[:3])
        mixed = CAUSAL.for_batch({"input_ids": x[..., 0]})(q, k, v)
        return jnp.square(mixed @ weights[3]).sum()

    x = jax.ShapeDtypeStruct((2, 16, 24), jnp.float32)
    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((24, 4, 8), (24, 2, 8), (24, 2, 8), (32, 24))]
    with jax.set_mesh(ShardedMesh(fsdp=1, sequence=2, devices=jax.devices()[:2]).mesh):
        differentiate = jax.jit(jax.grad(lambda x, weights: loss(shard_sequence(x), weights), (0, 1)))
        compiled = differentiate.lower(x, weights).compile()
    assert "all-to-all" in compiled.as_text() and "all-gather" not in compiled.as_text()


@pytest.mark.parametrize(("kind", "sizes"), [("packed", {"sequence": 2}), ("padded", {"sequence": 2, "tensor": 2})])
def test_unsupported_sequence_shards_use_plain_attention(kind, sizes):
    """Packed rows, whose mask is quadratic in the length, and fewer heads than devices."""
    with jax.set_mesh(ShardedMesh(**sizes).mesh):
        assert CAUSAL.for_batch(make_rows(kind)) is None


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize(("kind", "changes", "called"), [
    ("padded", {}, ("fmhaSoftmax", "CAUSAL", 0)),
    ("padded", {"window": 3}, ("fmhaSoftmax", "CAUSAL", 3)),
    ("padded", {"causal": False}, ("fmhaSoftmax", "PADDING", 0)),
    ("packed", {"window": 3}, ("fmhaScaleBiasSoftmax", "CAUSAL", 0)),
])
def test_the_program_for_a_gpu_calls_cudnn(monkeypatch, kind, changes, called, replicated):
    """Compile without running: which kernel the program calls forward and backward, with which mask and window."""
    for name, result in {"check_cudnn_version": 91000, "check_compute_capability": True}.items():
        monkeypatch.setattr(f"jax._src.cudnn.fused_attention_stablehlo.{name}", lambda *_, result=result: result)
    kernel = replace(CAUSAL, dtype="bfloat16", implementation="cudnn", **changes)

    def gradient(batch, *qkv):
        return jax.grad(lambda *qkv: kernel.for_batch(batch)(*qkv).astype(jnp.float32).sum(), (0, 1, 2))(*qkv)

    if replicated:  # like jax.pmap, which cannot compile for other devices
        mesh, everywhere = jax.make_mesh((1,), ("replica",)), jax.sharding.PartitionSpec()
        gradient = jax.shard_map(gradient, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    qkv = [jnp.ones((2, 10, heads, 8), jnp.bfloat16) for heads in (4, 2, 2)]
    lowered = jax.jit(gradient).trace(make_rows(kind), *qkv).lower(lowering_platforms=("cuda",))
    program = lowered.as_text().replace("\\22", '"')
    assert re.findall(r"@__cudnn\$(\w+)", program) == [called[0], f"{called[0]}Backward"]
    assert set(re.findall(r'"mask_type": "(\w+)"', program)) == {called[1]}
    assert set(re.findall(r'"sliding_window_length": (\d+)', program)) == {str(called[2])}


# Choice --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(make_ref, monkeypatch):
    """Report a GPU as the target, and use XLA's implementation as the kernel."""
    for name, head in (("mistral", "causal"), ("llama", "causal"), ("bert", "qa")):
        make_ref(name, head)  # build their networks, with their log lines, before
    monkeypatch.setattr(target, "present_target", lambda: Target("gpu", "a GPU", 1, 0))
    monkeypatch.setattr(fused, "Fused", lambda *args: Fused(*args, implementation="xla"))
    for cached in (fused.find_mismatch, fused._report):
        cached.cache_clear()
    yield
    for cached in (fused.find_mismatch, fused._report):
        cached.cache_clear()


def arch_of(make_ref, name: str, head: str = "causal", **changes):
    return replace(make_ref(name, head).net.arch, **{"head_dim": 8, **changes})


def test_a_kernel_that_passes_its_check_is_chosen_and_reported_once(make_ref, gpu, capsys):
    arch = arch_of(make_ref, "mistral")
    chosen = choose(arch, jnp.dtype("bfloat16"), "causal", None)
    assert chosen == choose(arch, jnp.dtype("bfloat16"), "causal", "sdpa")
    assert (chosen.by_length, chosen.by_mask, chosen.window, chosen.scale) == (True, True, 4, arch.attention_scales[0])
    assert capsys.readouterr().out == "Attention: xla's fused kernel, which agrees with plain attention.\n"
    arch = arch_of(make_ref, "bert", "qa", attention_dropout=0.0)
    assert not choose(arch, jnp.dtype("bfloat16"), "qa", None).by_length


def test_a_kernel_that_cannot_run_here_is_assumed_to_pass(make_ref, gpu, capsys):
    arch, target_kind = arch_of(make_ref, "mistral"), target_named("8xH100")
    assert choose(arch, jnp.dtype("bfloat16"), "causal", None, target_kind).by_mask
    assert capsys.readouterr().out == ("Attention: xla's fused kernel, assumed to pass its check, which needs the "
                                       "device.\n")


@pytest.mark.parametrize(("changes", "dtype", "requested", "reason"), [
    ({}, "bfloat16", "eager", "attention: eager"),
    ({}, "float32", None, "not in float32"),
    ({"head_dim": 10}, "bfloat16", None, "not 10"),
    ({"head_dim": 256}, "bfloat16", None, "not 256"),
    ({"attention_cap": 50.0}, "float16", None, "at 50.0"),
    ({"attention_dropout": 0.1}, "float16", None, "dropout"),
    ({"windows": (None, 3, 3)}, "float16", None, "window or scale"),
    ({"attention_scales": (1.0, 0.5, 0.3)}, "float16", None, "window or scale"),
    ({"causal": False, "windows": (3, 3, 3)}, "float16", None, "window to both sides"),
    ({"relative": Relative(8, None, ("c2p",), True, True)}, "float16", None, "relative positions"),
])
def test_plain_attention_is_chosen_with_its_reason(make_ref, gpu, capsys, changes, dtype, requested, reason):
    arch = arch_of(make_ref, "llama", **changes)
    assert reason in unsupported_reason(arch, jnp.dtype(dtype), requested)
    assert choose(arch, jnp.dtype(dtype), "causal", requested) is None
    assert reason in capsys.readouterr().out


def test_the_recipe_chooses_between_fused_and_eager_attention(gpu):
    config = load_config({"model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24,
                              "num_hidden_layers": 2, "num_attention_heads": 4})
    assert hub.network(config, "causal", compute_dtype="bfloat16").fused.head_dim == 8
    assert hub.network(config, "causal", compute_dtype="bfloat16", attention="eager").fused is None


def test_without_a_gpu_no_kernel_is_chosen_or_reported(make_ref, capsys):
    assert choose(arch_of(make_ref, "llama"), jnp.dtype("bfloat16"), "causal", None) is None
    assert capsys.readouterr().out == ""


HALF = replace(CAUSAL, dtype="bfloat16")
CORRECT = jax.nn.dot_product_attention


def ignore_mask(*args, mask=None, **options):
    return CORRECT(*args, **options)


def shift_window(*args, local_window_size=None, **options):
    window = local_window_size and (local_window_size[0] + 1, 0)
    return CORRECT(*args, local_window_size=window, **options)


def raise_error(*args, **options):
    raise NotImplementedError("no such kernel\nmore")


def return_nan(q, k, v, **options):
    return jnp.where(jnp.arange(q.shape[1])[:, None, None] == 129, jnp.nan, CORRECT(q, k, v, **options))


@pytest.mark.parametrize(("wrong", "kernel", "by_mask", "problem"), [
    (ignore_mask, HALF, True, "output differs"),
    (ignore_mask, replace(HALF, causal=False), True, "output differs"),
    (shift_window, replace(HALF, window=64), False, "output differs"),
    (raise_error, HALF, False, "NotImplementedError: no such kernel"),
    (return_nan, HALF, False, "not all numbers are finite"),
], ids=lambda value: getattr(value, "__name__", None))
def test_the_check_finds_a_wrong_kernel(monkeypatch, wrong, kernel, by_mask, problem):
    fused.find_mismatch.cache_clear()
    assert find_mismatch(kernel, by_mask) is None
    fused.find_mismatch.cache_clear()
    monkeypatch.setattr(jax.nn, "dot_product_attention", wrong)
    actual = find_mismatch(kernel, by_mask)
    fused.find_mismatch.cache_clear()
    assert actual.startswith(problem) and "\n" not in actual


def test_a_correct_encoder_kernel_passes_its_check():
    fused.find_mismatch.cache_clear()
    assert find_mismatch(replace(HALF, causal=False), by_mask=False) is None


def test_only_rows_that_fail_the_check_use_plain_attention(monkeypatch, capsys):
    for cached in (fused.find_mismatch, fused._report):
        cached.cache_clear()
    monkeypatch.setattr(jax.nn, "dot_product_attention", ignore_mask)
    chosen = keep_passing_uses(HALF)
    assert chosen == replace(HALF, by_mask=False)
    assert "packed rows: output differs by" in capsys.readouterr().out
    fused.find_mismatch.cache_clear()
    monkeypatch.setattr(jax.nn, "dot_product_attention", raise_error)
    assert keep_passing_uses(HALF) is None
    assert "Attention: plain, because the fused kernel fails its check" in capsys.readouterr().out
    for cached in (fused.find_mismatch, fused._report):
        cached.cache_clear()
