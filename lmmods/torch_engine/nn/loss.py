"""Cross-entropy of the labelled tokens, as a sum and a weight.

The output head is by far the widest layer of a small model, and most positions of a fine-tuning batch have no label.
So the head is applied to labelled positions only, in chunks, and its gradient is computed in the forward pass: neither
[B, T, V] nor [N, V] logits are ever materialised, and nothing is computed twice.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lmmods.core.labels import IGNORED
from lmmods.core.memory import CHUNK_BYTES, CHUNK_BYTES_GPU, LEAST_CHUNK
from lmmods.core.settings import TokenLoss
from lmmods.torch_engine.compat.torch import add_to_all


class LossSums(NamedTuple):
    """Sums over the scored positions of a batch; the result of every task's loss.

    Args:
        total: Summed loss, scalar float32, differentiable.
        weight: Summed weight of the scored positions, scalar float32.
        correct: Summed weight of those that the argmax predicts, scalar float32; None unless requested.
        metrics: Summed values and summed weight of each metric of the task, [M, 2] float32; None without metrics.
    """

    total: Tensor
    weight: Tensor
    correct: Tensor | None = None
    metrics: Tensor | None = None


def shift_labels(labels: Tensor) -> Tensor:
    """Shift labels [B, T] so that position t holds the token to predict there; the last one is IGNORED."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def shift_weights(weights: Tensor | None) -> Tensor | None:
    """Shift weights [B, T] of labels in the same way as `shift_labels`."""
    return None if weights is None else F.pad(weights[:, 1:], (0, 1))


def token_loss(hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], params: list[Tensor], vocab_size: int,
               count_correct: bool = False, plain: bool = False, weights: Tensor | None = None,
               device: torch.device | None = None, form: TokenLoss = TokenLoss()) -> LossSums:
    """Cross-entropy in float32 of `head(hidden)` against `targets`, over positions that are not IGNORED.

    Args:
        hidden: [B, T, H] hidden states, already aligned with `targets`.
        targets: [B, T] token ids or IGNORED.
        head: Maps [N, H] to logits [N, V]. If it has an attribute `linear` that is not None, it must equal this layer
            followed by its `scale` and `softcap`, if any: see `_LinearHead`.
        params: Trainable parameters of the head.
        vocab_size: V, which determines the chunk length.
        count_correct: Also count argmax hits (one more pass over the logits).
        plain: Compute all logits at once and leave the gradient to autograd; `params` is then unused.
        weights: [B, T] float32, weight of each position; None for 1.
        device: Device whose chunk length is used; None for that of `hidden`.
        form: What is changed in the cross-entropy.
    """
    def compute(logits: Tensor, targets: Tensor) -> PositionValues:
        losses, gradient = cross_entropies(logits, targets, form)
        return [losses], gradient

    return sum_over_positions(compute, 1, hidden, [targets], head, params, vocab_size, count_correct, plain, weights,
                              device)[0]


# S values [n] of n positions, and what computes the gradient [n, V] of the first one by the logits: it is called last,
# at most once, and may overwrite the arrays that the values came from.
PositionValues = tuple[list[Tensor], Callable[[], Tensor]]


