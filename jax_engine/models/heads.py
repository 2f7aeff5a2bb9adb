"""Heads: from the network's hidden states to logits over the vocabulary, of labels, or of answer spans.

A head is a class with two steps: `features`, which needs the batch and the dropout seeds, and the call, which does not.
Class attributes describe a head to the rest of the engine.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jax_engine.models.architecture import Architecture, Head, refuse
from jax_engine.models.attention import real_tokens
from jax_engine.models.dropout import Seeds, dropout
from jax_engine.models.linear import (
    ACTIVATIONS,
    Build,
    Linear,
    Norm,
    parameter,
    product,
    soft_cap,
    vocabulary_logits,
)
from jax_engine.models.names import TOKEN_ROWS
from lmmods.core.initialization import Normal

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class OutputHead(nnx.Module):
    """Base class of heads.

    Attributes:
        vocabulary: The logits are over the vocabulary.
        shares_table: The logits always use the embedding's table, also with an adapter.
        generates: The head predicts the next token.
        may_pad_left: Rows may be padded on the left, depending on the tokenizer.
        in_full: Our paths of the modules that train in full alongside an adapter.
        peft_task: PEFT's task type; None if PEFT has none.
    """

    vocabulary: ClassVar[bool] = False
    shares_table: ClassVar[bool] = False
    generates: ClassVar[bool] = False
    may_pad_left: ClassVar[bool] = False
    in_full: ClassVar[tuple[str, ...]] = ()
    peft_task: ClassVar[str | None] = None

    @classmethod
    def num_scores(cls, config: "PreTrainedConfig") -> int:
        """Return the number of scores of a head without a vocabulary.

        Raises:
            UserError: The configuration does not fit the head.
        """
        return config.num_labels

    def features(self, hidden: Array, batch: dict[str, Array], seeds: Seeds | None) -> Array:
        """Return the inputs of the logits, [B, T, D] or pooled [B, D], for hidden states [B, T, D]."""
        return hidden

    @abstractmethod
    def __call__(self, features: Array, embedding: dict[str, Array]) -> Array:
        """Return float32 logits for features [..., D]; `embedding` has the token embedding's parameters."""


class LMHead(OutputHead):
    """Logits [..., V] over the vocabulary, with the embedding's matrix if the two are tied."""

    vocabulary = True
    generates = True
    peft_task = "CAUSAL_LM"

    def __init__(self, arch: Architecture, build: Build):
        self.build, self.scale, self.cap = build, arch.logit_scale, arch.logit_cap
        self.weight = None if arch.tied else parameter((arch.vocab_size, arch.hidden_size), Normal(arch.init_std))
        self.bias = parameter((arch.vocab_size,), 0.0) if arch.head_bias else None
        self.tokens = build.rows.get("embed.tokens" if arch.tied else "head", ())
        if self.tokens and not arch.tied:
            self.trainable_tokens_delta = parameter((len(self.tokens), arch.hidden_size), 0.0)

    def features(self, hidden: Array, batch: dict[str, Array], seeds: Seeds | None) -> Array:
        return hidden.astype(self.build.dtype)  # the product's dtype; casting first halves the communication

    def __call__(self, features: Array, embedding: dict[str, Array]) -> Array:
        if self.weight is None:
            matrix, rows = embedding["weight"], embedding.get(TOKEN_ROWS)
        else:
            matrix, rows = self.weight[...], self.trainable_tokens_delta[...] if self.tokens else None
        logits = vocabulary_logits(features, matrix, self.build, self.tokens, rows)
        logits = logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)
        return soft_cap(logits if self.scale == 1.0 else logits * self.scale, self.cap)


