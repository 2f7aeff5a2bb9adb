"""Rows sharded along the sequence: losses and gradients as on one device, also across the borders of shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import Qwen2Config

from jax_engine.distributed.loss import IGNORED, shift_labels, token_loss
from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.tree import flatten
from jax_engine.models import context_parallel, hub
from jax_engine.models.context_parallel import ContextParallel
from lmmods.core.settings import LoRA

ROWS, LENGTH, VOCAB = 4, 16, 37
PACKED = np.array([[1] * 5 + [2] * 11, [1] * 3 + [2] * 2 + [3] * 8 + [0] * 3, [1] * 16, [1] * 9 + [2] * 7])
LENGTHS = np.arange(LENGTH) < np.array([[16], [7], [11], [16]])
# Layers with full attention and layers with a window, which crosses borders of shards.
CONFIG = Qwen2Config(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=64, use_sliding_window=True, sliding_window=6,
                     max_window_layers=1, attention_dropout=0.2)


def make_rows(kind: str) -> dict[str, np.ndarray]:
    """Return columns [ROWS, LENGTH] with a label at every token, also at the borders."""
    random = np.random.default_rng(0)
    real = PACKED > 0 if kind == "packed" else LENGTHS
    ids = random.integers(3, VOCAB, (ROWS, LENGTH))
    columns = {"input_ids": ids, "attention_mask": real, "labels": np.where(real, ids, IGNORED),
               "token_seeds": random.integers(-(2**31), 2**31, ids.shape)}
    if kind == "packed":
        starts = np.array([[row.tolist().index(segment) for segment in row] for row in PACKED])
        columns |= {"segment_ids": PACKED, "position_ids": np.arange(LENGTH) - starts}
    return {name: column.astype(np.int32) for name, column in columns.items()}


def split_by_rank(columns: dict[str, np.ndarray], ranks: int) -> dict[str, np.ndarray]:
    return {name: column.reshape(ranks, -1, LENGTH) for name, column in columns.items()}


def make_step(net):
    """Return the function that computes the mean loss over tokens and its gradients."""
    def loss(params, batch):
        batch = {name: x.reshape(-1, LENGTH) for name, x in batch.items()}
        hidden, targets = net.hidden(params, batch, training=True), shift_labels(batch["labels"])
        sums = token_loss(hidden, targets, lambda x: net.logits(params, x), VOCAB)
        return sums.total / sums.weight

    return lambda params, batch: jax.value_and_grad(loss)(params, batch)


@pytest.mark.parametrize(("kind", "sizes", "settings"), [
    ("padded", {"fsdp": 1, "sequence": 4}, {"remat": "full"}),
    pytest.param("packed", {"fsdp": 2, "sequence": 2}, {"lora": LoRA(rank=4, dropout=0.3)}, marks=pytest.mark.slow),
], ids=["padded", "packed"])
def test_sequence_shards_have_the_losses_and_gradients_of_whole_rows(monkeypatch, kind, sizes, settings):
    net, columns = hub.network(CONFIG, "causal", **settings), make_rows(kind)
    random = np.random.default_rng(1)
    params = jax.tree.map(lambda x: random.normal(0, 0.3, x.shape).astype(np.float32), net.shapes)
    expected_loss, expected = jax.jit(make_step(net))(params, split_by_rank(columns, 1))

    # Three queries at a time, from shards of four or eight.
    monkeypatch.setattr(context_parallel, "SCORE_BYTES", 4 * LENGTH * 4 * 3)
    mesh = ShardedMesh(**sizes, devices=jax.devices()[:np.prod(list(sizes.values()))])
    compiled = mesh.compile(make_step(net), ("state", "batch"), ("scalar", "state"))
    batch = mesh.put_batch(split_by_rank(columns, mesh.data_parallel_size))
    loss, actual = compiled(mesh.put_state(params), batch)
    assert abs(loss - expected_loss) <= 1e-5 * expected_loss
    actual, expected = flatten(mesh.fetch_state(actual)), flatten(expected)
    largest = max(np.abs(leaf).max() for leaf in expected.values())
    for path, leaf in expected.items():
        assert np.abs(actual[path] - leaf).max() <= 1e-5 * max(np.abs(leaf).max(), 0.1 * largest), path


def test_parameters_are_also_sharded_along_the_sequence_axis():
    mesh = ShardedMesh(fsdp=2, sequence=4)
    placed = mesh.put_state({"up": {"weight": np.ones((16, 32), np.float32)}})["up"]["weight"]
    assert placed.addressable_shards[0].data.shape == (2, 32)


def test_no_device_stores_the_scores_of_all_its_queries(monkeypatch):
    """Rows of 4,096 tokens over eight devices: each device has 512 queries and computes 32 at a time."""
    length, heads = 4096, 32
    monkeypatch.setattr(context_parallel, "SCORE_BYTES", 32 * 4 * heads * length)
    x, ids = (jax.ShapeDtypeStruct((1, length, *sizes), dtype) for sizes, dtype in (((heads, 8), jnp.bfloat16),
                                                                                    ((), jnp.int32)))

    def loss(q, k, v, ids):
        pattern = ContextParallel.from_batch({"input_ids": ids, "segment_ids": ids}, True, 100)
        return pattern.attend(q, k, v, jnp.float32(1)).astype(jnp.float32).sum()

    with jax.set_mesh(ShardedMesh(fsdp=1, sequence=8).mesh):
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x, ids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 512 * heads * length * 4 / 2
