"""A network over six devices, which share its matrices in two and its rows in three: the gradients of one."""

import jax
import numpy as np
from hf_reference import labels_of, our_loss
from tested import cells

from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.tree import flatten


@cells("mesh", ("phi3",))
def test_shards_and_parts_of_rows_have_the_gradients_of_one(make_ref, name, head):
    ref = make_ref(name, head)
    labels = labels_of(ref.batch())
    batch = {key: value[None].astype(np.int32) for key, value in ref.batch().items()}  # of one rank

    def gradients(params, batch):
        batch = {key: value[0] for key, value in batch.items()}
        return (jax.grad(lambda p: our_loss(ref.net, p, batch, labels)[0])(params),)

    mesh = ShardedMesh(fsdp=1, sequence=3, tensor=2, devices=jax.devices()[:6])
    placed = mesh.put_state(ref.params)
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(placed["layers"]))
    step = mesh.compile(gradients, ("state", "batch"), ("state",))
    found = flatten(mesh.fetch_state(step(placed, mesh.put_batch(batch))[0]))
    expected = flatten(ref.found[2])
    largest = max(np.abs(leaf).max() for leaf in expected.values())
    for path, leaf in expected.items():
        scale = max(np.abs(leaf).max(), 1e-3 * largest)
        assert np.abs(found[path] - leaf).max() <= 1e-4 * scale, path
