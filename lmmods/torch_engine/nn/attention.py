"""Attention kernels that replace transformers' default, registered as attention implementations.

Packed rows on CUDA: flash attention per document. From `position_ids` that restart, transformers makes a mask
[B, 1, T, T], which torch's flash kernel does not support. torch's kernel for sequences of varying length only needs the
start of each document.

Short rows on CPUs: float32, and matrix products instead of torch's flash kernel, where these are faster.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmmods.core.console import say
from lmmods.core.errors import UserError, first_line, one_line
from lmmods.torch_engine.compat.transformers import attention_name, can_change_attention
from lmmods.torch_engine.nn.cpu_kernels import thin_products, uses_onednn
from lmmods.torch_engine.nn.lm_head import network_inputs

VARLEN, CPU = "varlen", "sdpa_cpu"
# Maximum number of tokens for float32. Measured with torch 2.13, forward and backward, 6 heads of size 64, two Zen 4
# cores: float32 takes 33-50 % of bfloat16's time at 112 to 168 tokens, 100 % at 320 to 512, and 150 % from 1,024.
FLOAT32_LENGTH = 384
# Maximum number of scores of a row, over all heads, for which matrix products by oneDNN are faster than the flash
# kernel: they take 60 to 75 % of its time on a Zen 5 core.
MAX_SCORES = 2**20
# Maximum number of scores per head without gradients: up to 160 tokens products take 15 to 70 % of the kernel's time,
# from 256 on about twice its time, as the kernel then stores no weights.
MAX_SCORES_FORWARD = 160**2
Kernel = Callable[..., Tensor]


@contextmanager
def attention_errors(name: str | None) -> Iterator[None]:
    """Convert transformers' errors about `model.attention` to UserError."""
    try:
        yield
    except (ImportError, ValueError) as error:
        if name is None or isinstance(error, ValueError) and "attention" not in str(error) and "attn" not in str(error):
            raise
        package = {"flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3"}.get(name)
        raise UserError(f"model.attention is {name!r}, which does not work here: {one_line(error)[:300]} "
                        + (f"Install the package {package} (for CUDA), or set" if package else "Set")
                        + " model.attention to sdpa, eager or null; null uses the fastest available.") from error


def say_eager(model: nn.Module) -> None:
    """Report that transformers uses eager attention for this architecture, and why."""
    if attention_name(model) != "eager":
        return
    config = model.config.get_text_config()
    cap = getattr(config, "attn_logit_softcapping", None)
    reason = f"sdpa cannot cap scores at {cap:g}" if cap else "transformers has no sdpa for it"
    say(f"Attention: {config.model_type} uses eager, which keeps all scores in memory: {reason}.")


def prefer_varlen(model: nn.Module, kernel: Kernel | None = None) -> None:
    """Switch `model` from sdpa to the kernel for packed rows if it applies and agrees with sdpa; report the choice.

    Args:
        kernel: Replaces torch.nn.attention.varlen.varlen_attn, which requires CUDA.
    """
    cuda = model.get_input_embeddings().weight.device.type == "cuda"
    if attention_name(model) != "sdpa" or not (cuda or kernel):
        return
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface, AttentionMaskInterface

    problem = _unsupported_reason(model)
    if problem is None:
        AttentionInterface.register(VARLEN, _Varlen(kernel or varlen_attn))
        AttentionMaskInterface.register(VARLEN, _mask)
        # Keep the kernel only if it does not change the logits of a packed row.
        expected = _packed_logits(model)
        model.set_attn_implementation(VARLEN)
        problem = _disagreement(model, expected)
        if problem is not None:
            model.set_attn_implementation("sdpa")
    say("Attention: " + ("torch's flash kernel for documents of packed rows, which agrees with sdpa." if problem is None
                         else f"sdpa, because the kernel for packed rows {problem}."))


