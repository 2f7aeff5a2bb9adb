"""Divergence of a student's token distributions from a teacher's, mixed with the cross-entropy of the labels."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lmmods.core.settings import LEAST, NOTHING, Divergence, TokenLoss
from lmmods.torch_engine.nn.loss import (
    LossSums,
    PositionValues,
    chunk_length,
    cross_entropies,
    sum_over_positions,
    wrap_head,
)


class TeacherStates(NamedTuple):
    """A teacher's hidden states and head. Carries no gradient.

    Args:
        hidden: [B, T, H'] hidden states.
        head: Maps [N, H'] to logits [N, V'], as in `token_loss`.
        is_sampled: [B, T] float32, 1 where the student has sampled the target token, otherwise 0. Default: 0.
    """

    hidden: Tensor
    head: Callable[[Tensor], Tensor]
    is_sampled: Tensor | None = None


class TeacherTopK(NamedTuple):
    """A teacher's k most likely tokens; all other tokens count as one.

    Args:
        ids: [B, T, k] tokens, or [n, k].
        logps: [B, T, k + 1] or [n, k + 1] float32, their log-probabilities, then that of all other tokens.
        size: Number of tokens in the distributions.
    """

    ids: Tensor
    logps: Tensor
    size: int


def distillation_loss(hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], params: list[Tensor],
                      vocab_size: int, count_correct: bool = False, plain: bool = False, weights: Tensor | None = None,
                      device: torch.device | None = None, form: TokenLoss = TokenLoss(), *, divergence: Divergence,
                      teacher: TeacherStates | TeacherTopK) -> LossSums:
    """Mix the cross-entropy of `token_loss` with the divergence from a teacher; `metrics` are the sums of the two.

    Tokens that the student has sampled only have the divergence as loss. Both terms come from the same logits: the
    output head is the largest matrix product of a small model, so it must not run twice.

    Args:
        divergence: The divergence and its ratio in the loss; `metrics` has its `metric_names`.
        teacher: The teacher's outputs, aligned with `targets`.

    See `token_loss` for the other arguments.
    """
    has_states = isinstance(teacher, TeacherStates)
    teacher_head = wrap_head(teacher.head, []) if has_states else None
    is_sampled = teacher.is_sampled if has_states else None
    is_sampled = torch.zeros(targets.shape, device=targets.device) if is_sampled is None else is_sampled

    def compute(logits: Tensor, targets: Tensor, is_sampled: Tensor, *teacher_columns: Tensor) -> PositionValues:
        if has_states:
            expected = teacher_head.forward(*teacher_columns, False).float()
        else:
            expected = TeacherTopK(*teacher_columns, teacher.size)
        losses, loss_gradient = cross_entropies(logits, targets, form)
        divergences, divergence_gradient = compute_divergence(logits, expected, divergence)
        fraction = divergence.ratio + (1 - divergence.ratio) * is_sampled

        def gradient() -> Tensor:
            by_divergence = divergence_gradient().mul_(fraction.unsqueeze(1))
            return loss_gradient().mul_((1 - fraction).unsqueeze(1)).add_(by_divergence)

        mixed = fraction * divergences + (1 - fraction) * losses
        return [mixed, divergences, (1 - is_sampled) * losses, is_sampled], gradient

    columns = [targets, is_sampled, *teacher[: 1 if has_states else 2]]
    sums, value_sums = sum_over_positions(compute, 4, hidden, columns, head, params, vocab_size, count_correct, plain,
                                          weights, device)
    # Tokens that the student has sampled have no cross-entropy, so they do not count in its mean.
    counts = torch.stack([sums.weight, sums.weight - value_sums[2], sums.weight])
    return sums._replace(metrics=torch.stack([value_sums, counts], 1)[: len(divergence.metric_names)])


def compute_divergence(logits: Tensor, teacher: Tensor | TeacherTopK, form: Divergence
                       ) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return the divergence [n] of a student's logits [n, V] from a teacher's [n, V'], and a function for its gradient.

    Columns that only one of them has are padding of its vocabulary and ignored. The gradient [n, V] is each position's
    gradient by the student's logits.
    """
    is_top_k = isinstance(teacher, TeacherTopK)
    num_tokens = logits.shape[-1]
    size = min(num_tokens, teacher.size if is_top_k else teacher.shape[-1])
    student = all_tokens = F.log_softmax(logits[:, :size] / form.temperature, dim=-1)
    if is_top_k:
        student, expected = group_others(all_tokens, teacher.ids), teacher.logps.clamp(min=LEAST)
    else:
        expected = F.log_softmax(teacher[:, :size] / form.temperature, dim=-1)
    beta = form.beta
    if beta == 0:
        values = (expected.exp() * (expected - student)).sum(-1)
    elif beta == 1:
        values = (student.exp() * (student - expected)).sum(-1)
    else:
        mixture = torch.logaddexp(student + math.log1p(-beta), expected + math.log(beta))
        values = (beta * expected.exp() * (expected - mixture)
                  + (1 - beta) * student.exp() * (student - mixture)).sum(-1)

    def gradient() -> Tensor:
        # Through the softmax: p (g - sum p g), with g the derivative by p: -T / S, log(S / T) or (1 - beta) log(S / M).
        if beta == 0:
            by_logits = student.exp() - expected.exp()
        else:
            p = student.exp()
            g = student - expected if beta == 1 else (1 - beta) * (student - mixture)
            by_logits = p * (g - (p * g).sum(-1, keepdim=True))
        if is_top_k:  # distribute the gradient of all other tokens by their probabilities
            others = (all_tokens - student[:, -1:]).clamp(max=0).exp() * by_logits[:, -1:]
            by_logits = others.scatter(1, teacher.ids, by_logits[:, :-1])
        return F.pad(by_logits / form.temperature, (0, num_tokens - size))

    return values, gradient


def group_others(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities [n, k + 1] of the tokens `ids` [n, k], then that of all others, from all [n, V]."""
    others = log_probs.scatter(1, ids, NOTHING).logsumexp(-1, keepdim=True)
    return torch.cat([log_probs.gather(1, ids), others], 1).clamp(min=LEAST)


def compute_top_k(hidden: Tensor, head: Callable[[Tensor], Tensor], size: int, top_k: int, device: torch.device
                  ) -> tuple[Tensor, Tensor]:
    """Return a teacher's top k tokens [N, k] at N positions, and their log-probabilities [N, k + 1].

    Args:
        hidden: [N, H'] hidden states of the teacher. `head` and `device` are as in `token_loss`.
        size: Number of tokens in its distributions.
    """
    chunk_size, products = chunk_length(size, device), wrap_head(head, [])
    ids = torch.empty(len(hidden), top_k, dtype=torch.long, device=hidden.device)
    logps = torch.empty(len(hidden), top_k + 1, device=hidden.device)
    for start in range(0, len(hidden), chunk_size):
        rows = slice(start, start + chunk_size)
        log_probs = F.log_softmax(products.forward(hidden[rows], False).float()[:, :size], -1)
        ids[rows] = log_probs.topk(top_k, -1).indices
        logps[rows] = group_others(log_probs, ids[rows])
    return ids, logps
