"""Losses as sums over labelled positions, computed from hidden states without materialising all logits.

Most positions of a fine-tuning batch have no label, and the output head is the widest layer of a small model. So the
head is applied to labelled positions only, one chunk at a time. If the loss is a sum over positions, gradients are
computed in the forward pass, together with the loss. If it is a function of log-probabilities, they are computed in the
backward pass, from recomputed logits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from jax_engine.distributed.interface import (
    DATA_AXES,
    SEQUENCE,
    constrain,
    context_parallel_size,
    num_visible_ranks,
    on_mesh,
)
from jax_engine.distributed.mesh import partition
from jax_engine.distributed.target import target
from lmmods.core.hardware import Target
from lmmods.core.labels import IGNORED
from lmmods.core.memory import CHUNK_BYTES, CHUNK_BYTES_GPU, MIN_CHUNK
from lmmods.core.settings import TokenLoss


class LossSums(NamedTuple):
    """Sums over the target positions of a batch.

    Args:
        total: Summed loss, scalar float32, differentiable.
        weight: Summed weight of the positions (their number, if unweighted), scalar float32.
        correct: Summed weight of positions whose argmax is the target, scalar float32; None unless requested.
        metrics: The task's metrics by name: sum and weight, [2] float32; None if it has none.
    """

    total: Array
    weight: Array
    correct: Array | None = None
    metrics: dict[str, Array] | None = None


def shift_labels(labels: Array) -> Array:
    """Shift labels [B, T] left, so that position t has the token it predicts; the last position becomes IGNORED."""
    return jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED)


def shift_weights(weights: Array | None) -> Array | None:
    """Shift label weights [B, T] like `shift_labels`."""
    return None if weights is None else jnp.pad(weights[:, 1:], ((0, 0), (0, 1)))


# Columns with a row's labels. A padding row has IGNORED there, or NaN in floating-point columns.
LABELS = ("labels", "start_positions", "end_positions", "margin")


def no_label(dtype: np.dtype) -> float:
    """Return the value of padding rows in a column of `LABELS` of this dtype."""
    return np.nan if jnp.issubdtype(dtype, jnp.floating) else IGNORED


def is_label(values: Array) -> Array:
    """Return bool in the shape of a column of `LABELS`, False for `no_label`."""
    return ~jnp.isnan(values) if jnp.issubdtype(values.dtype, jnp.floating) else values != IGNORED


def scored_rows(batch: dict[str, Array]) -> Array:
    """Return [B] bool, True for rows with a label. The others are padding and do not count."""
    labels = next(batch[name] for name in LABELS if name in batch)
    return is_label(labels).any(tuple(range(1, labels.ndim)))


def token_loss(hidden: Array, targets: Array, head: Callable[[Array], Array], vocab_size: int,
               count_correct: bool = False, plain: bool = False, weights: Array | None = None,
               on: Target | None = None, form: TokenLoss = TokenLoss()) -> LossSums:
    """Return the float32 cross-entropy of `head(hidden)` against `targets`, over positions that are not IGNORED.

    Run time is proportional to the number of labelled positions, which may be unknown at compile time.

    Args:
        hidden: [B, T, D] hidden states, already aligned with `targets`.
        targets: [B, T] token ids or IGNORED.
        head: Maps [..., D] to float32 logits [..., V]. Arrays it closes over receive gradients.
        vocab_size: V, which determines the chunk length.
        plain: Compute the logits of all positions at once.
        weights: [B, T] float32 weight of each position. Default: 1.
        on: The `target`, which determines the chunk length.
        form: Changes of the cross-entropy.
    """
    return sum_over_positions(partial(_plain_cross_entropy, form), 1, hidden, targets, (), head, vocab_size,
                              count_correct, plain, weights, on)[0]


def _plain_cross_entropy(form: TokenLoss, logits: Array, targets: Array, _columns: Any, axes: tuple[str, ...]
                         ) -> tuple[Array]:
    return (cross_entropies(logits, targets, axes, form),)


def sum_over_positions(compute: Callable[..., tuple[Array, ...]], num_values: int, hidden: Array, targets: Array,
                       columns: Any, head: Callable[[Array], Any], vocab_size: int, count_correct: bool, plain: bool,
                       weights: Array | None, on: Target | None) -> tuple[LossSums, list[Array]]:
    """Sum values over the labelled positions. Return the first value's sum as the loss, and the other S - 1 sums.

    Args:
        compute: Maps the head's outputs [C, ...], targets [C], a tree of columns [C, ...] and `HeadLayout.axes` to S
            values [C], of which the first is differentiated. It must not close over traced arrays.
        num_values: S.
        columns: Tree of [B, T, ...] arrays. Carries no gradient.
        head: Maps [..., D] to logits, or to a tuple of arrays that starts with them.

    See `token_loss` for the other arguments.
    """
    is_target = (targets != IGNORED).astype(jnp.float32)
    weights = is_target if weights is None else is_target * weights

    def values_and_hits(outputs, targets, columns, axes):
        hits = [jax.tree.leaves(outputs)[0].argmax(1) == targets] if count_correct else []
        return (*compute(outputs, targets, columns, axes), *hits)

    if plain:
        total, counted = _weighted_sums(head, values_and_hits, hidden.reshape(-1, hidden.shape[-1]), (),
                                        targets.reshape(-1), weights.reshape(-1),
                                        jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), columns))
    else:
        # A custom derivative cannot close over traced arrays: the head's parameters must become arguments.
        pure_head, layout, params = convert(head, hidden, vocab_size, on)
        total, counted = _chunked_sums(pure_head, values_and_hits, num_values + count_correct, layout,
                                       *arrange_lines(hidden, params, targets, weights, layout),
                                       jax.tree.map(lambda x: split_over_ranks(_to_lines(x)), columns))
    correct = counted[-1] if count_correct else None
    return LossSums(total, weights.sum(), correct), counted[: num_values - 1]


def token_log_probs(hidden: Array, targets: Array, head: Callable[[Array], Array], vocab_size: int,
                    plain: bool = False, on: Target | None = None) -> Array:
    """Return float32 log-probabilities [B, T] of `targets` under `head(hidden)`, 0 where a target is IGNORED.

    Logits are computed one chunk at a time, and again in the backward pass, where each position's cotangent is known.
    Arguments as for `token_loss`.
    """
    if plain:
        return -_losses(head, hidden.reshape(-1, hidden.shape[-1]), (), targets.reshape(-1)).reshape(targets.shape)
    pure_head, layout, params = convert(head, hidden, vocab_size, on)
    return _chunked_log_probs(pure_head, layout, hidden, params, targets)


def span_loss(logits: Array, batch: dict[str, Array]) -> LossSums:
    """Return the sum over windows of the mean of start and end cross-entropy; padding is masked out of the softmax.

    Args:
        logits: [B, T, 2], start and end.
        batch: `start_positions`, `end_positions` [B], IGNORED if a window has no label; `attention_mask` [B, T].
    """
    logits = logits.astype(jnp.float32)
    outside = batch["attention_mask"] == 0
    log_probs = jax.nn.log_softmax(jnp.where(outside[..., None], jnp.finfo(jnp.float32).min, logits), axis=1)
    positions = jnp.stack([batch["start_positions"], batch["end_positions"]], axis=-1)
    # IGNORED is negative: gather any valid index instead, since the next statement drops the value.
    picked = jnp.take_along_axis(log_probs, jnp.maximum(positions, 0)[:, None], axis=1)[:, 0]
    # Half of each: the mean of start and end.
    total = -jnp.where(positions == IGNORED, 0.0, picked).sum() / 2
    return LossSums(total, (batch["start_positions"] != IGNORED).sum().astype(jnp.float32))


def label_loss(logits: Array, labels: Array, class_weights: Array | None = None) -> LossSums:
    """Return the summed loss of labels. Their dtype and shape select the loss:

    Integers are classes, with cross-entropy, weighted by class. Floats in the shape of the logits are 0 or 1 for each
    class, with the weighted mean of the binary cross-entropy over the classes. One float per row is a value, with the
    squared error.

    Args:
        logits: [..., K] float32.
        labels: [...] integers, IGNORED where there is no label; or [B, K] or [B] float32, NaN in rows that do not
            count.
        class_weights: [K] float32. None: all equal.
    """
    has_label = is_label(labels)
    if not jnp.issubdtype(labels.dtype, jnp.floating):
        # IGNORED is negative: use any class instead, since its weight is 0.
        classes = jnp.maximum(labels, 0)
        weights = has_label * (1.0 if class_weights is None else jnp.asarray(class_weights)[classes])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), classes[..., None], axis=-1)[..., 0]
        return LossSums(-(picked * weights).sum(), weights.sum().astype(jnp.float32))
    labels = jnp.where(has_label, labels, 0.0)
    if labels.ndim == 1:
        losses = jnp.square(logits[:, 0] - labels)
    else:
        # -y log p - (1 - y) log(1 - p) for p = sigmoid(logits).
        losses = jnp.average(jnp.logaddexp(0.0, logits) - labels * logits, axis=1, weights=class_weights)
        has_label = has_label.all(1)
    return LossSums((losses * has_label).sum(), has_label.sum().astype(jnp.float32))


def pair_loss(scores: Array, margins: Array, centering: float = 0.0) -> LossSums:
    """Return the summed loss of pairs, -log sigmoid(s_w - s_l - margin) + centering (s_w + s_l)^2.

    Bradley & Terry 1952; margins of Touvron et al. 2023, centring of Eisenstein et al. 2023.

    Args:
        scores: [B, 2] float32, for the better and the worse answer.
        margins: [B] float32, NaN in rows that do not count.
    """
    has_label = is_label(margins)
    better, worse = scores[:, 0], scores[:, 1]
    losses = -jax.nn.log_sigmoid(better - worse - jnp.where(has_label, margins, 0.0))
    losses = losses + centering * jnp.square(better + worse)
    return LossSums((losses * has_label).sum(), has_label.sum().astype(jnp.float32))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _chunked_sums(head, compute, num_values, layout, hidden, params, targets, weights, order, num_chunks, columns):
    """Return the sums of S values over R ranks: the first one, and a tuple of the others, which have no gradient.

    `hidden` and `columns` are [R, M, ...]; `targets`, `weights` and `order` are [R, M'], with M' a multiple of the
    chunk length.
    """
    def step(index, sums):
        sum_group = map_groups(layout, lambda h, t, w, extra: _weighted_sums(head, compute, h, params, t, w, extra,
                                                                             layout.axes))
        values = sum_group(*take_chunk(layout, index, hidden, order, targets, weights),
                           _take_columns(layout, index, order, columns))
        return jax.tree.map(lambda summed, new: summed + new.sum(), sums, values)

    # The number of chunks is only known at run time. JAX cannot differentiate such a loop in reverse, hence the
    # custom rule.
    params = shard_params(params, layout)
    return jax.lax.fori_loop(0, num_chunks, step, _zero_sums(num_values))


def _forward(head, compute, num_values, layout, hidden, params, targets, weights, order, num_chunks, columns):
    # With `symbolic_zeros`, each argument is a pair: its value, and whether it is differentiated.
    hidden, targets, weights, order, num_chunks = (arg.value for arg in (hidden, targets, weights, order, num_chunks))
    columns = jax.tree.map(lambda arg: arg.value, columns, is_leaf=lambda arg: hasattr(arg, "perturbed"))
    # A frozen head gets no gradient sums, which would be as large as its table in float32.
    trained = [i for i, p in enumerate(params) if p.perturbed]
    params = shard_params([p.value for p in params], layout)
    ranks = len(hidden)

    def loss(h, chosen, t, w, extra):
        mixed = list(params)
        for i, p in zip(trained, chosen, strict=True):
            mixed[i] = p
        return _weighted_sums(head, compute, h, mixed, t, w, extra, layout.axes)

    differentiate = map_groups(layout, jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), (0, None, 0, 0, 0))

    def step(index, carry):
        sums, by_position, by_param = carry
        h, t, w = take_chunk(layout, index, hidden, order, targets, weights)
        new_sums, (g_hidden, g_params) = differentiate(h, [params[i] for i in trained], t, w,
                                                       _take_columns(layout, index, order, columns))
        # [groups, lines of a group * C, D] -> [R, C, D]
        g_hidden = split_over_ranks(g_hidden.reshape(ranks, layout.chunk, -1))
        # Each position is in one chunk only, so its gradient is complete; those of parameters add up over chunks.
        by_position = jax.lax.dynamic_update_slice_in_dim(by_position, g_hidden, index * layout.chunk, 1)
        by_param = [summed + new for summed, new in zip(by_param, g_params, strict=True)]
        return jax.tree.map(lambda summed, new: summed + new.sum(), sums, new_sums), by_position, by_param

    groups = num_groups(layout.axes, ranks)
    start = (_zero_sums(num_values),
             split_over_ranks(jnp.zeros((ranks, targets.shape[1], hidden.shape[-1]), hidden.dtype)),
             # One sum per group of lines, so that they are reduced over devices once, after the loop.
             [shard_sums(jnp.zeros((groups, *params[i].shape), jnp.float32), layout) for i in trained])
    sums, by_position, by_param = jax.lax.fori_loop(0, num_chunks, step, start)
    # Undo the sort and drop the padding, [R, M', D] -> [R, M, D]. Positions outside the chunks have no label: their
    # gradient is 0.
    g_hidden = jnp.take_along_axis(by_position, invert_order(order, hidden)[..., None], axis=1)
    g_params: list[Array | None] = [None] * len(params)
    for i, summed in zip(trained, by_param, strict=True):
        g_params[i] = summed.sum(0).astype(params[i].dtype)
    return sums, (g_hidden, g_params)


def _backward(head, compute, num_values, layout, gradients, cotangents):
    # The loss is a sum, so the gradients from the forward pass are only scaled.
    factor = cotangents[0]
    if isinstance(factor, SymbolicZero):
        return None, None, None, None, None, None, None
    # No gradient for targets, weights, order, number of chunks and columns.
    scaled = jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)
    return *scaled, None, None, None, None, None


_chunked_sums.defvjp(_forward, _backward, symbolic_zeros=True)


def _weighted_sums(head, compute, hidden, params, targets, weights, columns, axes=()):
    """Return the weighted sums of the values at positions [C, D] with weights [C]: the first one, and the others."""
    # Select instead of only multiplying: 0 times a loss that is not finite would be NaN.
    total, *counted = (jnp.where(weights != 0, values * weights, 0.0).sum()
                       for values in compute(_apply_head(head, hidden, params, axes), targets, columns, axes))
    return total, tuple(counted)


def _zero_sums(num_values: int) -> tuple[Array, tuple[Array, ...]]:
    """Return zeros in the structure of `_weighted_sums`."""
    total, *counted = (jnp.zeros((), jnp.float32) for _ in range(num_values))
    return total, tuple(counted)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked_log_probs(head, layout, hidden, params, targets):
    """Return log-probabilities [B, T] for hidden states [B, T, D] and targets [B, T]."""
    arranged = arrange_lines(hidden, shard_params(params, layout), targets, jnp.zeros(targets.shape), layout)

    def step(index, losses):
        h, t = take_chunk(layout, index, arranged.hidden, arranged.order, arranged.targets)
        new = map_groups(layout, lambda h, t: _losses(head, h, arranged.params, t, layout.axes))(h, t)
        new = split_over_ranks(new.reshape(len(losses), layout.chunk))
        return jax.lax.dynamic_update_slice_in_dim(losses, new, index * layout.chunk, 1)

    # The loop skips chunks without labels: their losses stay 0.
    losses = jax.lax.fori_loop(0, arranged.num_chunks, step, split_over_ranks(jnp.zeros(arranged.targets.shape)))
    return -to_rows(jnp.take_along_axis(losses, invert_order(arranged.order, arranged.hidden), axis=1), targets.shape)


def _log_probs_forward(head, layout, hidden, params, targets):
    # `trained` repeats some of `values`: only here is it known which parameters are differentiated.
    values = [p.value for p in params]
    trained = {i: p.value for i, p in enumerate(params) if p.perturbed}
    log_probs = _chunked_log_probs(head, layout, hidden.value, values, targets.value)
    return log_probs, (hidden.value, values, trained, targets.value)


def _log_probs_backward(head, layout, residuals, cotangent):
    """Differentiate a cross-entropy whose position weights are the negated cotangents: its gradient is the same."""
    hidden, params, trained, targets = residuals
    if isinstance(cotangent, SymbolicZero):
        return None, None, None

    def total(hidden, trained):
        mixed = [trained.get(i, p) for i, p in enumerate(params)]
        weights = jnp.where(targets == IGNORED, 0.0, -cotangent)
        arranged = arrange_lines(hidden, mixed, targets, weights, layout)
        return _chunked_sums(head, partial(_plain_cross_entropy, TokenLoss()), 1, layout, *arranged, ())[0]

    g_hidden, g_trained = jax.grad(total, argnums=(0, 1))(hidden, trained)
    return g_hidden, [g_trained.get(i) for i in range(len(params))], None


_chunked_log_probs.defvjp(_log_probs_forward, _log_probs_backward, symbolic_zeros=True)


def _losses(head, hidden, params, targets, axes=()):
    """Return the cross-entropy of each position, [C], 0 without a target."""
    return jnp.where(targets == IGNORED, 0.0, cross_entropies(_apply_head(head, hidden, params, axes), targets, axes))


def _apply_head(head, hidden, params, axes):
    outputs = head(hidden, *params)
    return jax.tree.map(lambda x: constrain(x, PartitionSpec(None, axes)), outputs) if axes else outputs


def cross_entropies(logits: Array, targets: Array, axes: tuple[str, ...], form: TokenLoss = TokenLoss()) -> Array:
    """Return the cross-entropy [C] of logits [C, V], whose vocabulary is sharded over `axes`."""
    if axes:  # mask and sum over the sharded vocabulary: a gather by target would move logits between devices
        picked = jnp.where(jnp.arange(logits.shape[1]) == targets[:, None], logits, 0.0).sum(1)
    else:
        # IGNORED is negative: any index does, since callers drop the value.
        picked = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=1)[:, 0]
    log_z, smoothing = jax.nn.logsumexp(logits, axis=1), form.label_smoothing
    if smoothing:
        picked = (1 - smoothing) * picked + smoothing * logits.mean(1)
    losses = log_z - picked
    if form.dft:  # the cross-entropy is -log p
        losses = losses * jax.lax.stop_gradient(jnp.exp(-losses))
    return losses + (form.z_loss * jnp.square(log_z) if form.z_loss else 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Layout of a batch's positions for the output head: labelled positions first, in chunks, over the devices of a mesh.
#
# On a mesh, devices either have the whole head and apply it to their own positions, or shard the vocabulary. In the
# latter case hidden states are exchanged instead of weights, and no device ever has the whole head, its gradient or all
# logits of a position.

class HeadLayout(NamedTuple):
    """Application of the output head.

    Args:
        chunk: C, number of positions of each line whose logits are computed at once.
        axes: Mesh axes over which the vocabulary is sharded: each device has rows of the head's table, gets the
            positions of all these devices, and computes its part of the logits. Empty: each device has the whole head
            and its own positions.
    """

    chunk: int
    axes: tuple[str, ...]


class Lines(NamedTuple):
    """Positions of R ranks, one line of M positions per rank, padded to M', a multiple of the chunk length.

    With context parallelism, each part of a rank's rows is a separate line, so that lines stay on their device.

    Args:
        hidden: [R, M, D], in batch order.
        params: The head's arrays.
        targets: [R, M'], labelled positions first; `weights` likewise.
        order: [R, M'] index into `hidden` of each target.
        num_chunks: Number of chunks that contain labels.
    """

    hidden: Array
    params: list[Array]
    targets: Array
    weights: Array
    order: Array
    num_chunks: Array


def chunk_bytes(on: Target | None) -> int:
    """Return the approximate bytes of a chunk's float32 logits, or of its hidden states, on each device."""
    return CHUNK_BYTES if target(on).platform == "cpu" else CHUNK_BYTES_GPU


def convert(head: Callable[[Array], Array], hidden: Array, vocab_size: int, on: Target | None = None
            ) -> tuple[Callable, HeadLayout, list[Array]]:
    """Return the head as a pure function of (positions, *params), its layout, and the params it closed over."""
    positions = hidden.reshape(-1, hidden.shape[-1])
    # Trace twice, because the converted function is fixed to the traced shape, and the length of a chunk depends on the
    # parameters. One position is enough to find them.
    pure_head, params = jax.closure_convert(head, positions[:1])
    num_lines, axes = num_visible_ranks() * context_parallel_size(), _vocabulary_axes(params, vocab_size)
    lines_per_group = num_lines // num_groups(axes, num_lines)
    # Per device, a chunk has C * V logits, sharded vocabulary or not, and hidden states [lines_per_group * C, D].
    widest = max(vocab_size, lines_per_group * positions.shape[1] if axes else 0)
    # At most a whole line.
    layout = HeadLayout(min(max(chunk_bytes(on) // (4 * widest), MIN_CHUNK), len(positions) // num_lines), axes)
    pure_head, params = jax.closure_convert(head, positions[:lines_per_group * layout.chunk])
    return pure_head, layout, params


def _vocabulary_axes(params: list[Array], vocab_size: int) -> tuple[str, ...]:
    """Return `HeadLayout.axes`: the axes over which the state shards the head's table.

    Empty if the head has matrices other than tables [V, ...]: every device would apply them to all positions.
    """
    if not on_mesh() or any(p.ndim > 1 and p.shape[0] != vocab_size for p in params):
        return ()
    sizes = jax.sharding.get_abstract_mesh().shape
    # The trailing dimension of length 1 represents the features: only the sharding of rows matters.
    axes = tuple(axis for axis in partition("head.weight", (vocab_size, 1), sizes)[0] if sizes[axis] > 1)
    # A group contains all lines except along `data` (see `num_groups`), so the table must be sharded over every other
    # axis along which lines are split.
    return axes if {axis for axis in (*DATA_AXES, SEQUENCE) if sizes[axis] > 1} <= {"data", *axes} else ()


def num_groups(axes: tuple[str, ...], num_lines: int) -> int:
    """Return the number of groups of lines; the lines of a group are processed together."""
    return jax.sharding.get_abstract_mesh().shape["data"] if axes else num_lines


def arrange_lines(hidden: Array, params: list[Array], targets: Array, weights: Array, layout: HeadLayout) -> Lines:
    """Arrange rows [B, T] as lines, labelled positions first; each stays on its rank."""
    hidden, targets, weights = (split_over_ranks(_to_lines(x)) for x in (hidden, targets, weights))
    # Labels first, in row order. Hidden states are not sorted here but gathered chunk by chunk: a sorted copy would be
    # as large as the batch.
    order = jnp.argsort(targets == IGNORED, axis=1, stable=True)
    pad = ((0, 0), (0, -targets.shape[1] % layout.chunk))
    return Lines(hidden, params, jnp.pad(jnp.take_along_axis(targets, order, axis=1), pad, constant_values=IGNORED),
                  jnp.pad(jnp.take_along_axis(weights, order, axis=1), pad), jnp.pad(order, pad),
                  # Of the longest line: all devices must run the same number of iterations.
                  -(-(targets != IGNORED).sum(1).max() // layout.chunk))


def _to_lines(x: Array) -> Array:
    """Reshape rows [B, T, ...] to lines [R, M, ...]."""
    parts = context_parallel_size()
    if parts == 1:
        return x.reshape(num_visible_ranks(), -1, *x.shape[2:])
    # [ranks * b, parts * t, ...] -> [ranks, b, parts, t, ...] -> [ranks * parts, b * t, ...]
    rows = x.reshape(num_visible_ranks(), -1, parts, x.shape[1] // parts, *x.shape[2:])
    return rows.swapaxes(1, 2).reshape(num_visible_ranks() * parts, -1, *x.shape[2:])


def to_rows(x: Array, shape: tuple[int, ...]) -> Array:
    """Reshape lines [R, M] to rows [B, T], the inverse of `_to_lines`."""
    parts = context_parallel_size()
    if parts == 1:
        return x.reshape(shape)
    # [ranks * parts, b * t] -> [ranks, parts, b, t] -> [ranks * b, parts * t]
    return x.reshape(num_visible_ranks(), parts, -1, shape[1] // parts).swapaxes(1, 2).reshape(shape)


def split_over_ranks(x: Array) -> Array:
    return constrain(x, PartitionSpec((*DATA_AXES, SEQUENCE) if context_parallel_size() > 1 else DATA_AXES))


def map_groups(layout: HeadLayout, function: Callable, in_axes: int | tuple = 0) -> Callable:
    """Vectorise `function`, which takes the positions of one group of lines, over groups."""
    # `spmd_axis_name` keeps the groups sharded over `data` where `function` constrains its arrays.
    return jax.vmap(function, in_axes, spmd_axis_name="data" if layout.axes else None)


def invert_order(order: Array, hidden: Array) -> Array:
    """Return [R, M], the index in its sorted line of each position of `hidden` [R, M, D]."""
    # The argsort of a permutation is its inverse. Indices past M are padding.
    return jnp.argsort(order[:, : hidden.shape[1]], axis=1)


def take_chunk(layout: HeadLayout, index: Array, hidden: Array, order: Array, *columns: Array) -> list[Array]:
    """Return the hidden states and columns of a chunk, [groups, C, D] and [groups, C]."""
    start = index * layout.chunk
    positions, *columns = (jax.lax.dynamic_slice_in_dim(column, start, layout.chunk, 1) for column in (order, *columns))
    chunk = [jnp.take_along_axis(hidden, positions[..., None], axis=1), *columns]
    if not layout.axes:
        return chunk
    # [R, C, ...] -> [groups, lines of a group * C, ...]. The constraint gathers these positions on all devices of a
    # group.
    groups = num_groups(layout.axes, len(hidden))
    return [constrain(x.reshape(groups, -1, *x.shape[2:]), PartitionSpec("data")) for x in chunk]


def _take_columns(layout: HeadLayout, index: Array, order: Array, columns: Any) -> Any:
    """Return a chunk [groups, C, ...] of a tree of columns [R, M, ...], which are in batch order."""
    return jax.tree.map(lambda column: take_chunk(layout, index, column, order)[0], columns)


def shard_params(params: list[Array], layout: HeadLayout) -> list[Array]:
    """Shard tables by rows over `layout.axes`; without axes, all-gather the parameters once, before the loop."""
    return [constrain(p, PartitionSpec(layout.axes) if layout.axes and p.ndim else PartitionSpec()) for p in params]


def shard_sums(sums: Array, layout: HeadLayout) -> Array:
    """Constrain gradient sums [groups, *shape] to the layout of their parameters."""
    if not layout.axes:
        return split_over_ranks(sums)
    return constrain(sums, PartitionSpec("data", layout.axes) if sums.ndim > 1 else PartitionSpec("data"))
