"""Cross-entropy of the labelled tokens, as a sum and a weight.

The output head is by far the widest layer of a small model, and most positions of a fine-tuning batch have no label.
So the head is applied to labelled positions only, in chunks, and its gradient is computed in the forward pass: neither
[B, T, V] nor [N, V] logits are ever materialised, and nothing is computed twice.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lmmods.core.labels import IGNORED
from lmmods.core.memory import CHUNK_BYTES, CHUNK_BYTES_GPU, LEAST_CHUNK
from lmmods.core.settings import LEAST, NOTHING, Divergence, TokenLoss
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


class Guide(NamedTuple):
    """What a teacher says of the same positions; nothing of it is differentiated.

    Args:
        hidden: [B, T, H'] its hidden states, or [N, H'] of the scored positions.
        head: Maps [N, H'] to logits [N, V'], as in `token_loss`.
        drawn: [B, T] or [N] float32, 1 where the student has drawn the token to predict, else 0; None is 0 throughout.
    """

    hidden: Tensor
    head: Callable[[Tensor], Tensor]
    drawn: Tensor | None = None


class Likeliest(NamedTuple):
    """A teacher's likeliest tokens at the same positions; all other tokens are taken together as one.

    Args:
        ids: [B, T, k], or [N, k] of the scored positions.
        logps: [B, T, k + 1] or [N, k + 1] float32, log-probability of each, and of the others together.
        size: Tokens that the distributions are over.
    """

    ids: Tensor
    logps: Tensor
    size: int


def shift_labels(labels: Tensor) -> Tensor:
    """Shift labels [B, T] so that position t holds the token to predict there; the last one is IGNORED."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def shift_weights(weights: Tensor | None) -> Tensor | None:
    """Shift weights [B, T] of labels in the same way as `shift_labels`."""
    return None if weights is None else F.pad(weights[:, 1:], (0, 1))


def token_loss(hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], params: list[Tensor], vocab_size: int,
               count_correct: bool = False, plain: bool = False, weights: Tensor | None = None,
               device: torch.device | None = None, form: TokenLoss = TokenLoss(),
               guide: Guide | Likeliest | None = None) -> LossSums:
    """Cross-entropy in float32 of `head(hidden)` against `targets`, over positions that are not IGNORED.

    With a teacher it is mixed with the divergence from it, and `metrics` are the sums of the two, `form.metric_names`.
    Of tokens that the student has drawn the divergence is all of the loss; they have no cross-entropy.

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
        guide: The teacher, where `form` has a divergence.
    """
    if plain:
        return _plain_loss(head(hidden.flatten(0, 1)).float(), targets.flatten(), count_correct, weights, form, guide)
    # [B, T, H] -> [N, H], N labelled positions. `nonzero` synchronises with a GPU, once per micro-batch.
    scored = (targets != IGNORED).flatten().nonzero().squeeze(1)
    hidden = hidden.flatten(0, 1).index_select(0, scored)
    targets = targets.flatten().index_select(0, scored)
    weights = None if weights is None else weights.flatten().index_select(0, scored)
    chunk = _chunk_length(vocab_size, device or hidden.device)
    # Gradient mode is an argument, as it is always off inside `forward`. The head holds `params` already; passing them
    # makes autograd ask for their gradients.
    if guide is not None:
        guide = _each(guide, lambda x: x.flatten(0, 1).index_select(0, scored))
    total, correct, parts = _ChunkedCrossEntropy.apply(hidden, targets, weights, head, chunk, count_correct, form,
                                                       guide, torch.is_grad_enabled(), *params)
    weight = total.new_tensor(len(targets)) if weights is None else weights.sum()
    return LossSums(total, weight, correct if count_correct else None,
                    _metrics(parts, targets, weights, weight, form, guide))


def _each(guide: Guide | Likeliest, function: Callable[[Tensor], Tensor]) -> Guide | Likeliest:
    """Return a guide with its tensors changed."""
    return type(guide)(*(function(part) if torch.is_tensor(part) else part for part in guide))


