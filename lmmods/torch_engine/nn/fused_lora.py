"""A linear layer and its LoRA adapter in one step of autograd.

PEFT runs the two apart: the base's result is copied, the adapter's is scaled and added, each a pass over all outputs
that autograd keeps tensors for; around quantised layers, and wherever it looks for autocast on CPUs, tensors go to
float32 and back. Here the adapter's product is added inside the base's, both in the type of the computation, and
what the backward pass needs is the input, the adapter's inner features, and the base's matrix made again.
"""

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmmods.core.console import say
from lmmods.torch_engine.compat.bitsandbytes import is_8bit, matrix_of
from lmmods.torch_engine.compat.peft import has_variant, is_lora_of_linear, lora_layers
from lmmods.torch_engine.compat.torch import has_forward_hooks


def fuse_adapters(model: nn.Module) -> None:
    """Compute the LoRA layers of a PEFT model in one step each; same function, rounding apart.

    A layer goes PEFT's way where there is more to do (DoRA, several adapters or none, a merged one, hooks of a
    strategy, bases other than plain and quantised linear layers), and in decoding, for which bitsandbytes has kernels.
    Says which layers cannot be joined with their adapters, and why.
    """
    slower: dict[str, list[str]] = defaultdict(list)
    layers = lora_layers(model)
    for name, layer in layers:
        if obstacle := _obstacle(layer):
            slower[obstacle].append(name.rpartition(".")[2])
        if is_lora_of_linear(layer) and _is_linear(layer.base_layer):
            layer.forward = partial(_forward, layer)
    for obstacle, names in slower.items():
        say(f"LoRA: {len(names)} of {len(layers)} adapted layers ({', '.join(dict.fromkeys(names))}) are computed "
            f"apart from their adapters, which is slower: {obstacle}.")


def _is_linear(base: nn.Module) -> bool:
    return type(base) is nn.Linear or type(base).__name__ == "Linear4bit" or is_8bit(base)


def _obstacle(layer: nn.Module) -> str | None:
    """Why a layer cannot be joined with its adapter, in words; None where it can."""
    if not is_lora_of_linear(layer) or not _is_linear(layer.base_layer):
        return f"they are {type(layer.base_layer).__name__}, neither plain nor quantised linear layers"
    if has_variant(layer):
        return "DoRA scales what comes out of both"
    return None if _is_plain(layer) else "their biases train"


def _forward(layer: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Features [..., in] to [..., out], in the type of the computation."""
    dtype = _compute_dtype(layer.base_layer, x)
    if args or kwargs or dtype is None or x.shape[-2] == 1 or not _is_plain(layer):
        return type(layer).forward(layer, x, *args, **kwargs)
    [name] = layer.active_adapters
    dropped = layer.lora_dropout[name](x)
    found = _AdaptedProduct.apply(x, None if dropped is x else dropped, layer.lora_A[name].weight,
                                  layer.lora_B[name].weight, layer.scaling[name], layer.base_layer, dtype)
    return found.view(*x.shape[:-1], -1)  # no view out of the function: some networks change it in place


def _is_plain(layer: nn.Module) -> bool:
    if layer.disable_adapters or layer.merged or has_variant(layer) or len(layer.active_adapters) != 1:
        return False
    name, base = layer.active_adapters[0], layer.base_layer
    if name not in layer.lora_A or layer.lora_B[name].bias is not None or base.weight.requires_grad:
        return False
    if base.bias is not None and base.bias.requires_grad:
        return False
    parts = (base, layer.lora_A[name], layer.lora_B[name])
    return not any(map(has_forward_hooks, parts))


def _compute_dtype(base: nn.Module, x: Tensor) -> torch.dtype | None:
    """The type of the products; None where the layers do not agree on one."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    stored = x.dtype if is_8bit(base) else getattr(base, "compute_dtype", None) or base.weight.dtype
    return x.dtype if stored == x.dtype else None


def _matrix(base: nn.Module, dtype: torch.dtype) -> Tensor:
    """The base's weights [out, in]."""
    if type(base) is nn.Linear:
        return base.weight.detach().to(dtype)
    return matrix_of(base, dtype)


class _AdaptedProduct(torch.autograd.Function):
    """x W^T + b + scaling (d A^T) B^T, where d is x after dropout."""

    @staticmethod
    def forward(ctx, x: Tensor, dropped: Tensor | None, a: Tensor, b: Tensor, scaling: float, base: nn.Module,
                dtype: torch.dtype) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).to(dtype)
        into = flat if dropped is None else dropped.reshape(flat.shape).to(dtype)
        low_a, low_b = a.to(dtype), b.to(dtype)
        inner = into @ low_a.t()
        bias = None if base.bias is None else base.bias.to(dtype)
        result = F.linear(flat, _matrix(base, dtype), bias).addmm_(inner, low_b.t(), alpha=scaling)
        ctx.save_for_backward(into, inner, low_a, low_b)
        ctx.base, ctx.scaling, ctx.types = base, scaling, (x.dtype, a.dtype, b.dtype)
        ctx.shape = x.shape[:-1]
        return result

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        into, inner, a, b = ctx.saved_tensors
        shape, (dtype_x, dtype_a, dtype_b) = ctx.shape, ctx.types
        grad_inner = (grad @ b).mul_(ctx.scaling)
        grad_b = (grad.t() @ inner).to(dtype_b).mul_(ctx.scaling)
        grad_a = (grad_inner.t() @ into).to(dtype_a)
        grad_x = grad_dropped = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ _matrix(ctx.base, grad.dtype)
            if not ctx.needs_input_grad[1]:
                grad_x.addmm_(grad_inner, a)
            grad_x = grad_x.view(*shape, -1).to(dtype_x)
        if ctx.needs_input_grad[1]:
            grad_dropped = (grad_inner @ a).view(*shape, -1).to(dtype_x)
        return grad_x, grad_dropped, grad_a, grad_b, None, None, None
