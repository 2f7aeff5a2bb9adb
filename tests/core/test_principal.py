"""PiSSA: principal factors of matrices against the singular value decomposition of numpy, in float64."""

import numpy as np
import pytest

from lmmods.core.errors import UserError
from lmmods.core.lazy_array import lazy
from lmmods.core.principal import Principal, exported_factor, principal_factors, residual
from lmmods.core.settings import LoRA

SHAPES = [(24, 24), (40, 16), (16, 40)]


def make_matrix(shape):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_principal_factors_equal_the_singular_value_decomposition(shape):
    matrix, scaling = make_matrix(shape), 0.5
    left, values, right = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    a, b = principal_factors(matrix, 5, scaling)
    assert a.shape == (5, shape[1]) and b.shape == (shape[0], 5) and a.dtype == b.dtype == np.float32
    signs = np.sign(left[np.abs(left).argmax(0), np.arange(left.shape[1])])[:5]
    roots = np.sqrt(values[:5] / scaling)
    np.testing.assert_allclose(b, left[:, :5] * signs * roots, rtol=0, atol=2e-7 * roots.max())
    np.testing.assert_allclose(a, right[:5] * (signs * roots)[:, None], rtol=0, atol=2e-7 * roots.max())
    remaining = np.linalg.svd(residual(matrix, a, b, scaling).astype(np.float64), compute_uv=False)
    np.testing.assert_allclose(remaining[:-5], values[5:], rtol=1e-5)
    assert remaining[-5:].max() < 1e-5


def test_factors_of_a_matrix_with_lower_rank_are_padded_with_zeros():
    matrix = np.outer(np.arange(6), np.arange(9)).astype(np.float32)
    a, b = principal_factors(matrix, 3, 1.0)
    np.testing.assert_allclose(b @ a, matrix, atol=1e-5)
    assert not a[1:].any() and not b[:, 1:].any()
    a, b = principal_factors(np.zeros((4, 4), np.float32), 2, 1.0)
    assert not a.any() and not b.any()


def test_a_shard_of_the_residual_equals_that_part_of_the_whole():
    matrix, reads = make_matrix((12, 20)), []
    part = Principal(lazy(matrix), 3, 2.0, "q_proj", lambda values: reads.append(values.shape) or values,
                     lambda values: values)
    whole = np.asarray(part.residual)
    a, b = part.factors
    np.testing.assert_array_equal(whole, residual(matrix, a, b, 2.0))
    np.testing.assert_allclose(part.residual[2:5, 4:], whole[2:5, 4:], rtol=1e-6)
    assert reads.count((12, 20)) == 2  # once for the factors, once for the whole residual
    with pytest.raises(UserError, match=r"lora.rank is 13, but k_proj has only 12 singular values"):
        Principal(lazy(matrix), 13, 1.0, "k_proj", np.asarray, np.asarray)


@pytest.mark.parametrize("lora", [LoRA(rank=4, alpha=12, init="pissa"), LoRA(rank=4, alpha=12, rslora=True)])
def test_an_exported_adapter_is_the_change_of_the_weights(lora):
    rng, change = np.random.default_rng(0), lora.for_export()
    a, first_a = rng.standard_normal((2, 4, 7))
    b, first_b = rng.standard_normal((2, 6, 4))
    new_a = np.concatenate(exported_factor("lora_A", a, first_a), 0)
    new_b = np.concatenate(exported_factor("lora_B", b, first_b), 1)
    assert change.rank == 8 == len(new_a) and change.init == "kaiming"
    np.testing.assert_allclose(change.scaling * new_b @ new_a, lora.scaling * (b @ a - first_b @ first_a), rtol=1e-12)


@pytest.mark.parametrize("other", [{"dora": True}, {"target_parameters": ["experts.down_proj"]}])
def test_pissa_rejects_dora_and_target_parameters(other):
    with pytest.raises(UserError, match="lora.init is pissa, but must be kaiming"):
        LoRA(init="pissa", **other)
