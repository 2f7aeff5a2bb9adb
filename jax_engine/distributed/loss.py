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

from jax_engine.distributed.interface import DATA_AXES, SEQUENCE, constrain, num_sequence_parts, num_visible_ranks
from jax_engine.distributed.target import target
from lmmods.core.labels import IGNORED

# The float32 logits of one chunk take about this many bytes on each device. Each chunk reads the head's weights anew,
# and where they train also their gradient, which on GPUs costs more than the memory.
CHUNK_BYTES = 32 * 2**20
CHUNK_BYTES_GPU = 256 * 2**20


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
    lines = _lines(hidden, targets, weights, vocab_size)
    pure_head, params = jax.closure_convert(head, lines.hidden[0, :lines.chunk])
    total, correct = _chunked_cross_entropy(pure_head, lines.chunk, count_correct, lines.hidden, params, lines.targets,
                                            lines.weights, lines.order, lines.num_chunks)
    return LossSums(total, weights.sum(), correct if count_correct else None)


def token_log_probs(hidden: Array, targets: Array, head: Callable[[Array], Array], vocab_size: int,
                    plain: bool = False) -> Array:
    """Log-probabilities [B, T] in float32 of `targets` under `head(hidden)`, 0 where these are IGNORED.

    Logits are made a chunk at a time, and once more in the backward pass, where the factor of each is known. Arguments
    as of `token_loss`.
    """
    if plain:
        return -_losses(head, hidden.reshape(-1, hidden.shape[-1]), (), targets.reshape(-1)).reshape(targets.shape)
    chunk = _chunk_length(targets, vocab_size)
    pure_head, params = jax.closure_convert(head, hidden.reshape(-1, hidden.shape[-1])[:chunk])
    return _chunked_log_probs(pure_head, vocab_size, hidden, params, targets)


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


class _Lines(NamedTuple):
    """Positions of R ranks, each rank's in one line; the line of M is continued to M', a multiple of the chunk.

    Where rows are cut along the sequence, each part of a rank's rows is a line of its own.

    Args:
        hidden: [R, M, D], in the order of the batch.
        targets: [R, M'], the labelled ones first; `weights` likewise.
        order: [R, M'] places in `hidden` of the targets.
        num_chunks: How many chunks hold labels.
    """

    hidden: Array
    targets: Array
    weights: Array
    order: Array
    chunk: int
    num_chunks: Array