def _metrics(parts: Tensor, targets: Tensor, weights: Tensor | None, weight: Tensor, form: TokenLoss,
             guide: Guide | Likeliest | None) -> Tensor | None:
    """Return the sums and weights [M, 2] of `form.metric_names`; None without a teacher.

    Args:
        parts: [2] summed divergence and cross-entropy.
        targets: [N].
        weights: [N]; None for 1.
        weight: Their sum.
    """
    if guide is None:
        return None
    if not form.divergence.on_policy:
        return torch.stack([parts.detach(), weight.expand(2)], 1)
    drawn = weight.new_zeros(targets.shape) if _drawn(guide) is None else guide.drawn
    of_drawn = (drawn if weights is None else drawn * weights).sum()
    return torch.stack([torch.cat([parts.detach(), of_drawn[None]]), torch.stack([weight, weight - of_drawn, weight])],
                       1)


def _drawn(guide: Guide | Likeliest | None) -> Tensor | None:
    """Return `Guide.drawn`, if there is such."""
    return guide.drawn if isinstance(guide, Guide) else None


def chunk_bytes(device: torch.device) -> int:
    """Return the approximate bytes of a chunk's float32 logits."""
    return CHUNK_BYTES if device.type == "cpu" else CHUNK_BYTES_GPU


def _chunk_length(vocab_size: int, device: torch.device) -> int:
    """Return the positions of a chunk."""
    # [positions, V] float32 logits
    return max(chunk_bytes(device) // (4 * vocab_size), LEAST_CHUNK)


def _plain_loss(logits: Tensor, targets: Tensor, count_correct: bool, weights: Tensor | None, form: TokenLoss,
                guide: Guide | Likeliest | None) -> LossSums:
    scored = (targets != IGNORED).float()
    weights = scored if weights is None else scored * weights.flatten()
    # Per position, as weights differ; IGNORED ones have loss and weight 0.
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none",
                             label_smoothing=form.label_smoothing)
    if form.dft:  # the cross-entropy is -log p
        losses = losses * torch.exp(-losses.detach())
    if form.z_loss:
        losses = losses + form.z_loss * logits.logsumexp(-1).square()
    total, weight, parts = (losses * weights).sum(), weights.sum(), None
    if guide is not None:
        taught = _each(guide, lambda x: x.flatten(0, 1))
        if isinstance(taught, Guide):
            with torch.no_grad():
                taught = taught.head(taught.hidden).float()
        # Positions that are not scored have finite logits, too.
        diverging, ratio = divergences(logits, taught, form.divergence)[0] * weights, form.divergence.ratio
        divergence = counted = diverging.sum()
        if (drawn := _drawn(guide)) is None:
            counted = ratio * counted
        else:
            guide = guide._replace(drawn=drawn.flatten())
            counted = (diverging * (ratio + (1 - ratio) * guide.drawn)).sum()
            total = (losses * weights * (1 - guide.drawn)).sum()
        parts = torch.stack([divergence, total])
        total = counted + (1 - ratio) * total
    correct = ((logits.argmax(-1) == targets) * weights).sum() if count_correct else None
    return LossSums(total, weight, correct, _metrics(parts, targets, weights, weight, form, guide))


