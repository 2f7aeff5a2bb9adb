"""A network over two devices: the gradients of one."""

import jax
import jax.numpy as jnp
import numpy as np
from hf_reference import CAUSAL, VARIANTS, cells

from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.tree import flatten


@cells([(name, "causal") for name in CAUSAL if name in VARIANTS], ("phi3",))
def test_two_shards_have_the_gradients_of_one(make_ref, name, head):
    ref = make_ref(name, head)
    batch = {key: value[None].astype(np.int32) for key, value in ref.batch().items()}  # of one rank

    def gradients(params, batch):
        batch = {key: value[0] for key, value in batch.items()}
        real = batch["attention_mask"][..., None] > 0
        return (jax.grad(lambda p: jnp.where(real, jnp.tanh(ref.net.logits(p, ref.net.hidden(p, batch))), 0).sum())(
            params),)

    mesh = ShardedMesh(fsdp=1, tensor=2, devices=jax.devices()[:2])
    placed = mesh.put_state(ref.params)
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(placed["layers"]))
    step = mesh.compile(gradients, ("state", "batch"), ("state",))
    found = flatten(mesh.fetch_state(step(placed, mesh.put_batch(batch))[0]))
    expected = flatten(jax.jit(gradients)(ref.params, batch)[0])
    largest = max(np.abs(leaf).max() for leaf in expected.values())
    for path, leaf in expected.items():
        scale = max(np.abs(leaf).max(), 1e-3 * largest)
        assert np.abs(found[path] - leaf).max() <= 1e-4 * scale, path
