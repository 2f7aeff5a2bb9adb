"""Cross-entropy of the labelled tokens, as a sum and a weight.

The output head is by far the widest layer of a small model, and most positions of a fine-tuning batch carry no
label. So the head sees labelled positions only, a chunk at a time, and its gradient is taken on the way forward:
neither [B, T, V] nor [N, V] logits ever exist, and nothing is computed twice.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
# The float32 logits of one chunk take about this many bytes. Each chunk reads the head's weights anew, and where they
# train also their gradient, which on GPUs costs more than the memory; on CPUs larger chunks gain no speed.
CHUNK_BYTES = 32 * 2**20
CHUNK_BYTES_GPU = 256 * 2**20


class LossSums(NamedTuple):
    """Sums over the scored positions of a batch; every loss of every task is one of these.

    Args:
        total: Summed loss, scalar float32, differentiable.
        weight: Number of scored positions, scalar float32.
        correct: How many of them the argmax gets right, scalar float32; None unless asked for.
    """

    total: Tensor
    weight: Tensor
    correct: Tensor | None = None


def shift_labels(labels: Tensor) -> Tensor:
    """Labels [B, T] moved so that position t holds the token it predicts; the last position predicts nothing."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def token_loss(
    hidden: Tensor,
    targets: Tensor,
    head: Callable[[Tensor], Tensor],
    params: list[Tensor],
    vocab_size: int,
    count_correct: bool = False,
) -> LossSums:
    """Cross-entropy in float32 of `head(hidden)` against `targets`, over positions that are not IGNORED.

    Args:
        hidden: [B, T, H] hidden states, already aligned with `targets`.
        targets: [B, T] token ids or IGNORED.
        head: Maps [N, H] to logits [N, V].
        params: The head's trainable parameters.
        vocab_size: V, which decides the chunk length.
        count_correct: Also count argmax hits (one more pass over the logits).
    """
    scored = (targets != IGNORED).flatten().nonzero().squeeze(1)
    hidden = hidden.flatten(0, 1).index_select(0, scored)
    targets = targets.flatten().index_select(0, scored)
    chunk = max((CHUNK_BYTES if hidden.device.type == "cpu" else CHUNK_BYTES_GPU) // (4 * vocab_size), 1)
    total, correct = _ChunkedCrossEntropy.apply(hidden, targets, head, chunk, count_correct, torch.is_grad_enabled(),
                                                *params)
    return LossSums(total, total.new_tensor(len(targets)), correct if count_correct else None)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and gradient chunk by chunk in one pass.

    Taking the gradient in the forward pass is the idea of Liger Kernel's fused linear cross-entropy (Hsu et al.
    2024). Autograd differentiates the head itself, so a head with bias, adapter, soft-cap or scale is right too.
    """

    @staticmethod
    def forward(ctx, hidden, targets, head, chunk, count_correct, is_training, *params):
        wants_grad = is_training and any(ctx.needs_input_grad)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        correct = torch.zeros_like(total)
        grad_hidden = torch.zeros_like(hidden) if wants_grad else None
        grads = [torch.zeros_like(p, dtype=torch.float32) if wants_grad else None for p in params]
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            with torch.set_grad_enabled(wants_grad):
                piece = hidden[part].detach().requires_grad_(wants_grad)
                logits = head(piece)
            log_probs = F.log_softmax(logits.detach(), dim=-1, dtype=torch.float32)
            total -= log_probs.gather(1, targets[part].unsqueeze(1)).sum()
            if count_correct:
                correct += (log_probs.argmax(-1) == targets[part]).sum()
            if wants_grad:
                # The gradient of cross-entropy by hand, in place: autograd would pass over the logits twice more.
                grad_logits = log_probs.exp_()
                grad_logits[torch.arange(len(piece), device=piece.device), targets[part]] -= 1
                grad_hidden[part], *rest = torch.autograd.grad(logits, [piece, *params], grad_logits.to(logits.dtype))
                for summed, grad in zip(grads, rest, strict=True):
                    summed += grad
        if wants_grad:
            ctx.save_for_backward(grad_hidden, *(g.to(p.dtype) for g, p in zip(grads, params, strict=True)))
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    def backward(ctx, grad_total, _grad_correct):
        grad_hidden, *grads = (grad * grad_total.to(grad.dtype) for grad in ctx.saved_tensors)
        return grad_hidden, None, None, None, None, None, *grads
