"""Dropout masks: a published hash, uniform, and independent across features, tokens, rows and layers."""

import numpy as np
import pytest

from lmmods.core.dropout import (
    attention_mask,
    dropped_steps,
    feature_mask,
    feature_noise,
    finalise,
    keep_scale,
    murmur3,
    site_seed,
    token_seeds,
)
from lmmods.core.errors import UserError

RATE = 0.1
ROWS, TOKENS, FEATURES = 64, 128, 256
POSITIONS = np.arange(TOKENS)
# scikit-learn's murmurhash3_32 of the little-endian bytes of epoch and row (8 each) and position (4).
SKLEARN = [(0, 0, 0, 0, -291690166),
           (42, 3, 17, 1023, -1534977109),
           (4294967295, 8589934597, 1099511627777, 7, 1318660992)]


def masks(epoch=0, row=None, site="h.0.mlp", seed=42, rate=RATE):
    """Return masks [ROWS, TOKENS, FEATURES] as floats, centred and scaled to variance 1."""
    rows = np.arange(ROWS) if row is None else np.asarray(row)
    kept = feature_mask(token_seeds(seed, epoch, rows[:, None], POSITIONS), site_seed(site), FEATURES, rate)
    fraction = 1 - dropped_steps(rate) / 2**16
    return (kept - fraction) / np.sqrt(fraction * (1 - fraction))


def z_score(product):
    """Return the z-score of the mean of products of independent numbers with variance 1."""
    return product.mean() * np.sqrt(product.size)


def test_the_hash_is_murmurhash3():
    """Against published values of the reference implementation."""
    def bytes_of(data):
        return [np.array([block], np.uint32) for block in np.frombuffer(data, "<u4")]

    for data, seed, expected in ((b"", 1, 0x514E28B7), (b"", 2**32 - 1, 0x81F16F39), (b"\0\0\0\0", 0, 0x2362F9DE),
                                 (b"!Ce\x87", 0, 0xF55B516B), (b"!Ce\x87", 0x5082EDEE, 0x2362F9DE),
                                 (b"test", 0, 0xBA6BD213), (b"test", 0x9747B28C, 0x704B81DC),
                                 (b"aaaa", 0x9747B28C, 0x5A97808A)):
        assert murmur3(seed, bytes_of(data)) == expected, data


@pytest.mark.parametrize(("seed", "epoch", "row", "position", "expected"), SKLEARN)
def test_token_seeds_are_murmurhash3_of_epoch_row_and_position(seed, epoch, row, position, expected):
    assert token_seeds(seed, epoch, row, np.array([position])).tolist() == [expected]


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5])
def test_kept_fractions_are_binomial(rate):
    """By token, by feature, by row and in total: z and chi-square tests."""
    centred = masks(rate=rate)
    assert abs(z_score(centred)) < 4
    for axes in ((0, 1), (2,), (1, 2)):
        z = centred.mean(axis=axes) * np.sqrt(centred.size / np.prod([centred.shape[a] for a in range(3)
                                                                     if a not in axes]))
        freedom = z.size
        assert abs((z**2).sum() - freedom) < 5 * np.sqrt(2 * freedom), axes