class MLMHead(OutputHead):
    """Masked-LM head of encoders: dense layer, activation, norm, and logits [..., V] from the embedding's table."""

    vocabulary = True
    shares_table = True

    def __init__(self, arch: Architecture, build: Build):
        self.activation, self.build = arch.head_activation, build
        size = arch.embedding_size or arch.hidden_size
        self.dense = Linear(arch.hidden_size, size, "head.dense", build, bias=arch.head_dense_bias,
                            std=arch.head_std or arch.init_std)
        self.norm = Norm(size, arch.norm, arch.norm_eps)
        self.bias = parameter((arch.vocab_size,), 0.0) if arch.head_bias else None

    def __call__(self, features: Array, embedding: dict[str, Array]) -> Array:
        # The whole head runs here, because this is called for masked positions only.
        x = self.norm(ACTIVATIONS[self.activation](self.dense(features)).astype(features.dtype))
        logits = product(x, embedding["weight"], self.build, result=jnp.float32)
        return logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)


class ClassifierHead(OutputHead):
    """Logits of labels, [..., K], for rows or positions; `Classifier` describes it."""

    in_full = ("head", "head.dense", "head.norm")

    def __init__(self, arch: Architecture, build: Build):
        classifier, size = arch.classifier, arch.hidden_size
        self.classifier, self.build = classifier, build
        self.dense = Linear(size, size, "head.dense", build, bias=classifier.dense_bias,
                            std=classifier.dense_std or arch.init_std) if classifier.dense else None
        self.norm = Norm(size, arch.norm, arch.norm_eps) if classifier.norm else None
        self.weight = parameter((classifier.size, size), build.normal(classifier.std or arch.init_std))
        self.bias = parameter((classifier.size,), 0.0) if classifier.bias else None

    def features(self, hidden: Array, batch: dict[str, Array], seeds: Seeds | None) -> Array:
        classifier = self.classifier
        x = pool(hidden, real_tokens(batch), classifier.pooling)
        x = dropout(x, classifier.dense_dropout, seeds, "head.dense")
        y = x if self.dense is None else self.dense(x, seeds)
        y = y if classifier.activation is None else ACTIVATIONS[classifier.activation](y)
        x = y.astype(x.dtype)
        x = x if self.norm is None else self.norm(x)
        return dropout(x, classifier.dropout, seeds, "head")

    def __call__(self, features: Array, embedding: dict[str, Array]) -> Array:
        logits = product(features, self.weight[...], self.build, result=jnp.float32)
        return logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)


def pool(hidden: Array, real: Array, pooling: str | None) -> Array:
    """Return one vector [B, D] per row of hidden states [B, T, D], by `Classifier.pooling`; None returns all.

    Args:
        real: [B, T] bool, False for padding. For decoders, transformers instead takes the last token that is not the
            padding token, which is wrong for rows that end with that token.
    """
    if pooling is None:
        return hidden
    if pooling == "first":
        return hidden[:, 0]
    if pooling == "mean":
        weights = real.astype(jnp.float32)[..., None]
        return ((hidden * weights).sum(1) / weights.sum(1)).astype(hidden.dtype)
    last = real.shape[1] - 1 - jnp.argmax(real[:, ::-1], axis=1)
    return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]


class SequenceHead(ClassifierHead):
    """Scores [B, K] of a row's labels."""

    peft_task = "SEQ_CLS"


class TokenHead(ClassifierHead):
    """Scores [B, T, K] of labels at each position."""

    peft_task = "TOKEN_CLS"


class ChoiceHead(ClassifierHead):
    """One score [B, 1] per row, to compare with other rows."""

    @classmethod
    def num_scores(cls, config: "PreTrainedConfig") -> int:
        return 1


class SpanHead(ClassifierHead):
    """Logits [B, T, 2] of an answer's start and end at each position."""

    may_pad_left = True
    in_full = ("head",)
    peft_task = "QUESTION_ANS"

    @classmethod
    def num_scores(cls, config: "PreTrainedConfig") -> int:
        refuse(config, num_labels=2)
        return 2


HEADS: dict[Head, type[OutputHead]] = {
    "causal": LMHead, "masked": MLMHead, "qa": SpanHead, "sequence": SequenceHead, "token": TokenHead,
    "choice": ChoiceHead}
