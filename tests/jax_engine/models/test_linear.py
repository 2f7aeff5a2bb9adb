"""Norms, activations, embeddings and products against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.activations import ACT2FN

from jax_engine.models.linear import ACTIVATIONS, Build, Embedding, Norm, check_activation, product
from lmmods.core.errors import UserError

X = np.random.default_rng(0).normal(size=(3, 4, 6)).astype(np.float32) * 3


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_equal_transformers(name):
    assert np.allclose(ACTIVATIONS[name](jnp.asarray(X)), ACT2FN[name](torch.tensor(X)), atol=2e-6)


def test_an_unknown_activation_is_rejected():
    assert check_activation("gelu") == "gelu"
    with pytest.raises(UserError, match="'mish'.*quick_gelu"):
        check_activation("mish")


def test_norms_equal_torchs():
    scale = np.linspace(0.5, 2, 6, dtype=np.float32)
    layer = Norm(6, "layer", 1e-3)
    layer.weight[...], layer.bias[...] = jnp.asarray(scale), jnp.asarray(scale - 1)
    expected = torch.nn.functional.layer_norm(torch.tensor(X), (6,), torch.tensor(scale), torch.tensor(scale - 1), 1e-3)
    assert np.allclose(layer(jnp.asarray(X)), expected, atol=1e-5)
    rms = torch.nn.functional.rms_norm(torch.tensor(X), (6,), torch.tensor(scale), 1e-3).numpy()
    for kind, weight in (("rms", scale), ("rms_plus_one", scale - 1)):
        norm = Norm(6, kind, 1e-3)
        norm.weight[...] = jnp.asarray(weight)
        assert np.allclose(norm(jnp.asarray(X)), rms, atol=1e-5)
    assert layer(jnp.asarray(X, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("padding_id", [None, 2, -1])
def test_the_padding_row_has_no_gradient(padding_id):
    ids = np.array([[0, 2, 4], [4, 4, 2]])
    actual, expected = Embedding(5, 6, std=1.0, padding_id=padding_id), torch.nn.Embedding(5, 6, padding_idx=padding_id)
    graph, state = nnx.split(actual)
    gradient = jax.grad(lambda s: (nnx.merge(graph, s)(ids) * X[:2, :3]).sum())(nnx.to_pure_dict(state))["weight"]
    (expected(torch.tensor(ids)) * torch.tensor(X[:2, :3])).sum().backward()
    assert np.allclose(gradient, expected.weight.grad, atol=1e-6)


def test_the_embedding_of_an_unknown_id_is_nan():
    assert np.isnan(Embedding(5, 6, std=1.0)(jnp.array([[5]]))).all()


@pytest.mark.parametrize("cpu_forms", [True, False])
@pytest.mark.parametrize("conv1d", [True, False])
@pytest.mark.parametrize("sizes", [(6, 9), (9, 6)])
def test_products_and_their_gradients_equal_torchs(sizes, conv1d, cpu_forms):
    random = np.random.default_rng(2)
    x, matrix, weights = (random.normal(size=shape).astype(np.float32) for shape in
                          ((3, 4, sizes[0]), sizes if conv1d else sizes[::-1], (3, 4, sizes[1])))
    build = Build(jnp.dtype("float32"), cpu_forms=cpu_forms)
    actual, back = jax.vjp(lambda x, matrix: product(x, matrix, build, conv1d), x, matrix)
    left, right = (torch.tensor(array, requires_grad=True) for array in (x, matrix))
    expected = left @ (right if conv1d else right.T)
    (expected * torch.tensor(weights)).sum().backward()
    values, expected_values = (actual, *back(jnp.asarray(weights))), (expected.detach(), left.grad, right.grad)
    for value, expected_value in zip(values, expected_values, strict=True):
        assert np.allclose(value, expected_value, atol=1e-5)
