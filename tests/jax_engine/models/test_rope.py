"""Rotary positions of every type against transformers' modules, in short and long texts; lengths of texts."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Cohere2Config, Glm4Config, LlamaConfig, Phi3Config
from transformers.models.cohere2 import modeling_cohere2 as cohere
from transformers.models.glm4 import modeling_glm4 as glm
from transformers.models.llama import modeling_llama as llama
from transformers.models.phi3 import modeling_phi3 as phi

from jax_engine.models.rope import rope_of, rotate, text_lengths
from lmmods.core.errors import UserError

RANDOM = np.random.default_rng(0)
SIZES = {"hidden_size": 96, "num_attention_heads": 3, "max_position_embeddings": 64, "pad_token_id": 0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + n / 8 for n in range(8)],
        "long_factor": [2.0 + n for n in range(8)], "partial_rotary_factor": 0.5}
LLAMAS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "truncate": False,
     "attention_factor": 1.3},
]
CASES = [(LlamaConfig(**SIZES, head_dim=32, rope_parameters={"rope_theta": 1e4, **rope}), llama,
          llama.LlamaRotaryEmbedding, {}) for rope in LLAMAS]
CASES += [
    (Phi3Config(**SIZES, original_max_position_embeddings=32, rope_parameters=LONG), phi, phi.Phi3RotaryEmbedding,
     {"partial": True}),
    (Glm4Config(**SIZES, head_dim=32), glm, glm.Glm4RotaryEmbedding, {"partial": True, "interleaved": True}),
    (Cohere2Config(**SIZES), cohere, cohere.Cohere2RotaryEmbedding, {"interleaved": True}),
]


@pytest.mark.parametrize(("config", "module", "kind", "options"), CASES)
def test_queries_are_rotated_as_in_transformers(config, module, kind, options):
    rope, reference = rope_of(config, **options), kind(config)
    for length in (20, 64, 200):
        positions = np.arange(length)[None]
        q = RANDOM.normal(size=(1, length, 3, 32)).astype(np.float32)
        cos, sin = reference(torch.tensor(q), torch.tensor(positions))
        expected, _ = module.apply_rotary_pos_emb(torch.tensor(q), torch.tensor(q), cos, sin, unsqueeze_dim=2)
        angles = rope.angles(jnp.asarray(positions), jnp.full((1, 1), length))
        assert np.allclose(rotate(jnp.asarray(q), angles, rope.interleaved), expected, atol=1e-4)


def test_each_text_has_its_own_length():
    positions = jnp.array([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]])
    real = jnp.array([[1] * 6, [1] * 4 + [0] * 2, [0] * 2 + [1] * 4]) > 0
    assert text_lengths(positions, real)[0].tolist() == [3, 3, 3, 2, 2, 1]
    assert text_lengths(positions, real)[1, :4].tolist() == [4] * 4
    assert text_lengths(positions, real)[2].tolist() == [6] * 6
    assert text_lengths(positions, None)[1].tolist() == [6] * 6


def test_layers_without_positions_rotate_nothing():
    rope = rope_of(CASES[-1][0], interleaved=True)
    q = RANDOM.normal(size=(1, 5, 3, 32)).astype(np.float32)
    assert np.array_equal(rotate(jnp.asarray(q), rope.without_rotation().angles(jnp.arange(5)[None], None), True), q)


@pytest.mark.parametrize(("rope", "message"), [
    ({"rope_type": "yarnn"}, "supported types are default, dynamic"),
    ({"rope_type": "linear"}, "KeyError 'factor'"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, "llama rotates whole heads"),
])
def test_unsupported_rope_parameters_are_rejected(rope, message):
    config = LlamaConfig(**SIZES)
    config.rope_parameters = {"rope_theta": 1e4, **rope}
    with pytest.raises(UserError, match=message):
        rope_of(config)
