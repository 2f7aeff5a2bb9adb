"""Cross-entropy of the labelled tokens, as a sum and a weight.

The output head is by far the widest layer of a small model, and most positions of a fine-tuning batch carry no
label. So the head sees labelled positions only, a chunk at a time, and its gradient is taken on the way forward:
neither [B, T, V] nor [N, V] logits ever exist, and nothing is computed twice.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lmmods.core.labels import IGNORED
from lmmods.torch_engine.compat.torch import add_to_all
from lmmods.torch_engine.nn.cpu_kernels import onednn_products

# The float32 logits of one chunk take about this many bytes. Each chunk reads the head's weights anew, and where they
# train also their gradient, which on GPUs costs more than the memory; on CPUs larger chunks gain no speed.
CHUNK_BYTES = 32 * 2**20
CHUNK_BYTES_GPU = 256 * 2**20


@contextmanager
def chunks_of_gpus() -> Iterator[None]:
    """While tensors on this processor stand in for those of a GPU."""
    global CHUNK_BYTES
    before, CHUNK_BYTES = CHUNK_BYTES, CHUNK_BYTES_GPU
    try:
        yield
    finally:
        CHUNK_BYTES = before


class LossSums(NamedTuple):
    """Sums over the scored positions of a batch; every loss of every task is one of these.

    Args:
        total: Summed loss, scalar float32, differentiable.
        weight: Number of scored positions, each counted by its weight, scalar float32.
        correct: Those of them that the argmax gets right, counted likewise, scalar float32; None unless asked for.
        metrics: Of each metric of the task its summed values and their weight, [M, 2] float32; None where it has none.
    """

    total: Tensor
    weight: Tensor
    correct: Tensor | None = None
    metrics: Tensor | None = None


def shift_labels(labels: Tensor) -> Tensor:
    """Labels [B, T] moved so that position t holds the token it predicts; the last position predicts nothing."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def shift_weights(weights: Tensor | None) -> Tensor | None:
    """Weights [B, T] of labels, moved as `shift_labels` moves these."""
    return None if weights is None else F.pad(weights[:, 1:], (0, 1))


