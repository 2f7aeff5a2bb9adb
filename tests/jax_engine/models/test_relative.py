"""Relative positions: their buckets, and the options of DeBERTa's configurations, against transformers."""

import jax
import numpy as np
import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from jax_engine.models.relative import Relative


@pytest.mark.parametrize(("buckets", "max_distance"), [(256, 512), (32, 128), (4, 32), (-1, 64)])
def test_buckets_equal_transformers(buckets, max_distance):
    rows, span = torch.zeros(1, 600, 1), buckets if buckets > 0 else max_distance
    expected = build_relative_position(rows, rows, buckets, max_distance)[0].numpy()
    actual = Relative(span, max_distance if buckets > 0 else None, (), False, False).buckets(600)
    assert np.array_equal(actual, np.clip(expected + span, 0, 2 * span - 1))


@pytest.mark.parametrize("changes", [
    {"share_att_key": False, "position_buckets": -1, "position_biased_input": True, "type_vocab_size": 2},
    {"share_att_key": False, "pos_att_type": "c2p", "norm_rel_ebd": "none", "max_relative_positions": 7,
     "conv_kernel_size": 0},
    {"relative_attention": False, "position_biased_input": True, "norm_rel_ebd": "none"},
], ids=["separate-keys", "c2p-only", "absolute"])
def test_every_option_of_debertas_configuration_equals_transformers(make_ref, changes):
    ref = make_ref("deberta-v2", "masked", **changes)
    batch = ref.batch()
    with torch.no_grad():
        expected = ref.torch(**{key: torch.tensor(value) for key, value in batch.items()}).logits.numpy()
    actual = np.asarray(jax.jit(lambda p: ref.net.logits(p, ref.net.hidden(p, batch)))(ref.params))
    real = batch["attention_mask"] > 0
    assert np.abs(actual - expected)[real].max() <= 1e-4 * np.abs(expected).max()
    assert list(ref.net.to_torch(ref.params)) == [name for name, _ in ref.torch.named_parameters()]
