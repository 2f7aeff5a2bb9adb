"""The two ends of a decoder: embedding of tokens and positions, and the head that names the next token."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jax_engine.models.architecture import Architecture
from jax_engine.models.dropout import Seeds, dropout
from jax_engine.models.linear import Build, Embedding, vocabulary_logits
from jax_engine.models.names import TOKEN_ROWS


class DecoderEmbedding(nnx.Module):
    """Tokens, and positions unless they are rotary."""

    def __init__(self, arch: Architecture, build: Build, rngs: nnx.Rngs):
        self.arch = arch
        self.tokens = Embedding(arch.vocab_size, arch.hidden_size, rngs, std=arch.init_std, padding_id=arch.padding_id,
                                tokens=build.rows.get("embed.tokens", ()))
        self.positions = Embedding(arch.max_positions, arch.hidden_size, rngs, std=arch.init_std
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

    def __init__(self, arch: Architecture, build: Build, rngs: nnx.Rngs):
        self.build = build
        self.weight = None if arch.tied else nnx.Param(
            arch.init_std * jax.random.normal(rngs.params(), (arch.vocab_size, arch.hidden_size)))
        self.bias = nnx.Param(jnp.zeros(arch.vocab_size)) if arch.head_bias else None
        self.tokens = build.rows.get("embed.tokens" if arch.tied else "head", ())
        if self.tokens and not arch.tied:
            self.trainable_tokens_delta = nnx.Param(jnp.zeros((len(self.tokens), arch.hidden_size)))

    def __call__(self, hidden: Array, embedding: dict[str, Array]) -> Array:
        """[..., V] of hidden states [..., D] and the parameters of the tokens' embedding."""
        if self.weight is None:
            matrix, rows = embedding["weight"], embedding.get(TOKEN_ROWS)
        else:
            matrix, rows = self.weight[...], self.trainable_tokens_delta[...] if self.tokens else None
        logits = vocabulary_logits(hidden, matrix, self.build, self.tokens, rows)
        return logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)
