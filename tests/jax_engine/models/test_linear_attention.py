"""The gated delta rule against its recurrence in float64; packed rows, and rows in parts, against whole rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from jax_engine.models.linear import Build
from jax_engine.models.linear_attention import CHUNK, CausalConvolution, gated_delta_rule
from tests.closeness import Float64, assert_as_close

HEADS, GROUPS, SIZE, OUT = 2, 3, 8, 5
NAMES = ("q", "k", "v", "decay", "rate")


def make_inputs(length: int, batch: int = 2) -> dict[str, np.ndarray]:
    random = np.random.default_rng(length)
    shape, values = (batch, length, HEADS), HEADS * GROUPS
    q, k = (random.normal(size=(*shape, SIZE)) for _ in range(2))
    tensors = {"q": q, "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
               "v": random.normal(size=(batch, length, values, OUT)),
               "decay": -random.exponential(size=(batch, length, values)) * np.array([0.01, 0.1, 1, 5, 20, 100]),
               "rate": random.uniform(size=(batch, length, values))}
    return {name: value.astype(np.float32) for name, value in tensors.items()}


def apply_recurrence(q, k, v, decay, rate):
    """Apply the rule token by token, in the dtype of the inputs."""
    q, k = (np.repeat(x, GROUPS, 2) for x in (q, k))
    state = np.zeros((len(k), HEADS * GROUPS, SIZE, OUT), k.dtype)
    out = []
    for position in range(k.shape[1]):
        state = state * np.exp(decay[:, position])[..., None, None]
        missing = v[:, position] - np.einsum("bhd,bhde->bhe", k[:, position], state)
        state = state + np.einsum("bhd,bhe->bhde", k[:, position], missing * rate[:, position][..., None])
        out.append(np.einsum("bhd,bhde->bhe", q[:, position], state))
    return np.stack(out, 1), state


@pytest.mark.parametrize("length", [1, 7, CHUNK, CHUNK + 1, 3 * CHUNK - 10])
def test_the_chunked_rule_equals_the_recurrence(length):
    tensors = make_inputs(length)
    plain, exact = (apply_recurrence(*(value.astype(dtype) for value in tensors.values()))
                    for dtype in (np.float32, np.float64))
    out, state = jax.jit(gated_delta_rule)(*tensors.values())
    assert out.dtype == state.dtype == jnp.float32
    assert_as_close((out, state.reshape(exact[1].shape)), plain, exact, terms=1024)


def test_gradients_equal_transformers_recurrence():
    leaves = make_inputs(CHUNK + 5)
    weights = np.random.default_rng(0).normal(size=leaves["v"].shape).astype(np.float32)

    def run_torch(dtype):
        q, *others = tensors = [torch.tensor(leaves[name], dtype=dtype, requires_grad=True) for name in NAMES]
        out, _ = torch_recurrent_gated_delta_rule(q * SIZE**0.5, *others)  # transformers divides by this factor
        (out * torch.tensor(weights, dtype=dtype)).sum().backward()
        return {name: tensor.grad for name, tensor in zip(NAMES, tensors, strict=True)}

    actual = jax.jit(jax.grad(lambda *args: (gated_delta_rule(*args)[0] * weights).sum(), range(5)))(*leaves.values())
    plain = run_torch(torch.float32)
    with Float64():
        exact = run_torch(torch.float64)
    assert_as_close(dict(zip(NAMES, actual, strict=True)), plain, exact, terms=1024)


def test_each_packed_document_has_its_own_state():
    """Documents start within a chunk and at its start, and span several chunks; the last one is padding."""
    lengths = [10, CHUNK - 10, 5, 2 * CHUNK + 3, 9]
    documents = np.repeat([1, 2, 3, 4, 0], lengths)[None]
    tensors = make_inputs(len(documents[0]), batch=1)
    rule = jax.jit(gated_delta_rule)
    together = np.asarray(rule(*tensors.values(), documents)[0])
    for document in range(5):
        in_document = documents[0] == document
        alone = {name: value[:, in_document] for name, value in tensors.items()}
        plain, exact = (apply_recurrence(*(value.astype(dtype) for value in alone.values()))[0]
                        for dtype in (np.float32, np.float64))
        assert_as_close(together[:, in_document], plain, exact, terms=1024)
    others = {name: np.where((documents == 4).reshape(1, -1, *[1] * (value.ndim - 2)), value, value[:, ::-1])
              for name, value in tensors.items()}
    changed = np.asarray(rule(*others.values(), documents)[0])
    assert np.array_equal(changed[documents == 4], together[documents == 4])
    assert not np.array_equal(changed[documents == 2], together[documents == 2])


def test_a_row_in_parts_equals_the_whole_row():
    tensors, size = make_inputs(CHUNK + 26), CHUNK // 2 + 13
    actual, state = [], np.zeros((2, HEADS, GROUPS, SIZE, OUT), np.float32)
    rule = jax.jit(lambda state, *args: gated_delta_rule(*args, state=state))
    for part in (slice(size), slice(size, None)):
        out, state = rule(state, *(value[:, part] for value in tensors.values()))
        actual.append(out)
    plain, exact = (apply_recurrence(*(value.astype(dtype) for value in tensors.values()))
                    for dtype in (np.float32, np.float64))
    assert_as_close((np.concatenate(actual, 1), state.reshape(exact[1].shape)), plain, exact, terms=1024)


def test_the_convolution_reads_only_tokens_of_the_same_document():
    size, width, length = 6, 4, 11
    random = np.random.default_rng(0)
    x, weight = (random.normal(size=shape).astype(np.float32) for shape in ((2, length, size), (size, 1, width)))
    convolution = CausalConvolution(size, width, Build(jnp.float32), 0.02)
    convolution.weight.set_value(jnp.asarray(weight))

    def run_torch(x):
        x = torch.tensor(x).transpose(1, 2)
        return torch.nn.functional.conv1d(x, torch.tensor(weight), padding=width - 1, groups=size)[
            ..., :x.shape[2]].transpose(1, 2).numpy()

    actual, last = convolution(x, None, None)
    assert np.allclose(actual, run_torch(x), atol=1e-6) and np.array_equal(last, x[:, 1 - width:])
    documents = np.array([[1] * 2 + [2] * 5 + [3] * 4, [1] * 6 + [0] * 5])
    actual, _ = convolution(x, documents, None)
    for row, document in ((0, 1), (0, 2), (0, 3), (1, 1)):
        in_document = documents[row] == document
        assert np.allclose(actual[row, in_document], run_torch(x[row:row + 1, in_document])[0], atol=1e-6)
    parts, before = [], None
    for start, end in ((0, 2), (2, 3), (3, length)):  # the first is shorter than the convolution
        out, before = convolution(x[:, start:end], None, before)
        parts.append(out)
    assert np.allclose(np.concatenate(parts, 1), run_torch(x), atol=1e-6)
