"""Gradient checkpointing (Chen et al. 2016): activations are recomputed in the backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lmmods.core.errors import UserError


def enable_checkpointing(model: nn.Module, contexts: Callable[[], tuple[Any, Any]] = noop_context_fn) -> None:
    """Recompute activations in the backward pass, in the form that also trains adapters.

    The reentrant form drops the gradient of a block whose input needs none, which is every block over a frozen
    embedding. Raises UserError: transformers cannot do it for this architecture, and its blocks are not found either.

    Args:
        contexts: Makes two contexts at each call of a block, around its two runs.
    """
    arguments = {"use_reentrant": False, "context_fn": contexts}
    if not model.supports_gradient_checkpointing:
        return _checkpoint_blocks(model, contexts)
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(arguments)
    else:  # transformers before 5.20
        model.gradient_checkpointing_enable(arguments)


def _checkpoint_blocks(model: nn.Module, contexts: Callable[[], tuple[Any, Any]]) -> None:
    """The same for what transformers leaves out, such as ALBERT, whose blocks share weights: each call of a block."""
    blocks: list[nn.Module] = []
    for module in model.modules():
        inside = any(module is part for block in blocks for part in block.modules())
        if isinstance(module, nn.ModuleList) and not inside:
            blocks += [block for block in module if not isinstance(block, nn.ModuleList)]
    if not blocks:
        raise UserError(f"model.gradient_checkpointing: no blocks are found in {type(model).__name__} that could be "
                        "computed anew. Set it to false.")
    for block in blocks:
        block.forward = _recomputed(block, block.forward, contexts)


def _recomputed(block: nn.Module, forward: Callable[..., Any], contexts: Callable[[], tuple[Any, Any]]
                ) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if block.training and torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        return forward(*args, **kwargs)

    return run
