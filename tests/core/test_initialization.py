"""Initial parameter values: their distributions, and that only seed, name and position determine them."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from lmmods.core import initialization
from lmmods.core.initialization import BLOCK, Normal, Uniform, draw, fill, init_part, lora_a, mean_row, row_norms

SIZE = 16 * BLOCK + 3


def moments(values: np.ndarray) -> list[float]:
    return [(values.astype(np.float64)**power).mean() for power in (1, 2, 3, 4)]


@pytest.mark.parametrize(("distribution", "expected", "variances"), [
    (Normal(1.0), [0, 1, 0, 3], [1, 2, 15, 96]),  # the moments of order 1 to 4, and E x^2k - (E x^k)^2 for each
    (Uniform(-1.0, 1.0), [0, 1 / 3, 0, 1 / 5], [1 / 3, 4 / 45, 1 / 7, 1 / 9 - 1 / 25]),
])
def test_values_have_the_right_moments_and_are_independent(distribution, expected, variances):
    values = draw(3, "a.weight", distribution, (SIZE,))
    assert values.dtype == np.float32
    for moment, mean, variance in zip(moments(values), expected, variances, strict=True):
        assert abs(moment - mean) < 5 * math.sqrt(variance / SIZE)
    others = [values[1:], values[BLOCK:], draw(4, "a.weight", distribution, (SIZE,)),
              draw(3, "b.weight", distribution, (SIZE,))]
    for other in others:  # the next position, block, seed and name
        product = (values[:other.size] * other).mean() / expected[1]
        assert abs(product) < 5 / math.sqrt(other.size)


def test_normal_values_have_the_right_histogram():
    """Counts in 400 bins and in the tails, across all layers of the ziggurat."""
    values = draw(11, "a.weight", Normal(1.0), (64 * BLOCK,)).astype(np.float64)
    edges = np.concatenate([[-math.inf], np.linspace(-3.8, 3.8, 401), [math.inf]])
    below = np.array([math.erfc(-edge / math.sqrt(2)) / 2 for edge in edges])
    expected, counts = np.diff(below) * values.size, np.histogram(values, edges)[0]
    assert expected.min() > 15 and counts.sum() == values.size
    surplus = ((counts - expected)**2 / expected).sum() - (len(expected) - 1)
    assert abs(surplus) < 5 * math.sqrt(2 * len(expected))
    tail = np.abs(values[np.abs(values) > initialization.TAIL])
    fraction = math.erfc(initialization.TAIL / math.sqrt(2))
    assert abs(tail.size - fraction * values.size) < 5 * math.sqrt(fraction * values.size)
    mean = math.exp(-initialization.TAIL**2 / 2) * math.sqrt(2 / math.pi) / fraction  # of |x| beyond it
    assert abs(tail.mean() - mean) < 5 * tail.std() / math.sqrt(tail.size)
    assert initialization.EDGES[0] > initialization.EDGES[1] == initialization.TAIL
    assert (np.diff(initialization.EDGES) < 0).all()
    top = initialization.AREA / initialization.EDGES[255] + initialization.HEIGHTS[255]
    assert abs(top - 1) < 1e-9  # the layers end where the curve does
    assert len(initialization.standard_normal(np.random.default_rng(0), 7)) == 7


def test_mean_std_and_bounds_are_applied():
    values = draw(0, "a", Normal(0.5, mean=2.0), (SIZE,))
    assert np.array_equal(values, draw(0, "a", Normal(1.0), (SIZE,)) * np.float32(0.5) + np.float32(2))
    values = draw(0, "a", Uniform(1.0, 3.0), (SIZE,))
    assert values.min() >= 1 and values.max() <= 3 and values.max() - values.min() > 1.999


def test_truncated_normal_values_have_the_right_histogram():
    values = draw(5, "a", Normal(1.0, cut=1.5), (SIZE,))
    edges = np.linspace(-1.5, 1.5, 101)
    below = np.array([math.erfc(-edge / math.sqrt(2)) / 2 for edge in edges])
    expected = np.diff(below) / (below[-1] - below[0]) * SIZE
    counts = np.histogram(values, edges)[0]
    assert counts.sum() == SIZE and abs(values[1:] @ values[:-1]) < 5 * math.sqrt(SIZE)
    assert abs(((counts - expected)**2 / expected).sum() - 99) < 5 * math.sqrt(2 * 99)
    scaled = draw(5, "a", Normal(0.5, mean=2.0, cut=1.5), (SIZE,))
    assert np.array_equal(scaled, values * np.float32(0.5) + np.float32(2))


def test_values_do_not_depend_on_threads_or_parameter_size(monkeypatch):
    values = draw(1, "a", Normal(1.0), (3 * BLOCK,))
    assert np.array_equal(draw(1, "a", Normal(1.0), (2 * BLOCK,)), values[:2 * BLOCK])
    assert np.array_equal(draw(1, "a", Normal(1.0), (3, BLOCK)).ravel(), values)
    monkeypatch.setattr(initialization, "ThreadPoolExecutor", lambda _: ThreadPoolExecutor(5))
    assert np.array_equal(draw(1, "a", Normal(1.0), (3 * BLOCK,)), values)


def test_values_equal_recorded_ones():
    """numpy guarantees Philox, but not the numbers derived from it. A change would break reproducibility."""
    assert draw(7, "model.norm.weight", Normal(1.0), (BLOCK + 2,))[[0, 1, BLOCK, BLOCK + 1]].tolist() == [
        -0.16370829939842224, -0.9919687509536743, -0.1597433090209961, -2.4952890872955322]
    assert draw(7, "model.norm.weight", Uniform(0.0, 1.0), (2,)).tolist() == [0.1367475390434265, 0.5350387692451477]


def test_a_non_contiguous_array_is_rejected():
    with pytest.raises(ValueError, match="the array for a is not contiguous"):
        fill(0, "a", Normal(1.0), np.empty((4, 6), np.float32)[:, :3])


def test_lora_a_has_the_distribution_of_peft():
    """peft.tuners.lora.layer.LoraLayer.reset_lora_parameters."""
    for size in range(1, 3000, 7):
        bounds = []
        tensor = torch.empty(1, size)
        tensor.uniform_ = lambda low, high, generator, bounds=bounds: bounds.extend((low, high))
        torch.nn.init.kaiming_uniform_(tensor, a=math.sqrt(5))
        assert lora_a(size) == Uniform(*bounds)


def test_row_norms_and_mean_rows_equal_torch_in_float64():
    matrix = draw(0, "a", Normal(1.0), (30, 70))
    expected = torch.from_numpy(matrix).double().norm(dim=1).float().numpy()
    assert np.array_equal(row_norms(matrix, conv1d=False), expected)
    assert np.array_equal(row_norms(np.ascontiguousarray(matrix.T), conv1d=True), expected)
    assert np.array_equal(mean_row(matrix), torch.from_numpy(matrix).double().mean(0, keepdim=True).float().numpy())


@pytest.mark.parametrize("distribution", [Normal(0.02), Uniform(-1.0, 1.0)])
@pytest.mark.parametrize(("shape", "part"), [
    ((3 * BLOCK + 7,), (slice(BLOCK + 5, 3 * BLOCK + 7),)),
    ((1000, 300), (slice(500, 1000), slice(None))),
    ((1000, 300), (slice(None), slice(150, 300))),
    ((5, 70, 1001), (slice(2, 4), slice(1, 60), slice(1000, 1001))),
    ((1000, 300), (slice(1000, 1000), slice(None))),
])
def test_a_shard_is_initialised_without_the_rest_of_its_parameter(distribution, shape, part, monkeypatch):
    monkeypatch.setattr(initialization, "PART", 3 * BLOCK)  # so that columns span several chunks
    whole, num_drawn = draw(1, "a.weight", distribution, shape)[part], 0
    fill_blocks = initialization._fill_blocks

    def count_values(*args):
        nonlocal num_drawn
        num_drawn += args[-1].size
        fill_blocks(*args)

    monkeypatch.setattr(initialization, "_fill_blocks", count_values)
    assert np.array_equal(init_part(1, "a.weight", distribution, shape, part), whole)
    rows = len(range(shape[0])[part[0]]) / shape[0] * math.prod(shape)
    assert num_drawn <= rows + 2 * BLOCK * math.ceil(rows / (2 * BLOCK))