def sum_over_positions(compute: Callable[..., PositionValues], num_values: int, hidden: Tensor, columns: list[Tensor],
                       head: Callable[[Tensor], Tensor], params: list[Tensor], vocab_size: int, count_correct: bool,
                       plain: bool, weights: Tensor | None, device: torch.device | None) -> tuple[LossSums, Tensor]:
    """Sum values of the labelled positions. Return the first value's sum as the loss, and the others' sums [S - 1].

    Args:
        compute: Maps float32 logits [n, V] and the n rows of each column to the values.
        num_values: S.
        columns: [B, T, ...] each, the targets first.

    See `token_loss` for the other arguments.
    """
    hidden, *columns = (x.flatten(0, 1) for x in (hidden, *columns))
    weights, is_target = None if weights is None else weights.flatten(), columns[0] != IGNORED
    if plain:
        weights = is_target.float() if weights is None else is_target * weights
        sums = _sum_values(compute, head(hidden).float(), columns, weights, count_correct)[0]
    else:
        # [B * T, H] -> [N, H], N labelled positions. `nonzero` synchronises with a GPU, once per micro-batch.
        scored = is_target.nonzero().squeeze(1)
        hidden, *columns = (x.index_select(0, scored) for x in (hidden, *columns))
        weights = None if weights is None else weights.index_select(0, scored)
        chunk = chunk_length(vocab_size, device or hidden.device)
        # Gradient mode is an argument, as it is always off inside `forward`. The head holds `params` already; passing
        # them makes autograd ask for their gradients.
        sums = _ChunkedSums.apply(hidden, columns, weights, head, chunk, compute, num_values, count_correct,
                                  torch.is_grad_enabled(), *params)
    weight = sums.new_tensor(len(hidden)) if weights is None else weights.sum()
    counted = sums.detach()
    return LossSums(sums[0], weight, counted[num_values] if count_correct else None), counted[1:num_values]


def _sum_values(compute: Callable[..., PositionValues], logits: Tensor, columns: list[Tensor], weights: Tensor | None,
                count_correct: bool) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return weighted sums [S] of the values of positions, with their hits if requested, and the gradient's function.
    """
    hits = [(logits.argmax(-1) == columns[0]).float()] if count_correct else []
    values, gradient = compute(logits, *columns)
    return torch.stack([(x if weights is None else x * weights).sum() for x in (*values, *hits)]), gradient


def cross_entropies(logits: Tensor, targets: Tensor, form: TokenLoss) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return the cross-entropy [n] of logits [n, V], and what computes its gradient [n, V]."""
    log_probs = F.log_softmax(logits, dim=-1)
    index = targets.clamp(min=0).unsqueeze(1)  # IGNORED is negative; callers drop the value
    picked = log_probs.gather(1, index).squeeze(1)
    losses, smoothing = -picked, form.label_smoothing
    if smoothing:
        losses = (1 - smoothing) * losses - smoothing * log_probs.mean(-1)
    if form.dft:
        probabilities = picked.detach().exp()
        losses = losses * probabilities
    if form.z_loss:
        log_z = logits.gather(1, index).squeeze(1) - picked
        losses = losses + form.z_loss * log_z.square()

    def gradient() -> Tensor:
        # softmax - one_hot, in place: autograd would make two more passes. The logits themselves may be freed by now.
        grad_logits = log_probs.exp_()
        # Factors of the softmax and, where `dft` weights it, of the one_hot.
        of_target = probabilities if form.dft else 1 - smoothing
        if form.dft or form.z_loss:
            grad_logits *= ((probabilities if form.dft else 1)
                            + (2 * form.z_loss * log_z if form.z_loss else 0)).unsqueeze(1)
        if smoothing:
            grad_logits -= smoothing / grad_logits.shape[-1]
        grad_logits[torch.arange(len(targets), device=targets.device), targets] -= of_target
        return grad_logits

    return losses, gradient


def chunk_bytes(device: torch.device) -> int:
    """Return the approximate bytes of a chunk's float32 logits."""
    return CHUNK_BYTES if device.type == "cpu" else CHUNK_BYTES_GPU


