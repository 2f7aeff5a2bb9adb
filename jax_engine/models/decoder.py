"""The two ends of a decoder: embedding of tokens and positions, and the head that names the next token."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jax_engine.models.architecture import Architecture
from jax_engine.models.dropout import Seeds, dropout
from jax_engine.models.linear import Build, Embedding, capped, vocabulary_logits
from jax_engine.models.names import TOKEN_ROWS
from jax_engine.models.parameters import parameter
from lmmods.core.initialization import Normal


class DecoderEmbedding(nnx.Module):
    """Tokens, and positions unless they are rotary."""

    def __init__(self, arch: Architecture, build: Build):
        self.arch = arch
        self.tokens = Embedding(arch.vocab_size, arch.hidden_size, std=arch.init_std, padding_id=arch.padding_id,
                                tokens=build.rows.get("embed.tokens", ()))
        self.positions = Embedding(arch.max_positions, arch.hidden_size, std=arch.init_std
                                   ) if arch.positions == "learned" else None

    def __call__(self, batch: dict[str, Array], position_ids: Array, seeds: Seeds | None) -> Array:
        """Residual stream [B, T, D] at the bottom."""
        x = self.tokens(batch["input_ids"])
        x = x * jnp.asarray(self.arch.embedding_scale, x.dtype)
        if self.positions is not None:
            x = x + self.positions(position_ids)
        if self.arch.positions == "sinusoid":
            x = x + jnp.asarray(sinusoids(self.arch), x.dtype)[position_ids]
        return dropout(x, self.arch.embedding_dropout, seeds, "embed")


def sinusoids(arch: Architecture) -> np.ndarray:
    """Sines of all frequencies, then cosines of all: [max_positions, hidden_size] float32 (Keskar et al. 2019)."""
    size = arch.hidden_size
    rates = 1 / np.float32(10000) ** (np.arange(0, size, dtype=np.float32) // 2 * 2 / np.float32(size))
    angles = np.arange(arch.max_positions, dtype=np.float32)[:, None] * rates
    return np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], axis=1)


class LMHead(nnx.Module):
    """Logits over the vocabulary in float32; the matrix is the embedding's where the two are tied."""

    def __init__(self, arch: Architecture, build: Build):
        self.build, self.scale, self.cap = build, arch.logit_scale, arch.logit_cap
        self.weight = None if arch.tied else parameter((arch.vocab_size, arch.hidden_size), Normal(arch.init_std))
        self.bias = parameter((arch.vocab_size,), 0.0) if arch.head_bias else None
        self.tokens = build.rows.get("embed.tokens" if arch.tied else "head", ())
        if self.tokens and not arch.tied:
            self.trainable_tokens_delta = parameter((len(self.tokens), arch.hidden_size), 0.0)

    def __call__(self, hidden: Array, embedding: dict[str, Array]) -> Array:
        """[..., V] of hidden states [..., D] and the parameters of the tokens' embedding."""
        if self.weight is None:
            matrix, rows = embedding["weight"], embedding.get(TOKEN_ROWS)
        else:
            matrix, rows = self.weight[...], self.trainable_tokens_delta[...] if self.tokens else None
        logits = vocabulary_logits(hidden, matrix, self.build, self.tokens, rows)
        logits = logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)
        return capped(logits if self.scale == 1.0 else logits * self.scale, self.cap)
