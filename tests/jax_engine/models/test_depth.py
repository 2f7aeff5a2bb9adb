"""Layers of two kinds, with experts and without: their stacks, and a network with both against transformers."""

import jax
import numpy as np
import pytest
import torch
from hf_reference import labels_of, of_real

from jax_engine.models.architecture import LayerKind
from jax_engine.models.network import LayerStack, split_into_stacks
from tests.closeness import assert_as_close, gradients, in_both

D, S = LayerKind(routed=False), LayerKind(routed=True)


@pytest.mark.parametrize(("kinds", "stacks"), [
    ([D, D, D], [LayerStack(0, (D,), 3)]),
    ([D, S, S, S], [LayerStack(0, (D,), 1), LayerStack(1, (S,), 3)]),
    ([D, S, D, S, D], [LayerStack(0, (D, S), 2), LayerStack(4, (D,), 1)]),
    ([D, D, S, D, D, S], [LayerStack(0, (D, D, S), 2)]),
])
def test_equal_or_alternating_layers_share_a_loop(kinds, stacks):
    class Depth:
        passes = tuple(range(len(kinds)))

    Depth.kinds = tuple(kinds)
    assert split_into_stacks(Depth) == stacks


@pytest.mark.slow
def test_alternating_layer_kinds_equal_transformers(make_ref):
    """Compare logits, gradients and routing; also token by token with a cache."""
    ref = make_ref("qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=None)
    batch = ref.batch()
    labels, inputs = labels_of(batch), {name: torch.tensor(value) for name, value in batch.items()}
    output = ref.torch(**inputs, output_router_logits=True)
    pairs = output.logits[:, :-1].flatten(0, 1), torch.tensor(labels[:, 1:]).flatten()
    torch.nn.functional.cross_entropy(*pairs, reduction="sum").backward()
    reference, real = output.logits.detach().numpy(), batch["attention_mask"] > 0
    logits, _, gradients = ref.outputs
    assert np.abs(logits - reference)[real].max() <= 1e-4 * np.abs(reference).max()
    named, expected = ref.net.to_torch(gradients), dict(ref.torch.named_parameters())
    assert list(named) == list(expected)
    largest = max(parameter.grad.abs().max().item() for parameter in expected.values())
    for name, parameter in expected.items():
        scale = max(parameter.grad.abs().max().item(), 1e-3 * largest)
        assert np.abs(named[name] - parameter.grad.numpy()).max() <= 1e-4 * scale, name
    whole, load = jax.jit(ref.net.hidden_and_load)(ref.params, batch)
    indices = [layer.view(4, 9, -1).topk(2, -1).indices.numpy() for layer in output.router_logits]
    counts = [[np.bincount(layer[row][real[row]].ravel(), minlength=4) for row in range(4)] for layer in indices]
    assert len(counts) == 2 and np.array_equal(load.counts, counts)

    step = jax.jit(lambda batch, cache: ref.net.hidden(ref.params, batch, cache=cache))
    cache, positions, actual = ref.net.init_cache(4, 9), np.arange(9) + np.zeros_like(batch["input_ids"]), []
    for position in range(9):
        token = {name: value[:, position, None] for name, value in (batch | {"position_ids": positions}).items()}
        hidden, cache = step(token, cache)
        actual.append(hidden)
    assert np.abs(np.concatenate(actual, 1) - whole)[real].max() <= 1e-5 * np.abs(whole).max()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kinds", "changes"), [
    # The last two of four layers lend keys and values to two iterations that borrow them.
    ("gemma4_text", ["sliding_attention", "full_attention"] * 4, {
        "num_kv_shared_layers": 4, "enable_moe_block": False}),
    ("gemma4_text", ["sliding_attention", "full_attention"] * 2, {
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_bias": True,
        "enable_moe_block": False}),
    ("qwen3_5_text", ["linear_attention", "full_attention"] * 2, {"attention_bias": True}),
])
def test_two_kinds_of_attention_in_a_loop_equal_transformers(make_ref, name, kinds, changes):
    """Compare with transformers: heads of two sizes, or layers with a state, in each iteration."""
    ref = make_ref(name, num_hidden_layers=len(kinds), layer_types=kinds, **changes)
    assert [stack.num_steps for stack in split_into_stacks(ref.net.arch)][-1] == 2
    batch = ref.batch()
    labels, inputs = torch.tensor(labels_of(batch)), {name: torch.tensor(value) for name, value in batch.items()}

    def run_torch(model):
        logits = model(**inputs).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return of_real(logits, batch, "causal"), loss, gradients(model, loss)

    logits, loss, grads = ref.outputs
    outputs = of_real(logits, batch, "causal"), loss, ref.net.to_torch(grads)
    for actual, expected, exact in zip(outputs, *in_both(run_torch, ref.torch), strict=True):
        assert_as_close(actual, expected, exact, terms=2048)  # up to eight layers, forward and backward