def chunk_length(vocab_size: int, device: torch.device) -> int:
    """Return the positions of a chunk."""
    # [positions, V] float32 logits
    return max(chunk_bytes(device) // (4 * vocab_size), LEAST_CHUNK)


def token_log_probs(hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], params: list[Tensor],
                    vocab_size: int, plain: bool = False, device: torch.device | None = None) -> Tensor:
    """Log-probabilities [N] in float32 of `targets` under `head(hidden)`, for losses that are not sums over tokens.

    The gradient of each token depends on all of them, so a chunk's logits are recomputed in the backward pass.

    Args:
        hidden: [N, H] hidden states, already aligned with `targets` [N], which are all scored.
        head: As in `token_loss`, like the remaining arguments.
    """
    if plain:
        return F.log_softmax(head(hidden).float(), dim=-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    chunk = chunk_length(vocab_size, device or hidden.device)
    return _ChunkedLogProbabilities.apply(hidden, targets, head, chunk, *params)


class _ChunkedLogProbabilities(torch.autograd.Function):
    """Log-probabilities of tokens in chunks, recomputed in the backward pass."""

    @staticmethod
    def forward(ctx, hidden, targets, head, chunk, *params):
        device = hidden.device.type
        # `backward` runs outside the caller's autocast context.
        ctx.autocast = {"enabled": torch.is_autocast_enabled(device), "dtype": torch.get_autocast_dtype(device)}
        ctx.head, ctx.chunk = head, chunk
        ctx.save_for_backward(hidden, targets, *params)
        products = wrap_head(head, params)
        found = hidden.new_empty(len(targets), dtype=torch.float32)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            log_probs = F.log_softmax(products.forward(hidden[part], False).float(), dim=-1)  # [n, V]
            found[part] = log_probs.gather(1, targets[part].unsqueeze(1)).squeeze(1)
        return found

    @staticmethod
    def backward(ctx, grad):
        hidden, targets, *params = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        with torch.autocast(hidden.device.type, **ctx.autocast):
            products = wrap_head(ctx.head, params)
            for start in range(0, len(targets), ctx.chunk):
                part = slice(start, start + ctx.chunk)
                # d log p / d logits = one_hot - softmax: negated here, and again by the factor -grad.
                grad_logits = F.softmax(products.forward(hidden[part], True).float(), dim=-1)
                grad_logits[torch.arange(len(grad_logits), device=hidden.device), targets[part]] -= 1
                grad_hidden[part] = products.backward(grad_logits.mul_(-grad[part].unsqueeze(1)))
            return grad_hidden, None, None, None, *products.param_grads(params)  # targets, head and chunk have none


def wrap_head(head: Callable[[Tensor], Tensor], params: tuple[Tensor, ...] | list[Tensor]) -> "_AnyHead | _LinearHead":
    layer = getattr(head, "linear", None)
    if layer is None:
        return _AnyHead(head, params)
    return _LinearHead(layer, getattr(head, "scale", 1.0), getattr(head, "softcap", None))


class _ChunkedSums(torch.autograd.Function):
    """Sums over positions in chunks, with the gradient of the first one, in one pass.

    Computing the gradient in the forward pass follows Liger Kernel's fused linear cross-entropy (Hsu et al. 2024).
    Heads other than a matrix with scale and soft cap, such as those with bias or adapter, are left to autograd.
    """

    @staticmethod
    def forward(ctx, hidden, columns, weights, head, chunk, compute, num_values, count_correct, is_training, *params):
        # `needs_input_grad` is set under `no_grad` too, as when a model with trainable parameters is evaluated.
        wants_grad = is_training and any(ctx.needs_input_grad)
        products = wrap_head(head, params)
        sums = torch.zeros(num_values + count_correct, dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden) if wants_grad else None
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            by_position = None if weights is None else weights[part]
            # No variable holds the logits, so that they are freed before the gradient is computed.
            added, gradient = _sum_values(compute, products.forward(hidden[part], wants_grad).float(),
                                          [column[part] for column in columns], by_position, count_correct)
            sums += added
            grad_logits = gradient() if wants_grad else None
            if wants_grad:
                if weights is not None:
                    grad_logits *= by_position.unsqueeze(1)
                grad_hidden[part] = products.backward(grad_logits)  # [n, V] -> [n, H]
        if wants_grad:
            # Gradients of the first sum itself; `backward` multiplies them by its incoming gradient.
            ctx.save_for_backward(grad_hidden, *products.param_grads(params))
        return sums

    @staticmethod
    def backward(ctx, grad_sums):
        # In place is safe: only this node holds these tensors, and a second backward pass finds them freed.
        grad_hidden, *grads = (grad.mul_(grad_sums[0].to(grad.dtype)) for grad in ctx.saved_tensors)
        return grad_hidden, None, None, None, None, None, None, None, None, *grads


class _AnyHead:
    """A head differentiated by autograd, one chunk at a time; gradients are summed in float32."""

    def __init__(self, head: Callable[[Tensor], Tensor], params: tuple[Tensor, ...] | list[Tensor]) -> None:
        self._head, self._params = head, params
        self._sums: list[Tensor] = []

    def forward(self, piece: Tensor, wants_grad: bool) -> Tensor:
        # A graph per chunk, cut from the network's at `piece` and freed by `backward`.
        with torch.set_grad_enabled(wants_grad):
            self._piece = piece.detach().requires_grad_(wants_grad)
            self._logits = self._head(self._piece)
        return self._logits.detach()

    def backward(self, grad_logits: Tensor) -> Tensor:
        # `autograd.grad` leaves the parameters' `.grad` alone: the outer graph adds to it.
        grad, *rest = torch.autograd.grad(self._logits, [self._piece, *self._params],
                                          grad_logits.to(self._logits.dtype))
        if self._sums:
            add_to_all(self._sums, [new.float() for new in rest])
        else:
            self._sums = [new.float() for new in rest]
        return grad

    def param_grads(self, params: tuple[Tensor, ...]) -> list[Tensor]:
        sums = self._sums or [torch.zeros_like(p) for p in params]  # no chunk ran: no position is scored
        return [grad.to(p.dtype) for grad, p in zip(sums, params, strict=True)]


class _LinearHead:
    """A head that is one matrix: its gradient accumulates inside the product, and it is cast once for all chunks.

    Args:
        scale: Factor on the logits.
        softcap: c of the soft cap c tanh(logits / c) applied after it (Gemma 2); None for no cap.
    """

    def __init__(self, layer: torch.nn.Linear, scale: float = 1.0, softcap: float | None = None) -> None:
        device = layer.weight.device.type
        autocast = torch.is_autocast_enabled(device)
        self._dtype = torch.get_autocast_dtype(device) if autocast else layer.weight.dtype
        self._weight = layer.weight.detach().to(self._dtype)  # autocast would cast it in every chunk
        self._trains, self._sum = layer.weight.requires_grad, None
        self._scale, self._softcap = scale, softcap
        self._squashed: Tensor | None = None

    def forward(self, piece: Tensor, wants_grad: bool) -> Tensor:
        self._piece = piece.detach().to(self._dtype)
        logits = self._piece @ self._weight.t()
        if self._scale != 1:
            logits *= self._scale
        if self._softcap is None:
            return logits
        squashed = logits.div_(self._softcap).tanh_()
        self._squashed = squashed if wants_grad else None  # only `backward` reads it
        return squashed * self._softcap

    def backward(self, grad_logits: Tensor) -> Tensor:
        # In place, back through soft cap and scale: no caller needs `grad_logits` afterwards.
        if self._squashed is not None:  # tanh' = 1 - tanh^2, in float32
            grad_logits *= self._squashed.float().square_().neg_().add_(1)
        if self._scale != 1:
            grad_logits *= self._scale
        grad = grad_logits.to(self._dtype)
        # [n, V]^T [n, H] -> [V, H], summed over chunks in float32, as 16 bits would round small terms away.
        # `addmm_` takes a single dtype, so 16-bit products are added separately.
        if self._trains and self._sum is None:
            self._sum = (grad.t() @ self._piece).float()
        elif self._trains and self._dtype == torch.float32:
            self._sum.addmm_(grad.t(), self._piece)
        elif self._trains:
            self._sum += grad.t() @ self._piece
        return grad @ self._weight

    def param_grads(self, params: tuple[Tensor, ...]) -> list[Tensor]:
        return [torch.zeros_like(p) if self._sum is None else self._sum.to(p.dtype) for p in params]
