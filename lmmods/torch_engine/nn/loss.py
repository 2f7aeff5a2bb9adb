"""Cross-entropy of the target tokens, as a sum and a weight.

The output head is by far the widest layer of a small model, and most positions of a fine-tuning batch have no target.
So the head only runs on positions with a target, in chunks, and its gradient is computed in the forward pass: neither
[B, T, V] nor [N, V] logits are ever materialised, and nothing is computed twice.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lmmods.core.labels import IGNORED
from lmmods.core.memory import CHUNK_BYTES, CHUNK_BYTES_GPU, MIN_CHUNK
from lmmods.core.settings import TokenLoss
from lmmods.torch_engine.compat.torch import add_to_all


class LossSums(NamedTuple):
    """Sums over the target positions of a batch; the result of every task's loss.

    Args:
        total: Summed loss, scalar float32, differentiable.
        weight: Summed weight of the targets, scalar float32.
        correct: Summed weight of the targets that the argmax predicts, scalar float32; None unless requested.
        metrics: Summed values and summed weight of each of the task's metrics, [M, 2] float32; None without metrics.
    """

    total: Tensor
    weight: Tensor
    correct: Tensor | None = None
    metrics: Tensor | None = None


def shift_labels(labels: Tensor) -> Tensor:
    """Shift labels [B, T] so that position t has the token to predict there; the last label is IGNORED."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def shift_weights(weights: Tensor | None) -> Tensor | None:
    """Shift the weights [B, T] of labels like `shift_labels`."""
    return None if weights is None else F.pad(weights[:, 1:], (0, 1))


def token_loss(hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], params: list[Tensor], vocab_size: int,
               count_correct: bool = False, plain: bool = False, weights: Tensor | None = None,
               device: torch.device | None = None, form: TokenLoss = TokenLoss()) -> LossSums:
    """Return the cross-entropy in float32 of `head(hidden)` against `targets`, over positions that are not IGNORED.

    Args:
        hidden: [B, T, H] hidden states, already aligned with `targets`.
        targets: [B, T] token ids or IGNORED.
        head: Maps [N, H] to logits [N, V]. If its attribute `linear` is not None, the head must equal this layer
            followed by its `scale` and `softcap`, if any; see `_LinearHead`.
        params: Trainable parameters of the head.
        vocab_size: V, which determines the chunk length.
        count_correct: Also count correct argmax predictions, with one more pass over the logits.
        plain: Compute all logits at once and the gradient by autograd; `params` is then unused.
        weights: [B, T] float32, weight of each position. Default: 1.
        device: Device whose chunk length is used. Default: the device of `hidden`.
        form: Variants of the cross-entropy, such as label smoothing.
    """
    def compute(logits: Tensor, targets: Tensor) -> PositionValues:
        losses, gradient = cross_entropies(logits, targets, form)
        return [losses], gradient

    return sum_over_positions(compute, 1, hidden, [targets], head, params, vocab_size, count_correct, plain, weights,
                              device)[0]


# S values [n] of n positions, and a function for the gradient [n, V] of the first value by the logits. It is called
# last, at most once, and may overwrite the arrays from which the values were computed.
PositionValues = tuple[list[Tensor], Callable[[], Tensor]]