def token_loss(hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], params: list[Tensor], vocab_size: int,
               count_correct: bool = False, plain: bool = False, weights: Tensor | None = None) -> LossSums:
    """Cross-entropy in float32 of `head(hidden)` against `targets`, over positions that are not IGNORED.

    Args:
        hidden: [B, T, H] hidden states, already aligned with `targets`.
        targets: [B, T] token ids or IGNORED.
        head: Maps [N, H] to logits [N, V]. Where it has an attribute `linear` that is not None, it is this layer, then
            `scale` and `softcap` where it has them: see `_LinearHead`.
        vocab_size: V, which decides the chunk length.
        count_correct: Also count argmax hits (one more pass over the logits).
        plain: Make the logits of all positions at once and leave the gradient to autograd; `params` is then not used.
        weights: [B, T] float32, how much each position counts; None is 1.
    """
    if plain:
        return _plain_loss(head(hidden.flatten(0, 1)).float(), targets.flatten(), count_correct, weights)
    scored = (targets != IGNORED).flatten().nonzero().squeeze(1)
    hidden = hidden.flatten(0, 1).index_select(0, scored)
    targets = targets.flatten().index_select(0, scored)
    weights = None if weights is None else weights.flatten().index_select(0, scored)
    chunk = max((CHUNK_BYTES if hidden.device.type == "cpu" else CHUNK_BYTES_GPU) // (4 * vocab_size), 1)
    total, correct = _ChunkedCrossEntropy.apply(hidden, targets, weights, head, chunk, count_correct,
                                                torch.is_grad_enabled(), *params)
    weight = total.new_tensor(len(targets)) if weights is None else weights.sum()
    return LossSums(total, weight, correct if count_correct else None)


def _plain_loss(logits: Tensor, targets: Tensor, count_correct: bool, weights: Tensor | None) -> LossSums:
    scored = (targets != IGNORED).float()
    weights = scored if weights is None else scored * weights.flatten()
    total = (F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none") * weights).sum()
    correct = ((logits.argmax(-1) == targets) * weights).sum() if count_correct else None
    return LossSums(total, weights.sum(), correct)


def token_log_probs(hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], params: list[Tensor],
                    vocab_size: int, plain: bool = False) -> Tensor:
    """Log-probabilities [N] in float32 of `targets` under `head(hidden)`, for losses that are no sum over tokens.

    How much each counts is known only when all are, so a chunk's logits are made again in the backward pass.

    Args:
        hidden: [N, H] hidden states, already aligned with `targets` [N], which are all scored.
        head: As in `token_loss`, and so are the others.
    """
    if plain:
        return F.log_softmax(head(hidden).float(), dim=-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    chunk = max((CHUNK_BYTES if hidden.device.type == "cpu" else CHUNK_BYTES_GPU) // (4 * vocab_size), 1)
    return _ChunkedLogProbabilities.apply(hidden, targets, head, chunk, *params)


class _ChunkedLogProbabilities(torch.autograd.Function):
    """Log-probabilities of tokens chunk by chunk, once forward and once more in the backward pass."""

    @staticmethod
    def forward(ctx, hidden, targets, head, chunk, *params):
        device = hidden.device.type
        ctx.autocast = {"enabled": torch.is_autocast_enabled(device), "dtype": torch.get_autocast_dtype(device)}
        ctx.head, ctx.chunk = head, chunk
        ctx.save_for_backward(hidden, targets, *params)
        products = _products(head, params)
        found = hidden.new_empty(len(targets), dtype=torch.float32)
        for part, fast in _chunks(len(targets), chunk, head, hidden):
            with fast:
                log_probs = F.log_softmax(products.forward(hidden[part], False).float(), dim=-1)
            found[part] = log_probs.gather(1, targets[part].unsqueeze(1)).squeeze(1)
        return found

    @staticmethod
    def backward(ctx, grad):
        hidden, targets, *params = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        with torch.autocast(hidden.device.type, **ctx.autocast):
            products = _products(ctx.head, params)
            for part, fast in _chunks(len(targets), ctx.chunk, ctx.head, hidden):
                with fast:
                    grad_logits = F.softmax(products.forward(hidden[part], True).float(), dim=-1)
                    grad_logits[torch.arange(len(grad_logits), device=hidden.device), targets[part]] -= 1
                    grad_hidden[part] = products.backward(grad_logits.mul_(-grad[part].unsqueeze(1)))
            return grad_hidden, None, None, None, *products.param_grads(params)


def _products(head: Callable[[Tensor], Tensor], params: tuple[Tensor, ...] | list[Tensor]) -> "_AnyHead | _LinearHead":
    layer = getattr(head, "linear", None)
    if layer is None:
        return _AnyHead(head, params)
    return _LinearHead(layer, getattr(head, "scale", 1.0), getattr(head, "softcap", None))


def _chunks(num: int, chunk: int, head: Callable[[Tensor], Tensor], hidden: Tensor
            ) -> Iterator[tuple[slice, AbstractContextManager]]:
    """Parts of so many positions, and a context in which their products are fast."""
    is_matrix = getattr(head, "linear", None) is not None
    for start in range(0, num, chunk):
        # oneDNN keeps what it makes for each shape, so it gets the one shape that comes again and again
        fast = is_matrix and hidden.device.type == "cpu" and start + chunk <= num
        yield slice(start, start + chunk), onednn_products() if fast else nullcontext()


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and gradient chunk by chunk in one pass.

    Taking the gradient in the forward pass is the idea of Liger Kernel's fused linear cross-entropy (Hsu et al.
    2024). Autograd differentiates any head but a matrix with scale and soft cap, so one with bias or adapter is right.
    """

    @staticmethod
    def forward(ctx, hidden, targets, weights, head, chunk, count_correct, is_training, *params):
        wants_grad = is_training and any(ctx.needs_input_grad)
        products = _products(head, params)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        correct = torch.zeros_like(total)
        grad_hidden = torch.zeros_like(hidden) if wants_grad else None
        for part, fast in _chunks(len(targets), chunk, head, hidden):
            with fast:
                log_probs = F.log_softmax(products.forward(hidden[part], wants_grad).float(), dim=-1)
                picked = log_probs.gather(1, targets[part].unsqueeze(1)).squeeze(1)
                total -= (picked if weights is None else picked * weights[part]).sum()
                if count_correct:
                    hits = log_probs.argmax(-1) == targets[part]
                    correct += (hits if weights is None else hits * weights[part]).sum()
                if wants_grad:
                    # The gradient of cross-entropy by hand, in place: autograd would pass over the logits twice more.
                    grad_logits = log_probs.exp_()
                    grad_logits[torch.arange(len(grad_logits), device=hidden.device), targets[part]] -= 1
                    if weights is not None:
                        grad_logits *= weights[part].unsqueeze(1)
                    grad_hidden[part] = products.backward(grad_logits)
        if wants_grad:
            ctx.save_for_backward(grad_hidden, *products.param_grads(params))
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    def backward(ctx, grad_total, _grad_correct):
        # In place: the tensors are nobody else's, and a second backward pass finds them gone.
        grad_hidden, *grads = (grad.mul_(grad_total.to(grad.dtype)) for grad in ctx.saved_tensors)
        return grad_hidden, None, None, None, None, None, None, *grads


class _AnyHead:
    """A head that autograd differentiates, chunk by chunk."""

    def __init__(self, head: Callable[[Tensor], Tensor], params: tuple[Tensor, ...] | list[Tensor]) -> None:
        self._head, self._params = head, params
        self._sums: list[Tensor] = []

    def forward(self, piece: Tensor, wants_grad: bool) -> Tensor:
        with torch.set_grad_enabled(wants_grad):
            self._piece = piece.detach().requires_grad_(wants_grad)
            self._logits = self._head(self._piece)
        return self._logits.detach()

    def backward(self, grad_logits: Tensor) -> Tensor:
        grad, *rest = torch.autograd.grad(self._logits, [self._piece, *self._params],
                                          grad_logits.to(self._logits.dtype))
        if self._sums:
            add_to_all(self._sums, [new.float() for new in rest])
        else:
            self._sums = [new.float() for new in rest]
        return grad

    def param_grads(self, params: tuple[Tensor, ...]) -> list[Tensor]:
        sums = self._sums or [torch.zeros_like(p) for p in params]
        return [grad.to(p.dtype) for grad, p in zip(sums, params, strict=True)]


class _LinearHead:
    """A head that is one matrix: its gradient is added up inside the product, and it is cast once for all chunks.

    Args:
        scale: Factor on the logits.
        softcap: Then they are c tanh(logits / c) with this c (Gemma 2); None leaves them.
    """

    def __init__(self, layer: torch.nn.Linear, scale: float = 1.0, softcap: float | None = None) -> None:
        device = layer.weight.device.type
        autocast = torch.is_autocast_enabled(device)
        self._dtype = torch.get_autocast_dtype(device) if autocast else layer.weight.dtype
        self._weight = layer.weight.detach().to(self._dtype)
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
        self._squashed = squashed if wants_grad else None
        return squashed * self._softcap

    def backward(self, grad_logits: Tensor) -> Tensor:
        if self._squashed is not None:  # tanh' = 1 - tanh^2, in float32
            grad_logits *= self._squashed.float().square_().neg_().add_(1)
        if self._scale != 1:
            grad_logits *= self._scale
        grad = grad_logits.to(self._dtype)
        if self._trains and self._sum is None:
            self._sum = (grad.t() @ self._piece).float()
        elif self._trains and self._dtype == torch.float32:
            self._sum.addmm_(grad.t(), self._piece)
        elif self._trains:
            self._sum += grad.t() @ self._piece
        return grad @ self._weight

    def param_grads(self, params: tuple[Tensor, ...]) -> list[Tensor]:
        return [torch.zeros_like(p) if self._sum is None else self._sum.to(p.dtype) for p in params]
