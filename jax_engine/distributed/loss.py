"""Losses as sums over labelled positions, from hidden states, without ever holding the logits of all positions.

Most positions of a fine-tuning batch carry no label, and the output head is the widest layer of a small model. So the
head is applied to labelled positions only, a chunk at a time. Its gradient is computed in the forward pass where the
loss is a sum over positions, and in the backward pass, from logits made again, where it is a function of their
log-probabilities.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from jax_engine.distributed.interface import constrain
from jax_engine.distributed.lines import (
    chunk_of,
    convert,
    each_group,
    in_rows,
    laid_out,
    lines,
    num_groups,
    places,
    split_over_ranks,
    sums_laid_out,
)
from lmmods.core.labels import IGNORED


class LossSums(NamedTuple):
    """Sums over the scored positions of a batch.

    Args:
        total: Summed loss, scalar float32, differentiable.
        weight: Number of scored positions, each counted by its weight, scalar float32.
        correct: Those of them that the argmax gets right, counted likewise, scalar float32; None unless asked for.
        metrics: Of the task, by name: sum and weight, [2] float32; None where it has none.
    """

    total: Array
    weight: Array
    correct: Array | None = None
    metrics: dict[str, Array] | None = None


def shift_labels(labels: Array) -> Array:
    """Labels [B, T] moved so that position t holds the token it predicts; the last position predicts nothing."""
    return jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED)


def shift_weights(weights: Array | None) -> Array | None:
    """Weights [B, T] of labels, moved as `shift_labels` moves these."""
    return None if weights is None else jnp.pad(weights[:, 1:], ((0, 0), (0, 1)))


def scored_rows(batch: dict[str, Array]) -> Array:
    """[B] bool: which rows carry a label. Rows without one even out batches and count nothing."""
    if "labels" not in batch:
        return batch["start_positions"] != IGNORED
    labels = batch["labels"]
    return (labels != IGNORED).any(tuple(range(1, labels.ndim)))


def token_loss(hidden: Array, targets: Array, head: Callable[[Array], Array], vocab_size: int,
               count_correct: bool = False, plain: bool = False, weights: Array | None = None) -> LossSums:
    """Cross-entropy in float32 of `head(hidden)` against `targets`, over positions that are not IGNORED.

    The time it takes grows with the number of labelled positions, which need not be known when compiling.

    Args:
        hidden: [B, T, D] hidden states, already aligned with `targets`.
        targets: [B, T] token ids or IGNORED.
        head: Maps [..., D] to float32 logits [..., V]; arrays it closes over get their gradient.
        vocab_size: V, which decides the chunk length.
        plain: Make the logits of all positions at once.
        weights: [B, T] float32, how much each position counts; None is 1.
    """
    scored = (targets != IGNORED).astype(jnp.float32)
    weights = scored if weights is None else scored * weights
    if plain:
        total, correct = _cross_entropy(head, count_correct, hidden.reshape(-1, hidden.shape[-1]), (),
                                        targets.reshape(-1), weights.reshape(-1))
        return LossSums(total, weights.sum(), correct if count_correct else None)
    pure_head, way, params = convert(head, hidden, vocab_size)
    found = lines(hidden, params, targets, weights, way)
    total, correct = _chunked_cross_entropy(pure_head, way, count_correct, *found)
    return LossSums(total, weights.sum(), correct if count_correct else None)


def token_log_probs(hidden: Array, targets: Array, head: Callable[[Array], Array], vocab_size: int,
                    plain: bool = False) -> Array:
    """Log-probabilities [B, T] in float32 of `targets` under `head(hidden)`, 0 where these are IGNORED.

    Logits are made a chunk at a time, and once more in the backward pass, where the factor of each is known. Arguments
    as of `token_loss`.
    """
    if plain:
        return -_losses(head, hidden.reshape(-1, hidden.shape[-1]), (), targets.reshape(-1)).reshape(targets.shape)
    pure_head, way, params = convert(head, hidden, vocab_size)
    return _chunked_log_probs(pure_head, way, hidden, params, targets)


def span_loss(logits: Array, batch: dict[str, Array]) -> LossSums:
    """Sum over windows of the mean of start and end cross-entropy over the window's own tokens.

    Args:
        logits: [B, T, 2] of start and end.
        batch: `start_positions`, `end_positions` [B], IGNORED where a window is not scored; `attention_mask` [B, T].
    """
    logits = logits.astype(jnp.float32)
    outside = batch["attention_mask"] == 0
    log_probs = jax.nn.log_softmax(jnp.where(outside[..., None], jnp.finfo(jnp.float32).min, logits), axis=1)
    positions = jnp.stack([batch["start_positions"], batch["end_positions"]], axis=-1)
    picked = jnp.take_along_axis(log_probs, jnp.maximum(positions, 0)[:, None], axis=1)[:, 0]
    total = -jnp.where(positions == IGNORED, 0.0, picked).sum() / 2
    return LossSums(total, (batch["start_positions"] != IGNORED).sum().astype(jnp.float32))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _chunked_cross_entropy(head, way, count_correct, hidden, params, targets, weights, order, num_chunks):
    """(total, correct) of R ranks: `hidden` [R, M, D]; `targets`, `weights`, `order` [R, M'], M' a multiple of the
    chunk.
    """
    def step(number, sums):
        values = each_group(way, lambda h, t, w: _cross_entropy(head, count_correct, h, params, t, w, way.axes))(
            *chunk_of(way, number, hidden, order, targets, weights))
        return jax.tree.map(lambda summed, new: summed + new.sum(), sums, values)

    params = laid_out(params, way)
    return jax.lax.fori_loop(0, num_chunks, step, (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)))


def _forward(head, way, count_correct, hidden, params, targets, weights, order, num_chunks):
    hidden, targets, weights, order, num_chunks = (arg.value for arg in (hidden, targets, weights, order, num_chunks))
    trained = [i for i, p in enumerate(params) if p.perturbed]
    params = laid_out([p.value for p in params], way)
    ranks = len(hidden)

    def loss(h, chosen, t, w):
        mixed = list(params)
        for i, p in zip(trained, chosen, strict=True):
            mixed[i] = p
        return _cross_entropy(head, count_correct, h, mixed, t, w, way.axes)

    differentiate = each_group(way, jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), (0, None, 0, 0))

    def step(number, carry):
        total, correct, by_position, by_param = carry
        h, t, w = chunk_of(way, number, hidden, order, targets, weights)
        (new_total, new_correct), (g_hidden, g_params) = differentiate(h, [params[i] for i in trained], t, w)
        g_hidden = split_over_ranks(g_hidden.reshape(ranks, way.chunk, -1))
        by_position = jax.lax.dynamic_update_slice_in_dim(by_position, g_hidden, number * way.chunk, 1)
        by_param = [summed + new for summed, new in zip(by_param, g_params, strict=True)]
        return total + new_total.sum(), correct + new_correct.sum(), by_position, by_param

    groups = num_groups(way.axes, ranks)
    start = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32),
             split_over_ranks(jnp.zeros((ranks, targets.shape[1], hidden.shape[-1]), hidden.dtype)),
             # a sum for each group, so that groups communicate once, after the loop, and not in each iteration
             [sums_laid_out(jnp.zeros((groups, *params[i].shape), jnp.float32), way) for i in trained])
    total, correct, by_position, by_param = jax.lax.fori_loop(0, num_chunks, step, start)
    g_hidden = jnp.take_along_axis(by_position, places(order, hidden)[..., None], axis=1)
    g_params: list[Array | None] = [None] * len(params)
    for i, summed in zip(trained, by_param, strict=True):
        g_params[i] = summed.sum(0).astype(params[i].dtype)
    return (total, correct), (g_hidden, g_params)


def _backward(head, way, count_correct, gradients, cotangents):
    factor = cotangents[0]
    if isinstance(factor, SymbolicZero):
        return None, None, None, None, None, None
    scaled = jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)
    return *scaled, None, None, None, None


_chunked_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked_log_probs(head, way, hidden, params, targets):
    """[B, T] of hidden states [B, T, D] and targets [B, T]."""
    found = lines(hidden, laid_out(params, way), targets, jnp.zeros(targets.shape), way)

    def step(number, losses):
        h, t = chunk_of(way, number, found.hidden, found.order, found.targets)
        new = each_group(way, lambda h, t: _losses(head, h, found.params, t, way.axes))(h, t)
        new = split_over_ranks(new.reshape(len(losses), way.chunk))
        return jax.lax.dynamic_update_slice_in_dim(losses, new, number * way.chunk, 1)

    losses = jax.lax.fori_loop(0, found.num_chunks, step, split_over_ranks(jnp.zeros(found.targets.shape)))
    return -in_rows(jnp.take_along_axis(losses, places(found.order, found.hidden), axis=1), targets.shape)


def _log_probs_forward(head, way, hidden, params, targets):
    values = [p.value for p in params]
    trained = {i: p.value for i, p in enumerate(params) if p.perturbed}
    log_probs = _chunked_log_probs(head, way, hidden.value, values, targets.value)
    return log_probs, (hidden.value, values, trained, targets.value)


def _log_probs_backward(head, way, kept, cotangent):
    """The gradient of a cross-entropy in which positions weigh what they weigh in the loss."""
    hidden, params, trained, targets = kept
    if isinstance(cotangent, SymbolicZero):
        return None, None, None

    def total(hidden, trained):
        mixed = [trained.get(i, p) for i, p in enumerate(params)]
        weights = jnp.where(targets == IGNORED, 0.0, -cotangent)
        return _chunked_cross_entropy(head, way, False, *lines(hidden, mixed, targets, weights, way))[0]

    g_hidden, g_trained = jax.grad(total, argnums=(0, 1))(hidden, trained)
    return g_hidden, [g_trained.get(i) for i in range(len(params))], None


_chunked_log_probs.defvjp(_log_probs_forward, _log_probs_backward, symbolic_zeros=True)


def _cross_entropy(head, count_correct, hidden, params, targets, weights, axes=()):
    """Summed loss and argmax hits of positions [C, D] with targets and weights [C], 0 where nothing is scored."""
    logits = _logits(head, hidden, params, axes)
    hits = ((logits.argmax(1) == targets) * weights).sum() if count_correct else jnp.zeros((), jnp.float32)
    return jnp.where(weights != 0, _losses_of(logits, targets, axes) * weights, 0.0).sum(), hits


def _losses(head, hidden, params, targets, axes=()):
    """[C], 0 where nothing is scored."""
    return jnp.where(targets == IGNORED, 0.0, _losses_of(_logits(head, hidden, params, axes), targets, axes))


def _logits(head, hidden, params, axes):
    logits = head(hidden, *params)
    return constrain(logits, PartitionSpec(None, axes)) if axes else logits


def _losses_of(logits: Array, targets: Array, axes: tuple[str, ...]) -> Array:
    if axes:  # each device looks for the targets among its own part of the vocabulary
        picked = jnp.where(jnp.arange(logits.shape[1]) == targets[:, None], logits, 0.0).sum(1)
    else:
        picked = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - picked