def sum_over_positions(compute: Callable[..., PositionValues], num_values: int, hidden: Tensor, columns: list[Tensor],
                       head: Callable[[Tensor], Tensor], params: list[Tensor], vocab_size: int, count_correct: bool,
                       plain: bool, weights: Tensor | None, device: torch.device | None) -> tuple[LossSums, Tensor]:
    """Sum values of the target positions. Return the first value's sum as the loss, and the other sums [S - 1].

    Args:
        compute: Maps float32 logits [n, V] and the n rows of each column to the values.
        num_values: S.
        columns: Tensors [B, T, ...], the targets first.

    See `token_loss` for the other arguments.
    """
    hidden, *columns = (x.flatten(0, 1) for x in (hidden, *columns))
    weights, is_target = None if weights is None else weights.flatten(), columns[0] != IGNORED
    if plain:
        weights = is_target.float() if weights is None else is_target * weights
        sums = _sum_values(compute, head(hidden).float(), columns, weights, count_correct)[0]
    else:
        # [B * T, H] -> [N, H], N target positions. `nonzero` synchronises with a GPU, once per micro-batch.
        positions = is_target.nonzero().squeeze(1)
        hidden, *columns = (x.index_select(0, positions) for x in (hidden, *columns))
        weights = None if weights is None else weights.index_select(0, positions)
        chunk_size = chunk_length(vocab_size, device or hidden.device)
        # Gradient mode is an argument, as it is always off within `forward`. The head has `params`, but autograd
        # only computes their gradients if they are arguments.
        sums = _ChunkedSums.apply(hidden, columns, weights, head, chunk_size, compute, num_values, count_correct,
                                  torch.is_grad_enabled(), *params)
    weight = sums.new_tensor(len(hidden)) if weights is None else weights.sum()
    detached = sums.detach()
    return LossSums(sums[0], weight, detached[num_values] if count_correct else None), detached[1:num_values]


def _sum_values(compute: Callable[..., PositionValues], logits: Tensor, columns: list[Tensor], weights: Tensor | None,
                count_correct: bool) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return weighted sums [S] of values, then of correct predictions if requested, and the gradient function."""
    is_correct = [(logits.argmax(-1) == columns[0]).float()] if count_correct else []
    values, gradient = compute(logits, *columns)
    return torch.stack([(x if weights is None else x * weights).sum() for x in (*values, *is_correct)]), gradient


def cross_entropies(logits: Tensor, targets: Tensor, form: TokenLoss) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return the cross-entropy [n] of logits [n, V], and a function for its gradient [n, V]."""
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
        # softmax - one_hot, in place: autograd would make two more passes. The logits may be freed by now.
        grad_logits = log_probs.exp_()
        # Factor of the one_hot, then of the softmax.
        target_factor = probabilities if form.dft else 1 - smoothing
        if form.dft or form.z_loss:
            grad_logits *= ((probabilities if form.dft else 1)
                            + (2 * form.z_loss * log_z if form.z_loss else 0)).unsqueeze(1)
        if smoothing:
            grad_logits -= smoothing / grad_logits.shape[-1]
        grad_logits[torch.arange(len(targets), device=targets.device), targets] -= target_factor
        return grad_logits

    return losses, gradient


def chunk_bytes(device: torch.device) -> int:
    """Return the approximate size in bytes of a chunk's float32 logits."""
    return CHUNK_BYTES if device.type == "cpu" else CHUNK_BYTES_GPU


