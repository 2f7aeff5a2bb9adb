"""The two ends of an encoder: embeddings with their norm, and the heads for masked tokens and answer spans."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jax_engine.models.architecture import Architecture
from jax_engine.models.dropout import Seeds, dropout
from jax_engine.models.linear import ACTIVATIONS, Build, Embedding, Linear, Norm, product
from jax_engine.models.parameters import parameter
from jax_engine.models.relative import Table


class EncoderEmbedding(nnx.Module):
    """Tokens, types, and positions unless they are rotary, normed; widened where the tables are narrower."""

    def __init__(self, arch: Architecture, build: Build):
        self.arch = arch
        size = arch.embedding_size or arch.hidden_size
        self.tokens = Embedding(arch.vocab_size, size, std=arch.init_std, padding_id=arch.padding_id,
                                tokens=build.rows.get("embed.tokens", ()), cut=build.cut)
        self.positions = Embedding(
            arch.max_positions, size, std=arch.init_std, padding_id=arch.padding_id if arch.positions_after_padding
            else None) if arch.positions == "learned" else None
        if arch.sinusoid_init:
            self.positions.weight = parameter((arch.max_positions, size), interleaved_sinusoids)
        self.relative = Embedding(2 * arch.relative.span, arch.hidden_size, std=arch.init_std
                                  ) if arch.relative else None
        self.relative_norm = Norm(arch.hidden_size, arch.norm, arch.norm_eps
                                  ) if arch.relative and arch.relative.normed else None
        self.types = Embedding(arch.num_types, size, std=arch.init_std) if arch.num_types else None
        self.norm = Norm(size, arch.norm, arch.norm_eps)
        self.conv = Neighbours(arch, build) if arch.convolution else None
        self.conv_norm = Norm(arch.hidden_size, arch.norm, arch.norm_eps) if arch.convolution else None
        self.project = Linear(size, arch.hidden_size, "embed.project", build, std=arch.init_std
                              ) if arch.embedding_size else None

    def __call__(self, batch: dict[str, Array], position_ids: Array, seeds: Seeds | None) -> Array:
        """Residual stream [B, T, D] at the bottom."""
        x = self.tokens(batch["input_ids"])
        x = x if self.positions is None else x + self.positions(position_ids)
        if self.types is not None:
            x = x + self.types(batch.get("token_type_ids", jnp.zeros_like(batch["input_ids"])))
        x = dropout(self.norm(x), self.arch.embedding_dropout, seeds, "embed")
        return x if self.project is None else self.project(x, seeds).astype(x.dtype)

    def beside_first(self, x: Array, real: Array, seeds: Seeds | None) -> Callable[[Array], Array]:
        """What the residual stream goes through after the first layer: the convolution of these embeddings is added.

        Args:
            real: [B, T] which tokens are not padding; of the others nothing is read, and zeros are left.
        """
        real = real[..., None].astype(x.dtype)
        found = dropout(self.conv(x * real) * real, self.arch.residual_dropout, seeds, "embed.conv")
        found = ACTIVATIONS[self.arch.convolution.activation](found)
        return lambda x: self.conv_norm(x + found) * real

    def places(self, length: int) -> Table:
        """Relative positions in rows of this length."""
        rows = self.relative.weight[...]
        rows = rows if self.relative_norm is None else self.relative_norm(rows)
        return Table(rows, jnp.asarray(self.arch.relative.buckets(length)))


class Neighbours(nnx.Module):
    """A convolution over the tokens of a row, [B, T, D] of [B, T, D]; the weight is torch's, [out, in, width]."""

    def __init__(self, arch: Architecture, build: Build):
        self.build, self.groups = build, arch.convolution.groups
        size, width = arch.hidden_size, arch.convolution.width
        self.weight = parameter((size, size // self.groups, width), build.normal(arch.init_std))
        self.bias = parameter((size,), 0.0)

    def __call__(self, x: Array) -> Array:
        # As a product of matrices: of XLA's convolution over parts of rows the gradient was wrong on some meshes.
        dtype, (batch, length, size) = self.build.dtype, x.shape
        weight = self.weight[...].astype(dtype).reshape(self.groups, size // self.groups, *self.weight.shape[1:])
        room = weight.shape[-1] // 2
        padded = jnp.pad(x.astype(dtype), ((0, 0), (room, room), (0, 0))).reshape(batch, -1, self.groups,
                                                                               size // self.groups)
        near = jnp.stack([padded[:, start:start + length] for start in range(weight.shape[-1])], axis=-1)
        found = jnp.einsum("btgiw,goiw->btgo", near, weight).reshape(x.shape)
        return (found + self.bias[...].astype(dtype)).astype(x.dtype)


def interleaved_sinusoids(num: int, size: int) -> np.ndarray:
    """Sine and cosine of each frequency side by side: [num, size] (Vaswani et al. 2017)."""
    angles = np.arange(num)[:, None] / np.power(10000, 2 * (np.arange(size) // 2) / size)
    return np.where(np.arange(size) % 2 == 0, np.sin(angles), np.cos(angles)).astype(np.float32)


class EncoderHead(nnx.Module):
    """What an encoder's head begins with: dense layer, activation, norm."""

    def __init__(self, arch: Architecture, build: Build, size: int):
        self.activation, self.build = arch.head_activation, build
        self.dense = Linear(arch.hidden_size, size, "head.dense", build, bias=arch.head_dense_bias,
                            std=arch.head_std or arch.init_std)
        self.norm = Norm(size, arch.norm, arch.norm_eps)

    def transformed(self, hidden: Array, seeds: Seeds | None = None) -> Array:
        """[..., size] of hidden states [..., D]."""
        return self.norm(ACTIVATIONS[self.activation](self.dense(hidden, seeds)).astype(hidden.dtype))


class MLMHead(EncoderHead):
    """Then the embedding's table and a bias: float32 logits over the vocabulary."""

    def __init__(self, arch: Architecture, build: Build):
        super().__init__(arch, build, arch.embedding_size or arch.hidden_size)
        self.bias = parameter((arch.vocab_size,), 0.0) if arch.head_bias else None

    def __call__(self, hidden: Array, embedding: dict[str, Array]) -> Array:
        """[..., V] of hidden states [..., D] and the parameters of the tokens' embedding, a table [V, E]."""
        logits = product(self.transformed(hidden), embedding["weight"], self.build, result=jnp.float32)
        return logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)


class SpanHead(EncoderHead):
    """Logits of an answer's start and end at each position, float32 [..., 2]; of few families after a dense layer."""

    def __init__(self, arch: Architecture, build: Build):
        self.arch, self.build = arch, build
        if arch.qa_dense:
            super().__init__(arch, build, arch.hidden_size)
        self.weight = parameter((2, arch.hidden_size), build.normal(arch.qa_std or arch.init_std))
        self.bias = parameter((2,), 0.0)

    def features(self, hidden: Array, seeds: Seeds | None) -> Array:
        """What the logits are made of, [B, T, D] as the hidden states."""
        hidden = self.transformed(hidden, seeds) if self.arch.qa_dense else hidden
        return dropout(hidden, self.arch.qa_dropout, seeds, "head")

    def __call__(self, features: Array, embedding: dict[str, Array]) -> Array:
        logits = product(features, self.weight[...], self.build, result=jnp.float32)
        return logits + self.bias[...].astype(jnp.float32)
