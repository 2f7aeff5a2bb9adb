"""What the torch engine needs of torch that has no public name. Held by tests/compat/test_torch.py; read in torch 2.13.

`torch.nn.Module._apply` is replaced on models that lie on several devices: see `never_move`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode  # sees every operation that torch runs
from torch.utils._pytree import tree_leaves

__all__ = ["DispatchMode"]


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 products. `torch.cpu.get_capabilities` tells so in 2.13."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def scale_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all tensors of a device in place, in one kernel on GPUs: `_foreach_mul_`; a loop is public."""
    torch._foreach_mul_(tensors, factor)


def add_to_all(sums: list[Tensor], values: list[Tensor]) -> None:
    """Add to each sum its value in place, in one kernel on GPUs: `_foreach_add_`; a loop is public."""
    torch._foreach_add_(sums, values)


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether something runs around the module's forward: hooks can be registered and removed, but not listed."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def never_move(model: nn.Module) -> None:
    """Let nobody move or cast the model as a whole: `_apply` is what `to`, `cuda` and `float` all end in."""
    model._apply = lambda *_, **__: model


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested arguments of an operation; `torch.utils` has no public name for its trees."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