def divergences(logits: Tensor, taught: Tensor | Likeliest, form: Divergence) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return the divergence [n] of a student's logits [n, V] from a teacher's [n, V'], and what computes its gradient.

    Columns that only one of the two has are padding of its vocabulary, and left out. The gradient [n, V] is that by
    `logits`, of each position's divergence.
    """
    is_partial = isinstance(taught, Likeliest)
    size = min(logits.shape[-1], taught.size if is_partial else taught.shape[-1])
    student = whole = F.log_softmax(logits[:, :size] / form.temperature, dim=-1)
    if is_partial:
        student, teacher = _grouped(whole, taught.ids), taught.logps.clamp(min=LEAST)
    else:
        teacher = F.log_softmax(taught[:, :size] / form.temperature, dim=-1)
    beta = form.beta
    if beta == 0:
        found = (teacher.exp() * (teacher - student)).sum(-1)
    elif beta == 1:
        found = (student.exp() * (student - teacher)).sum(-1)
    else:
        mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
        found = (beta * teacher.exp() * (teacher - mixture) + (1 - beta) * student.exp() * (student - mixture)).sum(-1)

    def gradient() -> Tensor:
        # Through the softmax: p (g - sum p g), with g the derivative by p: -T / S, log(S / T) or (1 - beta) log(S / M).
        if beta == 0:
            by_logits = student.exp() - teacher.exp()
        else:
            p = student.exp()
            g = student - teacher if beta == 1 else (1 - beta) * (student - mixture)
            by_logits = p * (g - (p * g).sum(-1, keepdim=True))
        if is_partial:  # of the others together, each has its share
            others = (whole - student[:, -1:]).clamp(max=0).exp() * by_logits[:, -1:]
            by_logits = others.scatter(1, taught.ids, by_logits[:, :-1])
        return F.pad(by_logits / form.temperature, (0, logits.shape[-1] - size))

    return found, gradient


def _grouped(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Return log-probabilities [n, k + 1] of the tokens `ids` [n, k], and of all others together, from all [n, V]."""
    others = log_probs.scatter(1, ids, NOTHING).logsumexp(-1, keepdim=True)
    return torch.cat([log_probs.gather(1, ids), others], 1).clamp(min=LEAST)


def likeliest(guide: Guide, size: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a teacher's likeliest tokens [N, k] at positions [N], and their log-probabilities [N, k + 1].

    Args:
        size: Tokens that its distributions are over.
        device: As in `token_loss`.
    """
    chunk, found = _chunk_length(size, device), []
    products = _products(guide.head, ())
    for start in range(0, len(guide.hidden), chunk):
        log_probs = F.log_softmax(products.forward(guide.hidden[start : start + chunk], False).float()[:, :size], -1)
        ids = log_probs.topk(top_k, -1).indices
        found.append((ids, _grouped(log_probs, ids)))
    if not found:
        return guide.hidden.new_empty(0, top_k, dtype=torch.long), guide.hidden.new_empty(0, top_k + 1).float()
    return tuple(map(torch.cat, zip(*found, strict=True)))


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
    chunk = _chunk_length(vocab_size, device or hidden.device)
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
        products = _products(head, params)
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
            products = _products(ctx.head, params)
            for start in range(0, len(targets), ctx.chunk):
                part = slice(start, start + ctx.chunk)
                # d log p / d logits = one_hot - softmax: negated here, and again by the factor -grad.
                grad_logits = F.softmax(products.forward(hidden[part], True).float(), dim=-1)
                grad_logits[torch.arange(len(grad_logits), device=hidden.device), targets[part]] -= 1
                grad_hidden[part] = products.backward(grad_logits.mul_(-grad[part].unsqueeze(1)))
            return grad_hidden, None, None, None, *products.param_grads(params)  # targets, head and chunk have none


def _products(head: Callable[[Tensor], Tensor], params: tuple[Tensor, ...] | list[Tensor]) -> "_AnyHead | _LinearHead":
    layer = getattr(head, "linear", None)
    if layer is None:
        return _AnyHead(head, params)
    return _LinearHead(layer, getattr(head, "scale", 1.0), getattr(head, "softcap", None))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and gradient in chunks, in one pass.

    Computing the gradient in the forward pass follows Liger Kernel's fused linear cross-entropy (Hsu et al. 2024).
    Heads other than a matrix with scale and soft cap, such as those with bias or adapter, are left to autograd.
    """

    @staticmethod
    def forward(ctx, hidden, targets, weights, head, chunk, count_correct, form, guide, is_training, *params):
        # `needs_input_grad` is set under `no_grad` too, as when a model with trainable parameters is evaluated.
        wants_grad = is_training and any(ctx.needs_input_grad)
        products = _products(head, params)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        correct, parts = torch.zeros_like(total), total.new_zeros(2)  # of the loss: divergence and cross-entropy
        ratio = form.divergence.ratio if guide is not None else 0.0
        drawn = _drawn(guide)
        mixes = ratio > 0 or drawn is not None
        teacher = _products(guide.head, ()) if isinstance(guide, Guide) else None
        grad_hidden = torch.zeros_like(hidden) if wants_grad else None
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = products.forward(hidden[part], wants_grad).float()
            log_probs = F.log_softmax(logits, dim=-1)  # [n, V]
            picked = log_probs.gather(1, targets[part].unsqueeze(1)).squeeze(1)
            losses, smoothing = -picked, form.label_smoothing
            if smoothing:
                losses = (1 - smoothing) * losses - smoothing * log_probs.mean(-1)
            if form.dft:
                probabilities = picked.exp()
                losses = losses * probabilities
            if form.z_loss:
                log_z = logits.gather(1, targets[part].unsqueeze(1)).squeeze(1) - picked
                losses = losses + form.z_loss * log_z.square()
            if guide is not None:
                taught = (_each(guide, lambda x, part=part: x[part]) if teacher is None
                          else teacher.forward(guide.hidden[part], False).float())
                diverging, gradient = divergences(logits, taught, form.divergence)
                share = ratio
                if drawn is not None:
                    losses = losses * (1 - drawn[part])
                    share = ratio + (1 - ratio) * drawn[part]
                parts += _summed(torch.stack([diverging, losses]), part, weights)
                losses = share * diverging + (1 - share) * losses
                by_divergence = gradient().mul_(_column(share)) if wants_grad and mixes else None
                del taught, gradient
            del logits
            total += _summed(losses, part, weights)
            if count_correct:
                hits = log_probs.argmax(-1) == targets[part]
                correct += (hits if weights is None else hits * weights[part]).sum()
            if wants_grad:
                # Gradient of cross-entropy, softmax - one_hot, in place: autograd would make two more passes.
                # Overwrites `log_probs`, so everything that reads them comes before.
                grad_logits = log_probs.exp_()
                # Factors of the softmax and, where `dft` weights it, of the one_hot.
                of_target = probabilities if form.dft else 1 - smoothing
                if form.dft or form.z_loss:
                    grad_logits *= ((probabilities if form.dft else 1)
                                    + (2 * form.z_loss * log_z if form.z_loss else 0)).unsqueeze(1)
                if smoothing:
                    grad_logits -= smoothing / grad_logits.shape[-1]
                grad_logits[torch.arange(len(grad_logits), device=hidden.device), targets[part]] -= of_target
                if mixes:
                    grad_logits = grad_logits.mul_(_column(1 - share)).add_(by_divergence)
                if weights is not None:
                    grad_logits *= weights[part].unsqueeze(1)
                grad_hidden[part] = products.backward(grad_logits)  # [n, V] -> [n, H]
        if wants_grad:
            # Gradients of `total` itself; `backward` multiplies them by its incoming gradient.
            ctx.save_for_backward(grad_hidden, *products.param_grads(params))
        ctx.mark_non_differentiable(correct, parts)
        return total, correct, parts

    @staticmethod
    def backward(ctx, grad_total, _grad_correct, _grad_parts):
        # In place is safe: only this node holds these tensors, and a second backward pass finds them freed.
        grad_hidden, *grads = (grad.mul_(grad_total.to(grad.dtype)) for grad in ctx.saved_tensors)
        return grad_hidden, None, None, None, None, None, None, None, None, *grads


def _column(share: float | Tensor) -> float | Tensor:
    """Return a factor of positions [n] as one of their logits [n, V]."""
    return share.unsqueeze(1) if torch.is_tensor(share) else share


def _summed(values: Tensor, part: slice, weights: Tensor | None) -> Tensor:
    """Return the weighted sum of values [..., n] of a chunk's positions."""
    return (values if weights is None else values * weights[part]).sum(-1)


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
