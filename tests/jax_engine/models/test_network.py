"""Properties of parameters and programs, tested on one or two families; `test_jax_families.py` tests the others."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hf_reference import labels_of, our_loss

from jax_engine.distributed import loss
from jax_engine.distributed import loss as losses
from jax_engine.distributed.tree import flatten, unflatten
from jax_engine.models import hub
from lmmods.core.dropout import token_seeds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "albert", "mixtral"])
def test_remat_and_unroll_change_no_gradient(make_ref, name, monkeypatch):
    head = "masked" if name == "albert" else "causal"
    ref = make_ref(name, head)
    batch = ref.batch()
    labels = labels_of(batch)
    batch["token_seeds"] = token_seeds(0, 0, np.arange(4)[:, None], np.arange(9))

    def gradients(**options):
        net = hub.network(ref.net.config, head, **options)
        gradient = jax.jit(jax.grad(lambda p: our_loss(net, p, batch, labels, True)[0]))
        return gradient(ref.params), str(jax.make_jaxpr(gradient)(ref.params)).count("remat")

    plain, num_always = gradients()  # norms and gated activations are always recomputed
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(plain))
    monkeypatch.setattr(hub, "MLP_CHUNK", 4)  # of 9 tokens
    for options in ({"remat": "minimal"}, {"remat": "full"}, {"remat": "offload"}, {"unroll": 3}):
        other, num_remats = gradients(**options)
        assert (num_remats > num_always) == ("remat" in options)
        for path, leaf in flatten(plain).items():
            scale = max(float(jnp.abs(leaf).max()), 1e-3 * largest)
            assert jnp.abs(leaf - flatten(other)[path]).max() <= 1e-5 * scale, path


@pytest.mark.slow
@pytest.mark.parametrize(("name", "head"), [("gpt2", "causal"), ("bert", "masked"), ("distilbert", "qa")])
def test_a_rows_dropout_does_not_depend_on_its_batch(make_ref, name, head):
    ref = make_ref(name, head)
    seeds = token_seeds(5, 0, np.arange(4)[:, None], np.arange(9))
    batch = ref.batch() | {"attention_mask": np.ones((4, 9), int), "token_seeds": seeds}
    hidden = jax.jit(ref.net.hidden, static_argnums=2)
    whole = np.asarray(hidden(ref.params, batch, True))
    for row in range(4):
        alone = np.asarray(hidden(ref.params, {k: v[row:row + 1] for k, v in batch.items()}, True))
        assert np.allclose(alone[0], whole[row], atol=1e-5)
    longer = {k: np.pad(v, ((0, 0), (0, 3))) for k, v in batch.items()}
    assert np.allclose(np.asarray(hidden(ref.params, longer, True))[:, :9], whole, atol=1e-5)
    assert not np.allclose(np.asarray(hidden(ref.params, batch | {"token_seeds": seeds[::-1]}, True)), whole, atol=1e-2)
    assert not np.allclose(np.asarray(hidden(ref.params, batch)), whole, atol=1e-2)


def test_half_precision_keeps_the_residual_stream_and_logits_in_float32(make_ref):
    ref = make_ref("llama", "causal")
    batch = ref.batch()
    net = hub.network(ref.net.config, "causal", compute_dtype="bfloat16")
    hidden = net.hidden(ref.params, batch)
    logits = net.logits(ref.params, hidden)
    assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32  # the head multiplies in the dtype of its input
    between = jax.make_jaxpr(lambda params: net.hidden(params, batch))(ref.params)
    assert "float32" in str(between.eqns[-1].invars[0].aval.dtype)  # the residual stream
    exact = np.asarray(ref.net.logits(ref.params, ref.net.hidden(ref.params, batch)))
    real = batch["attention_mask"] > 0
    assert 0 < np.abs(np.asarray(logits) - exact)[real].max() < 0.03 * np.abs(exact).max()
    small = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), ref.params)
    assert net.hidden(small, batch).dtype == jnp.bfloat16 and net.logits(small, hidden).dtype == jnp.float32


@jax.tree_util.register_pytree_node_class
class Halves:
    """A weight stored as two summands, like a quantised one, which is stored as codes and scales."""

    def __init__(self, *parts):
        self.parts = parts

    def astype(self, dtype):
        return sum(self.parts).astype(dtype)

    def tree_flatten(self):
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)


@pytest.mark.parametrize(("name", "head"), [("llama", "causal"), ("albert", "masked")])
def test_weights_may_be_stored_in_another_form(make_ref, name, head):
    ref = make_ref(name, head)
    batch = ref.batch()
    leaves = flatten(ref.params)
    stored = unflatten({path: Halves(leaf / 4, 3 * leaf / 4) if path[1] in ("attn", "mlp") and path[-1] == "weight"
                        and len(path) == 4 and "norm" not in path[2] else leaf for path, leaf in leaves.items()})
    hidden = jax.jit(ref.net.hidden)
    assert np.allclose(hidden(stored, batch), hidden(ref.params, batch), atol=1e-4)
    assert flatten(ref.net.split(stored)[0]).keys() == flatten(ref.net.decays(stored)).keys() == leaves.keys()


def test_a_row_of_padding_gives_finite_gradients(make_ref):
    for name, head in (("gpt2", "causal"), ("bert", "masked")):
        ref = make_ref(name, head)
        batch = ref.batch()
        batch["attention_mask"] = batch["attention_mask"] * np.array([[0], [1], [1], [1]])
        labels = labels_of(batch)
        grads = jax.jit(jax.grad(lambda p, net=ref.net, batch=batch, labels=labels: our_loss(
            net, p, batch, labels)[0]))(ref.params)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_deeper_model_has_no_larger_program(make_ref, name):
    """Layers are the body of one loop, also if windows and positions alternate. Compile time grows with the program."""
    texts, batch = {}, {"input_ids": np.zeros((1, 6), np.int32)}
    for depth in (2, 32):
        config = copy.deepcopy(make_ref(name, "causal").config)
        config.num_hidden_layers, config.layer_types = depth, ["sliding_attention", "full_attention"] * (depth // 2)
        net = hub.network(config, "causal", unroll=1 if depth == 2 else None)
        lowered = jax.jit(jax.grad(lambda p, net=net: net.logits(p, net.hidden(p, batch)).sum())).lower(net.shapes)
        texts[depth] = len(lowered.as_text())
    assert texts[32] <= 1.01 * texts[2]


@pytest.mark.parametrize("name", ["gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "granite", "cohere2"))])
def test_chunked_losses_scale_and_cap_logits(make_ref, name, monkeypatch):
    ref = make_ref(name, "causal")
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * 37 * 5)
    monkeypatch.setattr(loss, "MIN_CHUNK", 1)
    batch = ref.batch()
    labels = labels_of(batch)

    def total(log_probs, picked):  # the second is like a preference loss: per row, and not linear
        return -picked.sum() + (log_probs.sum(1) ** 2).sum() / 100

    def chunked(params):
        hidden = ref.net.hidden(params, batch)
        arguments = hidden, losses.shift_labels(labels), lambda h: ref.net.logits(params, h), 37
        return total(losses.token_log_probs(*arguments), -losses.token_loss(*arguments).total)

    value, grads = jax.jit(jax.value_and_grad(chunked))(ref.params)
    ref.torch.zero_grad()
    logits = ref.torch(**{key: torch.tensor(part) for key, part in batch.items()}).logits[:, :-1]
    targets = torch.tensor(labels[:, 1:])
    log_probs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0].where(targets >= 0, 0)
    expected = total(log_probs, log_probs)
    expected.backward()
    assert abs(float(value) - expected.item()) <= 1e-4 * abs(expected.item())
    reference = {key: parameter.grad.numpy() for key, parameter in ref.torch.named_parameters()}
    largest = max(np.abs(gradient).max() for gradient in reference.values())
    for key, gradient in ref.net.to_torch(grads).items():
        assert np.abs(gradient - reference[key]).max() <= 1e-4 * max(np.abs(reference[key]).max(), 1e-3 * largest), key


def test_rows_longer_than_the_position_table_are_rejected(make_ref):
    from lmmods.core.errors import UserError

    for name, head, num_positions in (("gpt2", "causal", 32), ("roberta", "masked", 28)):
        ref = make_ref(name, head)
        ids = np.ones((1, num_positions + 1), int)
        with pytest.raises(UserError, match=f"{num_positions} positions"):
            ref.net.hidden(ref.params, {"input_ids": ids, "attention_mask": ids})
        ref.net.hidden(ref.params, {"input_ids": ids[:, 1:], "attention_mask": ids[:, 1:]})
    with pytest.raises(UserError, match="token_type_ids"):
        ref = make_ref("gpt2", "causal")
        ref.net.hidden(ref.params, {"input_ids": ids, "token_type_ids": ids})