def test_masks_of_neighbours_are_independent():
    """No correlation between features, tokens, rows and halves of a word, at any small distance."""
    centred = masks()
    pairs = {f"axis {axis}, {distance} apart": centred.take(range(distance, centred.shape[axis]), axis)
             * centred.take(range(centred.shape[axis] - distance), axis)
             for axis in range(3) for distance in (1, 2, 3, 5, 16, 32)}
    pairs["halves"] = centred[..., : FEATURES // 2] * centred[..., FEATURES // 2 :]
    pairs |= {f"squares of {a} and {b}": (centred[a:, :, b:] * centred[:-a, :, b:] * centred[a:, :, :-b]
                                         * centred[:-a, :, :-b]) for a in (1, 2, 7) for b in (1, 2, 64)}
    pairs |= {f"squares of tokens, {b}": (centred[:, 1:, b:] * centred[:, :-1, b:] * centred[:, 1:, :-b]
                                         * centred[:, :-1, :-b]) for b in (1, 3)}
    correlated = {name: z_score(product) for name, product in pairs.items() if abs(z_score(product)) > 4.5}
    assert not correlated


@pytest.mark.parametrize("other", [{"epoch": 1}, {"seed": 43}, {"site": "h.1.mlp"}, {"row": np.arange(ROWS) + ROWS},
                                   {"epoch": 2**32}, {"row": np.arange(ROWS) + 2**32}])
def test_masks_of_epochs_seeds_layers_and_rows_are_independent(other):
    assert abs(z_score(masks() * masks(**other))) < 4


def test_bits_of_the_hash_are_balanced_and_depend_on_all_input_bits():
    """Every bit is 1 in half of the words, and flipping an input bit flips each output bit half the time."""
    words = token_seeds(1, 0, np.arange(2000)[:, None], POSITIONS[:50]).view(np.uint32).ravel()
    bits = words[:, None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)
    z = (bits.mean(0) - 0.5) * 2 * np.sqrt(len(words))
    assert np.abs(z).max() < 4.5
    for bit in range(32):
        flipped = finalise(words) ^ finalise(words ^ np.uint32(1 << bit))
        fraction = (flipped[:, None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)).mean(0)
        assert np.abs(fraction - 0.5).max() < 0.02, bit


def test_attention_masks_are_uniform_and_independent():
    seeds = token_seeds(42, 0, np.arange(8)[:, None], POSITIONS)
    fraction = 1 - dropped_steps(RATE) / 2**16
    centred = (attention_mask(seeds, site_seed("h.0.attn"), 5, RATE) - fraction) / np.sqrt(fraction * (1 - fraction))
    other = (attention_mask(seeds, site_seed("h.1.attn"), 5, RATE) - fraction) / np.sqrt(fraction * (1 - fraction))
    assert centred.shape == (8, 5, TOKENS, TOKENS)
    products = {"mean": centred, "layers": centred * other, "transposed": centred * centred.swapaxes(2, 3)}
    products["transposed"] = products["transposed"][..., *np.triu_indices(TOKENS, 1)]
    products |= {f"axis {axis}": np.diff(centred, axis=axis) ** 2 - 2 for axis in range(4)}
    scores = {name: z_score(x) for name, x in products.items() if not name.startswith("axis")}
    assert {name: score for name, score in scores.items() if abs(score) > 4} == {}
    for axis in range(4):
        product = centred.take(range(1, centred.shape[axis]), axis) * centred.take(range(centred.shape[axis] - 1), axis)
        assert abs(z_score(product)) < 4.5, axis


def test_a_mask_does_not_depend_on_its_neighbours():
    """The same tokens get the same masks in a single row, another row, with left padding and when truncated."""
    seeds = token_seeds(3, 1, np.array([[4], [9]]), np.arange(12))
    features, attention = feature_mask(seeds, 77, 10, 0.3), attention_mask(seeds, 77, 3, 0.3)
    padded = np.zeros((1, 20), np.int32)
    padded[0, 8:] = seeds[1]
    np.testing.assert_array_equal(feature_mask(padded, 77, 10, 0.3)[0, 8:], features[1])
    np.testing.assert_array_equal(attention_mask(padded, 77, 3, 0.3)[0, :, 8:, 8:], attention[1])
    np.testing.assert_array_equal(attention_mask(seeds[:, :5], 77, 3, 0.3), attention[:, :, :5, :5])


def test_rates_are_multiples_of_a_step_and_the_scale_is_exact():
    assert dropped_steps(0.0) == 0 and dropped_steps(0.5) == 2**15 and dropped_steps(1e-9) == 1
    for rate in (0.1, 0.25):
        assert abs(dropped_steps(rate) / 2**16 - rate) <= 2**-17
        assert keep_scale(rate) * (1 - dropped_steps(rate) / 2**16) == 1
    assert keep_scale(0.0) == 1 and feature_mask(np.array([5], np.int32), 1, 64, 0.0).all()
    with pytest.raises(UserError, match="dropout rate"):
        dropped_steps(1.0)


def test_noise_is_uniform_and_independent():
    """Its mean, its variance of 1/3, a histogram of ten bins, and neighbours in feature, token and row."""
    tokens = token_seeds(42, 0, np.arange(ROWS)[:, None], POSITIONS)
    noise = feature_noise(tokens, site_seed("a"), FEATURES)
    assert noise.dtype == np.float32 and noise.shape == (ROWS, TOKENS, FEATURES)
    assert -1 < noise.min() < -0.99999 and 0.99999 < noise.max() < 1
    scaled = noise.astype(np.float64) * np.sqrt(3)
    assert abs(scaled.mean() * np.sqrt(scaled.size)) < 4
    assert abs((scaled**2 - 1).mean() * np.sqrt(scaled.size / 0.8)) < 4  # fourth moment 9/5
    counts, expected = np.histogram(noise, 10, (-1, 1))[0], noise.size / 10
    assert ((counts - expected) ** 2 / expected).sum() < 40
    for pair in ((scaled[:, :, 1:], scaled[:, :, :-1]), (scaled[:, 1:], scaled[:, :-1]), (scaled[1:], scaled[:-1])):
        assert abs(z_score(pair[0] * pair[1])) < 4
    assert abs(z_score(scaled * np.sqrt(3) * feature_noise(tokens, site_seed("b"), FEATURES))) < 4
