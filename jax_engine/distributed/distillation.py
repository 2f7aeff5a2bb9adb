"""Divergence of a student's distributions over tokens from a teacher's, mixed with the cross-entropy of the labels."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_engine.distributed.loss import LossSums, cross_entropies, sum_over_positions
from lmmods.core.hardware import Target
from lmmods.core.settings import LEAST, NOTHING, Divergence, TokenLoss


class TeacherStates(NamedTuple):
    """A teacher's hidden states and head. Carries no gradient.

    Args:
        hidden: [B, T, D'] hidden states.
        head: Maps [..., D'] to float32 logits [..., V'].
        is_sampled: [B, T] float32, 1 where the student has sampled the token to predict, else 0. None: 0 everywhere.
    """

    hidden: Array
    head: Callable[[Array], Array]
    is_sampled: Array | None = None


class TeacherTopK(NamedTuple):
    """A teacher's k most likely tokens; all other tokens count as one.

    Args:
        ids: [B, T, k] tokens, or [C, k].
        logps: [B, T, k + 1] or [C, k + 1] float32, log-probability of each, and of the others together.
        size: Number of tokens in the distributions.
    """

    ids: Array
    logps: Array
    size: int


def distillation_loss(hidden: Array, targets: Array, head: Callable[[Array], Array], vocab_size: int,
                      count_correct: bool = False, plain: bool = False, weights: Array | None = None,
                      on: Target | None = None, form: TokenLoss = TokenLoss(), *, divergence: Divergence,
                      teacher: TeacherStates | TeacherTopK) -> LossSums:
    """Mix the cross-entropy of `token_loss` with the divergence from a teacher; `metrics` has the sums of both.

    For tokens that the student has sampled, the loss is the divergence alone, without cross-entropy. Both come from the
    same logits: the output head is the largest product of a small model, and a second pass would repeat it.

    Args:
        divergence: The divergence and its ratio in the loss; `metrics` has its `metric_names`.
        teacher: Aligned with `targets`.

    See `token_loss` for the other arguments.
    """
    has_states, is_sampled = isinstance(teacher, TeacherStates), None
    if has_states:
        is_sampled, size = teacher.is_sampled, hidden.shape[-1]
        both_hidden = jnp.concatenate([hidden, jax.lax.stop_gradient(teacher.hidden).astype(hidden.dtype)], -1)

        def both_heads(x: Array) -> tuple[Array, Array]:
            return head(x[..., :size]), jax.lax.stop_gradient(teacher.head(jax.lax.stop_gradient(x[..., size:])))
    is_sampled = jnp.zeros(targets.shape) if is_sampled is None else is_sampled

    def compute(outputs, targets, columns, axes):
        is_sampled, *top_k = columns
        logits, expected = outputs if has_states else (outputs, TeacherTopK(*top_k, teacher.size))
        losses, divergences = cross_entropies(logits, targets, axes, form), compare(logits, expected, divergence)
        fraction = divergence.ratio + (1 - divergence.ratio) * is_sampled[:, 0]
        mixed = fraction * divergences + (1 - fraction) * losses
        return mixed, divergences, (1 - is_sampled[:, 0]) * losses, is_sampled[:, 0]

    columns = (is_sampled[..., None], *(() if has_states else (teacher.ids, teacher.logps)))
    sums, parts = sum_over_positions(compute, 4, both_hidden if has_states else hidden, targets, columns,
                                     both_heads if has_states else head, vocab_size, count_correct, plain, weights, on)
    # Tokens that the student has sampled have no cross-entropy, so they do not count in its mean.
    counts = (sums.weight, sums.weight - parts[2], sums.weight)
    pairs = [jnp.stack(pair) for pair in zip(parts, counts, strict=True)]
    return sums._replace(metrics=dict(zip(divergence.metric_names, pairs, strict=False)))


def compare(logits: Array, teacher: Array | TeacherTopK, form: Divergence) -> Array:
    """Return the divergence [C] of a student's logits [C, V] from a teacher's [C, V'], or from its top k.

    Columns that only one of them has are padding of its vocabulary, and ignored.
    """
    if isinstance(teacher, TeacherTopK):
        student = group_others(jax.nn.log_softmax(logits[:, : teacher.size] / form.temperature), teacher.ids)
        expected = jnp.maximum(teacher.logps, LEAST)
    else:
        size = min(logits.shape[-1], teacher.shape[-1])
        student, expected = (jax.nn.log_softmax(x[:, :size] / form.temperature) for x in (logits, teacher))
    beta = form.beta
    if beta == 0:
        return (jnp.exp(expected) * (expected - student)).sum(-1)
    if beta == 1:
        return (jnp.exp(student) * (student - expected)).sum(-1)
    mixture = jnp.logaddexp(student + math.log1p(-beta), expected + math.log(beta))
    return (beta * jnp.exp(expected) * (expected - mixture)
            + (1 - beta) * jnp.exp(student) * (student - mixture)).sum(-1)


def group_others(log_probs: Array, ids: Array) -> Array:
    """Return log-probabilities [C, k + 1] of the tokens `ids` [C, k], and of all others together, from all [C, V]."""
    rows = jnp.arange(len(ids))[:, None]
    others = jax.nn.logsumexp(log_probs.at[rows, ids].set(NOTHING), axis=-1, keepdims=True)
    return jnp.maximum(jnp.concatenate([jnp.take_along_axis(log_probs, ids, axis=1), others], 1), LEAST)