def prefer_cpu_kernels(model: nn.Module, precision: str) -> None:
    """Switch `model` from sdpa to the fastest kernels for short rows on a CPU.

    Args:
        precision: Lightning's name. Under bfloat16, attention of short rows uses float32, which is reported.
    """
    if attention_name(model) != "sdpa" or not can_change_attention(model):
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(CPU, _attend_on_cpu)
    AttentionMaskInterface.register(CPU, sdpa_mask)
    model.set_attn_implementation(CPU)
    if precision.startswith("bf16"):
        say(f"Attention: float32 for rows of up to {FLOAT32_LENGTH} tokens, which is faster than bfloat16 on CPUs.")


def _attend_on_cpu(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                   dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **options: Any
                   ) -> tuple[Tensor, None]:
    """Attention function for transformers; queries are [B, heads, T, D]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    dtype, length = compute_dtype(value), max(query.shape[2], key.shape[2])
    if dtype != torch.float32 and length > FLOAT32_LENGTH:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **options)
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.float()  # sdpa requires the dtype of the queries
    query, key, value = query.float(), key.float(), value.float()
    # Autocast would cast queries and keys back to 16 bits.
    with torch.autocast(query.device.type, enabled=False):
        if not dropout and options.get("position_bias") is None and _prefers_products(query, key, attention_mask):
            has_causal_mask = getattr(module, "is_causal", True) if is_causal is None else is_causal
            if attention_mask is None and has_causal_mask and query.shape[2] > 1:
                attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            with thin_products() if query.shape[2] == 1 else nullcontext():
                output = _Attention.apply(query, key, value, attention_mask, scale).transpose(1, 2)
        else:
            output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal,
                                               **options)
    return output.to(dtype), None


def _prefers_products(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """True if `_Attention` is faster than the flash kernel and supports the mask."""
    scores = query.shape[2] * key.shape[2]
    is_small = query.shape[1] * scores <= MAX_SCORES if torch.is_grad_enabled() else scores <= MAX_SCORES_FORWARD
    # The mask must be constant and the same for all heads. Without a mask, `tril` is causal only for square scores.
    is_plain = (query.shape[2] in (1, key.shape[2]) if mask is None
                else mask.ndim == 4 and mask.shape[1] == 1 and not mask.requires_grad)
    return uses_onednn() and is_small and is_plain


class _Attention(torch.autograd.Function):
    """softmax(scale Q K^T + mask) V by matrix products.

    The weights are recomputed in the backward pass, so that only one layer's weights are in memory at a time.

    Args:
        query: [B, H, T, D].
        key, value: [B, K, S, D] and [B, K, S, E], each for H / K heads of queries.
        mask: [B, 1, T, S] or broadcast to it: True where a query attends, or values added to the scores; or None.

    Returns:
        [B, H, T, E].
    """

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.scale = scale
        weights = _weights(_by_group(query, key), key, mask, scale)
        return torch.bmm(weights, value.flatten(0, 1)).view(*query.shape[:3], -1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        queries, grad = _by_group(query, key), _by_group(grad, key)
        weights = _weights(queries, key, mask, ctx.scale)
        grad_value = torch.bmm(weights.mT, grad)
        grad_scores = torch.bmm(grad, value.flatten(0, 1).mT)
        # The gradient of softmax: weights * (d weights - the sum of weights * d weights over a row).
        grad_scores.sub_((grad_scores * weights).sum(-1, keepdim=True)).mul_(weights).mul_(ctx.scale)
        grad_query = torch.bmm(grad_scores, key.flatten(0, 1))
        grad_key = torch.bmm(grad_scores.mT, queries)
        return grad_query.view(query.shape), grad_key.view(key.shape), grad_value.view(value.shape), None, None


def _by_group(x: Tensor, key: Tensor) -> Tensor:
    """Reshape [B, H, T, D] to [B K, H / K T, D], which concatenates the queries of a key head."""
    return x.reshape(key.shape[0] * key.shape[1], -1, x.shape[-1])


def _weights(queries: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return the attention weights [B K, H / K T, S] of queries reshaped by `_by_group`."""
    scores = torch.bmm(queries, key.flatten(0, 1).mT).mul_(scale)
    if mask is not None:
        # [B, K, H / K, T, S]; the mask [B, 1, T, S] is broadcast to it.
        by_head = scores.view(*key.shape[:2], -1, *mask.shape[-2:])
        mask = mask.unsqueeze(1)
        if mask.dtype == torch.bool:  # not -inf: its softmax over a row of padding is NaN
            by_head.masked_fill_(~mask, torch.finfo(scores.dtype).min)
        else:
            by_head.add_(mask)
    return torch.softmax(scores, -1)


