"""The two ends of an encoder: embeddings with their norm, and the heads for masked tokens and answer spans."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jax_engine.models.architecture import Architecture
from jax_engine.models.dropout import Seeds, dropout
from jax_engine.models.linear import ACTIVATIONS, Build, Embedding, Linear, Norm, product
from jax_engine.models.parameters import parameter
from lmmods.core.initialization import Normal


class EncoderEmbedding(nnx.Module):
    """Tokens, positions and types, normed; widened where the tables are narrower than the network."""

    def __init__(self, arch: Architecture, build: Build):
        self.arch = arch
        size = arch.embedding_size or arch.hidden_size
        self.tokens = Embedding(arch.vocab_size, size, std=arch.init_std, padding_id=arch.padding_id,
                                tokens=build.rows.get("embed.tokens", ()))
        self.positions = Embedding(arch.max_positions, size, std=arch.init_std,
                                   padding_id=arch.padding_id if arch.positions_after_padding else None)
        if arch.sinusoid_init:
            self.positions.weight = parameter((arch.max_positions, size), interleaved_sinusoids)
        self.types = Embedding(arch.num_types, size, std=arch.init_std) if arch.num_types else None
        self.norm = Norm(size, arch.norm, arch.norm_eps)
        self.project = Linear(size, arch.hidden_size, "embed.project", build, std=arch.init_std
                              ) if arch.embedding_size else None

    def __call__(self, batch: dict[str, Array], position_ids: Array, seeds: Seeds | None) -> Array:
        """Residual stream [B, T, D] at the bottom."""
        x = self.tokens(batch["input_ids"]) + self.positions(position_ids)
        if self.types is not None:
            x = x + self.types(batch.get("token_type_ids", jnp.zeros_like(batch["input_ids"])))
        x = dropout(self.norm(x), self.arch.embedding_dropout, seeds, "embed")
        return x if self.project is None else self.project(x, seeds).astype(x.dtype)


def interleaved_sinusoids(num: int, size: int) -> np.ndarray:
    """Sine and cosine of each frequency side by side: [num, size] (Vaswani et al. 2017)."""
    angles = np.arange(num)[:, None] / np.power(10000, 2 * (np.arange(size) // 2) / size)
    return np.where(np.arange(size) % 2 == 0, np.sin(angles), np.cos(angles)).astype(np.float32)


class MLMHead(nnx.Module):
    """Dense layer, activation, norm, then the embedding's table and a bias: float32 logits over the vocabulary."""

    def __init__(self, arch: Architecture, build: Build):
        size = arch.embedding_size or arch.hidden_size
        self.activation, self.build = arch.head_activation, build
        self.dense = Linear(arch.hidden_size, size, "head.dense", build, std=arch.init_std)
        self.norm = Norm(size, arch.norm, arch.norm_eps)
        self.bias = parameter((arch.vocab_size,), 0.0)

    def __call__(self, hidden: Array, embedding: dict[str, Array]) -> Array:
        """[..., V] of hidden states [..., D] and the parameters of the tokens' embedding, a table [V, E]."""
        x = self.norm(ACTIVATIONS[self.activation](self.dense(hidden)).astype(hidden.dtype))
        return product(x, embedding["weight"], self.build, result=jnp.float32) + self.bias[...].astype(jnp.float32)


class SpanHead(nnx.Module):
    """Logits of an answer's start and end at each position, float32 [..., 2]."""

    def __init__(self, arch: Architecture, build: Build):
        self.build = build
        self.weight = parameter((2, arch.hidden_size), Normal(arch.init_std))
        self.bias = parameter((2,), 0.0)

    def __call__(self, hidden: Array, embedding: dict[str, Array]) -> Array:
        logits = product(hidden, self.weight[...], self.build, result=jnp.float32)
        return logits + self.bias[...].astype(jnp.float32)