def _lines(hidden: Array, targets: Array, weights: Array, vocab_size: int) -> _Lines:
    """Of rows [B, T]; they stay on their rank."""
    hidden, targets, weights = (_split_over_ranks(_in_lines(x)) for x in (hidden, targets, weights))
    order = jnp.argsort(targets == IGNORED, axis=1, stable=True)
    chunk = _chunk_length(targets, vocab_size)
    pad = ((0, 0), (0, -targets.shape[1] % chunk))
    return _Lines(hidden, jnp.pad(jnp.take_along_axis(targets, order, axis=1), pad, constant_values=IGNORED),
                  jnp.pad(jnp.take_along_axis(weights, order, axis=1), pad), jnp.pad(order, pad), chunk,
                  -(-(targets != IGNORED).sum(1).max() // chunk))


def _chunk_length(targets: Array, vocab_size: int) -> int:
    """Positions whose logits are made at once, of each rank; `targets` are those of all visible ranks."""
    chunk_bytes = CHUNK_BYTES if target().platform == "cpu" else CHUNK_BYTES_GPU
    return min(max(chunk_bytes // (4 * vocab_size), 1), targets.size // (num_visible_ranks() * num_sequence_parts()))


def _in_lines(x: Array) -> Array:
    """[R, M, ...] of rows [B, T, ...]."""
    parts = num_sequence_parts()
    if parts == 1:
        return x.reshape(num_visible_ranks(), -1, *x.shape[2:])
    rows = x.reshape(num_visible_ranks(), -1, parts, x.shape[1] // parts, *x.shape[2:])
    return rows.swapaxes(1, 2).reshape(num_visible_ranks() * parts, -1, *x.shape[2:])


def _in_rows(x: Array, shape: tuple[int, ...]) -> Array:
    """Undo `_in_lines`: [R, M] to [B, T]."""
    parts = num_sequence_parts()
    if parts == 1:
        return x.reshape(shape)
    return x.reshape(num_visible_ranks(), parts, -1, shape[1] // parts).swapaxes(1, 2).reshape(shape)


def _split_over_ranks(x: Array) -> Array:
    return constrain(x, PartitionSpec((*DATA_AXES, SEQUENCE) if num_sequence_parts() > 1 else DATA_AXES))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _chunked_cross_entropy(head, chunk, count_correct, hidden, params, targets, weights, order, num_chunks):
    """(total, correct) of R ranks: `hidden` [R, M, D]; `targets`, `weights`, `order` [R, M'], M' a multiple of `chunk`.
    """
    def step(number, sums):
        start = number * chunk
        values = jax.vmap(lambda h, t, w: _cross_entropy(head, count_correct, h, params, t, w))(
            _take(hidden, order, start, chunk), *_chunk_of(start, chunk, targets, weights))
        return jax.tree.map(lambda summed, new: summed + new.sum(), sums, values)

    params = _gathered(params)
    return jax.lax.fori_loop(0, num_chunks, step, (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)))


def _forward(head, chunk, count_correct, hidden, params, targets, weights, order, num_chunks):
    hidden, targets, weights, order, num_chunks = (arg.value for arg in (hidden, targets, weights, order, num_chunks))
    trained = [i for i, p in enumerate(params) if p.perturbed]
    params = _gathered([p.value for p in params])
    ranks = len(hidden)

    def loss(h, chosen, t, w):
        mixed = list(params)
        for i, p in zip(trained, chosen, strict=True):
            mixed[i] = p
        return _cross_entropy(head, count_correct, h, mixed, t, w)

    differentiate = jax.vmap(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), in_axes=(0, None, 0, 0))

    def step(number, carry):
        total, correct, by_position, by_param = carry
        start = number * chunk
        (new_total, new_correct), (g_hidden, g_params) = differentiate(
            _take(hidden, order, start, chunk), [params[i] for i in trained],
            *_chunk_of(start, chunk, targets, weights))
        by_position = jax.lax.dynamic_update_slice_in_dim(by_position, g_hidden, start, 1)
        by_param = [summed + new for summed, new in zip(by_param, g_params, strict=True)]
        return total + new_total.sum(), correct + new_correct.sum(), by_position, by_param

    start = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32),
             _split_over_ranks(jnp.zeros((ranks, targets.shape[1], hidden.shape[-1]), hidden.dtype)),
             # a sum for each rank, so that devices communicate once, after the loop, and not in each iteration
             [_split_over_ranks(jnp.zeros((ranks, *params[i].shape), jnp.float32)) for i in trained])
    total, correct, by_position, by_param = jax.lax.fori_loop(0, num_chunks, step, start)
    g_hidden = jnp.take_along_axis(by_position, _places(order, hidden)[..., None], axis=1)
    g_params: list[Array | None] = [None] * len(params)
    for i, summed in zip(trained, by_param, strict=True):
        g_params[i] = summed.sum(0).astype(params[i].dtype)
    return (total, correct), (g_hidden, g_params)


def _backward(head, chunk, count_correct, gradients, cotangents):
    factor = cotangents[0]
    if isinstance(factor, SymbolicZero):
        return None, None, None, None, None, None
    scaled = jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)
    return *scaled, None, None, None, None


_chunked_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked_log_probs(head, vocab_size, hidden, params, targets):
    """[B, T] of hidden states [B, T, D] and targets [B, T]."""
    lines, params = _lines(hidden, targets, (targets != IGNORED).astype(jnp.float32), vocab_size), _gathered(params)

    def step(number, losses):
        start = number * lines.chunk
        new = jax.vmap(lambda h, t: _losses(head, h, params, t))(
            _take(lines.hidden, lines.order, start, lines.chunk), *_chunk_of(start, lines.chunk, lines.targets))
        return jax.lax.dynamic_update_slice_in_dim(losses, new, start, 1)

    losses = jax.lax.fori_loop(0, lines.num_chunks, step, _split_over_ranks(jnp.zeros(lines.targets.shape)))
    return -_in_rows(jnp.take_along_axis(losses, _places(lines.order, lines.hidden), axis=1), targets.shape)


def _log_probs_forward(head, vocab_size, hidden, params, targets):
    values = [p.value for p in params]
    trained = {i: p.value for i, p in enumerate(params) if p.perturbed}
    log_probs = _chunked_log_probs(head, vocab_size, hidden.value, values, targets.value)
    return log_probs, (hidden.value, values, trained, targets.value)


def _log_probs_backward(head, vocab_size, kept, cotangent):
    """The gradient of a cross-entropy in which positions weigh what they weigh in the loss."""
    hidden, params, trained, targets = kept
    if isinstance(cotangent, SymbolicZero):
        return None, None, None

    def total(hidden, trained):
        mixed = [trained.get(i, p) for i, p in enumerate(params)]
        return token_loss(hidden, targets, lambda h: head(h, *mixed), vocab_size, weights=-cotangent).total

    g_hidden, g_trained = jax.grad(total, argnums=(0, 1))(hidden, trained)
    return g_hidden, [g_trained.get(i) for i in range(len(params))], None


_chunked_log_probs.defvjp(_log_probs_forward, _log_probs_backward, symbolic_zeros=True)


def _cross_entropy(head, count_correct, hidden, params, targets, weights):
    """Summed loss and argmax hits of positions [C, D] with targets and weights [C], 0 where nothing is scored."""
    logits = head(hidden, *params)
    hits = ((logits.argmax(1) == targets) * weights).sum() if count_correct else jnp.zeros((), jnp.float32)
    return jnp.where(weights != 0, _losses_of(logits, targets) * weights, 0.0).sum(), hits


def _losses(head, hidden, params, targets):
    """[C], 0 where nothing is scored."""
    return jnp.where(targets == IGNORED, 0.0, _losses_of(head(hidden, *params), targets))


def _losses_of(logits: Array, targets: Array) -> Array:
    picked = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - picked


def _places(order: Array, hidden: Array) -> Array:
    """[R, M]: where in its line each position of `hidden` [R, M, D] stands."""
    return jnp.argsort(order[:, : hidden.shape[1]], axis=1)


def _take(hidden: Array, order: Array, start: Array, chunk: int) -> Array:
    places = jax.lax.dynamic_slice_in_dim(order, start, chunk, 1)
    return jnp.take_along_axis(hidden, places[..., None], axis=1)


def _chunk_of(start: Array, chunk: int, *columns: Array) -> list[Array]:
    return [jax.lax.dynamic_slice_in_dim(column, start, chunk, 1) for column in columns]


def _gathered(params: list[Array]) -> list[Array]:
    """Sharded weights gathered (all-gather) once before the loop instead of in each iteration."""
    return [constrain(p, PartitionSpec()) for p in params]