def chunk_length(vocab_size: int, device: torch.device) -> int:
    """Return the number of positions of a chunk, with float32 logits [positions, V]."""
    return max(chunk_bytes(device) // (4 * vocab_size), MIN_CHUNK)


def token_log_probs(hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], params: list[Tensor],
                    vocab_size: int, plain: bool = False, device: torch.device | None = None) -> Tensor:
    """Return the log-probabilities [N] in float32 of `targets` under `head(hidden)`.

    This is for losses that are not sums over tokens: the gradient of each token depends on all tokens, so a chunk's
    logits are recomputed in the backward pass.

    Args:
        hidden: [N, H] hidden states, already aligned with `targets` [N], none of them IGNORED.

    See `token_loss` for the other arguments.
    """
    if plain:
        return F.log_softmax(head(hidden).float(), dim=-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    chunk_size = chunk_length(vocab_size, device or hidden.device)
    return _ChunkedLogProbabilities.apply(hidden, targets, head, chunk_size, *params)


class _ChunkedLogProbabilities(torch.autograd.Function):
    """Log-probabilities of tokens, in chunks that are recomputed in the backward pass."""

    @staticmethod
    def forward(ctx, hidden, targets, head, chunk_size, *params):
        device = hidden.device.type
        # `backward` runs outside the caller's autocast context.
        ctx.autocast = {"enabled": torch.is_autocast_enabled(device), "dtype": torch.get_autocast_dtype(device)}
        ctx.head, ctx.chunk_size = head, chunk_size
        ctx.save_for_backward(hidden, targets, *params)
        products = wrap_head(head, params)
        target_log_probs = hidden.new_empty(len(targets), dtype=torch.float32)
        for start in range(0, len(targets), chunk_size):
            rows = slice(start, start + chunk_size)
            log_probs = F.log_softmax(products.forward(hidden[rows], False).float(), dim=-1)  # [n, V]
            target_log_probs[rows] = log_probs.gather(1, targets[rows].unsqueeze(1)).squeeze(1)
        return target_log_probs

    @staticmethod
    def backward(ctx, grad):
        hidden, targets, *params = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        with torch.autocast(hidden.device.type, **ctx.autocast):
            products = wrap_head(ctx.head, params)
            for start in range(0, len(targets), ctx.chunk_size):
                rows = slice(start, start + ctx.chunk_size)
                # d log p / d logits = one_hot - softmax: negated here, and again by the factor -grad.
                grad_logits = F.softmax(products.forward(hidden[rows], True).float(), dim=-1)
                grad_logits[torch.arange(len(grad_logits), device=hidden.device), targets[rows]] -= 1
                grad_hidden[rows] = products.backward(grad_logits.mul_(-grad[rows].unsqueeze(1)))
            return grad_hidden, None, None, None, *products.param_grads(params)  # targets, head and chunk have none


def wrap_head(head: Callable[[Tensor], Tensor], params: tuple[Tensor, ...] | list[Tensor]) -> "_AnyHead | _LinearHead":
    layer = getattr(head, "linear", None)
    if layer is None:
        return _AnyHead(head, params)
    return _LinearHead(layer, getattr(head, "scale", 1.0), getattr(head, "softcap", None))


class _ChunkedSums(torch.autograd.Function):
    """Sums over positions in chunks, with the gradient of the first sum, in one pass.

    Computing the gradient in the forward pass follows Liger Kernel's fused linear cross-entropy (Hsu et al. 2024).
    Autograd differentiates heads other than a matrix with scale and soft cap, such as heads with bias or adapter.
    """

    @staticmethod
    def forward(ctx, hidden, columns, weights, head, chunk_size, compute, num_values, count_correct, is_training,
                *params):
        # `needs_input_grad` is also set under `no_grad`, when a model with trainable parameters is evaluated.
        needs_grad = is_training and any(ctx.needs_input_grad)
        products = wrap_head(head, params)
        sums = torch.zeros(num_values + count_correct, dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden) if needs_grad else None
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            chunk_weights = None if weights is None else weights[rows]
            # No variable refers to the logits, so that they are freed before the gradient is computed.
            chunk_sums, gradient = _sum_values(compute, products.forward(hidden[rows], needs_grad).float(),
                                               [column[rows] for column in columns], chunk_weights, count_correct)
            sums += chunk_sums
            grad_logits = gradient() if needs_grad else None
            if needs_grad:
                if weights is not None:
                    grad_logits *= chunk_weights.unsqueeze(1)
                grad_hidden[rows] = products.backward(grad_logits)  # [n, V] -> [n, H]
        if needs_grad:
            # Gradients of the first sum; `backward` multiplies them by the incoming gradient.
            ctx.save_for_backward(grad_hidden, *products.param_grads(params))
        return sums

    @staticmethod
    def backward(ctx, grad_sums):
        # In place is safe: only this node has these tensors, and they are freed before a second backward pass.
        grad_hidden, *grads = (grad.mul_(grad_sums[0].to(grad.dtype)) for grad in ctx.saved_tensors)
        return grad_hidden, None, None, None, None, None, None, None, None, *grads


class _AnyHead:
    """A head differentiated by autograd, one chunk at a time; gradients are summed in float32."""

    def __init__(self, head: Callable[[Tensor], Tensor], params: tuple[Tensor, ...] | list[Tensor]) -> None:
        self._head, self._params = head, params
        self._sums: list[Tensor] = []

    def forward(self, chunk: Tensor, needs_grad: bool) -> Tensor:
        # A graph per chunk, detached from the network's graph and freed by `backward`.
        with torch.set_grad_enabled(needs_grad):
            self._chunk = chunk.detach().requires_grad_(needs_grad)
            self._logits = self._head(self._chunk)
        return self._logits.detach()

    def backward(self, grad_logits: Tensor) -> Tensor:
        # `autograd.grad` leaves the parameters' `.grad` alone: the outer graph adds to it.
        grad, *param_grads = torch.autograd.grad(self._logits, [self._chunk, *self._params],
                                                 grad_logits.to(self._logits.dtype))
        if self._sums:
            add_to_all(self._sums, [grad_sum.float() for grad_sum in param_grads])
        else:
            self._sums = [grad_sum.float() for grad_sum in param_grads]
        return grad

    def param_grads(self, params: tuple[Tensor, ...]) -> list[Tensor]:
        sums = self._sums or [torch.zeros_like(p) for p in params]  # there was no target, so no chunk ran
        return [grad.to(p.dtype) for grad, p in zip(sums, params, strict=True)]


class _LinearHead:
    """A head that is one matrix: its gradient is accumulated by the matrix product, and it is cast once for all chunks.

    Args:
        scale: Factor on the logits.
        softcap: c of the soft cap c tanh(logits / c) after the scale (Gemma 2); None for no cap.
    """

    def __init__(self, layer: torch.nn.Linear, scale: float = 1.0, softcap: float | None = None) -> None:
        device = layer.weight.device.type
        autocast = torch.is_autocast_enabled(device)
        self._dtype = torch.get_autocast_dtype(device) if autocast else layer.weight.dtype
        self._weight = layer.weight.detach().to(self._dtype)  # autocast would cast it in every chunk
        self._trains, self._sum = layer.weight.requires_grad, None
        self._scale, self._softcap = scale, softcap
        self._tanh: Tensor | None = None

    def forward(self, chunk: Tensor, needs_grad: bool) -> Tensor:
        self._chunk = chunk.detach().to(self._dtype)
        logits = self._chunk @ self._weight.t()
        if self._scale != 1:
            logits *= self._scale
        if self._softcap is None:
            return logits
        tanh = logits.div_(self._softcap).tanh_()
        self._tanh = tanh if needs_grad else None  # only `backward` reads it
        return tanh * self._softcap

    def backward(self, grad_logits: Tensor) -> Tensor:
        # In place, back through soft cap and scale: no caller needs `grad_logits` afterwards.
        if self._tanh is not None:  # tanh' = 1 - tanh^2, in float32
            grad_logits *= self._tanh.float().square_().neg_().add_(1)
        if self._scale != 1:
            grad_logits *= self._scale
        grad = grad_logits.to(self._dtype)
        # [n, V]^T [n, H] -> [V, H], summed over chunks in float32, as 16 bits would lose small terms.
        # `addmm_` supports a single dtype, so 16-bit products are added separately.
        if self._trains and self._sum is None:
            self._sum = (grad.t() @ self._chunk).float()
        elif self._trains and self._dtype == torch.float32:
            self._sum.addmm_(grad.t(), self._chunk)
        elif self._trains:
            self._sum += grad.t() @ self._chunk
        return grad @ self._weight

    def param_grads(self, params: tuple[Tensor, ...]) -> list[Tensor]:
        return [torch.zeros_like(p) if self._sum is None else self._sum.to(p.dtype) for p in params]
