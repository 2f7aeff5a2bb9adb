"""The reference of preference optimisation: adapters switched off, or a copy of the initial parameters."""

import jax
import numpy as np
import pytest
from test_lora import add_random_adapter

from jax_engine.distributed.tree import flatten, merge
from jax_engine.tasks.reference import COPIES, Reference
from lmmods.core.settings import LoRA


def compute_logits(net, params, batch):
    return jax.jit(lambda params: net.logits(params, net.hidden(params, batch)))(params)


@pytest.mark.parametrize("lora", [LoRA(rank=4, dora=True), LoRA(rank=4, modules_to_save=["lm_head"])],
                         ids=["dora", "modules"])
def test_the_base_reference_is_the_model_without_its_adapter(make_ref, lora):
    ref = make_ref("llama", "causal")
    _, net, params = add_random_adapter(ref, lora)
    trainable, _ = net.split(params)
    reference = Reference(net, "base")
    copies = reference.copies(trainable, {"head": ref.params["head"]} if lora.modules_to_save else {})
    merged = merge(params, copies)
    actual, expected = compute_logits(reference, merged, ref.batch()), compute_logits(ref.net, ref.params, ref.batch())
    assert np.array_equal(actual, expected)
    assert not np.allclose(compute_logits(net, merged, ref.batch()), expected, atol=1e-2)


def test_a_copied_reference_keeps_initial_weights_and_shares_frozen_ones(make_ref):
    ref = make_ref("llama", "causal")
    _, net, params = add_random_adapter(ref, LoRA(rank=4))
    trainable, frozen = net.split(params)
    reference = Reference(net, "copy")
    copies = reference.copies(trainable, {})
    assert flatten(copies).keys() == {(COPIES, *path) for path in flatten(trainable)}
    moved = merge(merge(jax.tree.map(lambda p: p + 0.5, trainable), frozen), copies)
    assert np.array_equal(compute_logits(reference, moved, ref.batch()), compute_logits(net, params, ref.batch()))

    def total(trainable):
        params = merge(merge(trainable, frozen), copies)
        return reference.logits(params, reference.hidden(params, ref.batch())).sum()

    assert not any(np.any(g) for g in jax.tree.leaves(jax.grad(total)(trainable)))