def _unsupported_reason(model: nn.Module) -> str | None:
    config, dtype = model.config.get_text_config(), compute_dtype(model.get_input_embeddings().weight)
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes in 16 bits, not in {dtype}"
    if getattr(config, "sliding_window", None) is not None:
        return "is not used with a sliding window"
    if any(getattr(config, name, 0.0) for name in ("attention_dropout", "attn_pdrop")):
        return "has no attention dropout"
    return None


def _disagreement(model: nn.Module, expected: Tensor) -> str | None:
    try:
        difference = ((_packed_logits(model) - expected).norm() / expected.norm()).item()
    except (RuntimeError, ValueError, TypeError) as error:  # depends on the GPU and torch's version
        return f"fails: {first_line(error)}"
    return None if difference <= 0.05 else f"gives logits that differ by {difference:.1%}"


@torch.no_grad()
def _packed_logits(model: nn.Module) -> Tensor:
    # A row of 64 tokens in three documents.
    lengths = torch.tensor([40, 7, 17])
    batch = {"input_ids": torch.arange(64) % model.config.get_text_config().vocab_size,
             "position_ids": torch.cat([torch.arange(length) for length in lengths]),
             "segment_ids": torch.arange(1, 4).repeat_interleave(lengths)}
    device = model.get_input_embeddings().weight.device
    return model(**network_inputs(model, {name: x[None].to(device) for name, x in batch.items()})).logits.float()


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of attention: autocast's if it is enabled, otherwise that of x."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


def _mask(*, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """Mask function for transformers: None for packed rows; `_Varlen` separates documents by `position_ids`."""
    from transformers.masking_utils import sdpa_mask

    if attention_mask is None and q_length == kv_length:  # no padding, no cache
        return None
    return sdpa_mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **options)


class _Varlen:
    """Attention function for transformers: per document without a mask; through sdpa with one, as in generation."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel
        self._last: tuple[Tensor | None, Any] = (None, None)

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                 dropout: float = 0.0, scaling: float | None = None, **options: Any) -> tuple[Tensor, None]:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        positions = options.get("position_ids")
        if attention_mask is not None or positions is None or query.shape[2] != key.shape[2]:
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
        dtype = compute_dtype(value)  # rotary embeddings return float32 under autocast
        # [B, heads, T, D] -> [B * T, heads, D], concatenated rows.
        rows = [x.transpose(1, 2).flatten(0, 1).to(dtype) for x in (query, key, value)]
        starts, max_length = self._documents(positions, len(query))
        # torch 2.11's kernel supports grouped query attention without this argument.
        is_grouped = query.shape[1] != key.shape[1] and "enable_gqa" in inspect.signature(self._kernel).parameters
        # window_size (-1, 0): all earlier tokens and no later ones, a causal mask within a document.
        output = self._kernel(*rows, starts, starts, max_length, max_length, scale=scaling, window_size=(-1, 0),
                              **{"enable_gqa": True} if is_grouped else {})
        return output.view(len(query), -1, *output.shape[1:]), None  # [B, T, heads, D]

    def _documents(self, positions: Tensor, num_rows: int) -> tuple[Tensor, int]:
        """Return the starts of documents in the concatenated rows, then their end, and the maximum document length.

        The result is cached for the other layers of a forward pass, as it synchronises with the device.
        """
        if self._last[0] is not positions:
            row_positions = positions.expand(num_rows, -1)
            is_start = torch.ones_like(row_positions, dtype=torch.bool)
            # A document starts at the first token of a row, and where positions do not increase by 1.
            is_start[:, 1:] = row_positions.diff(dim=1) != 1
            # Cumulative lengths of the documents, 0 first: [documents + 1].
            starts = F.pad(is_start.flatten().nonzero().squeeze(1), (0, 1), value=row_positions.numel()).int()
            self._last = positions, (starts, int(starts.diff().max()))
        return self._last[1]
