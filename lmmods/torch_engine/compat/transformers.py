"""What the torch engine needs of transformers' models that has no public name. Read in transformers 5.23.

Each use is held by tests/compat/test_transformers.py. The attention functions that may be registered, `sdpa_mask` and
`sdpa_attention_forward` are documented under "Attention interface".
"""

from typing import Any

from torch import nn


def attention_of(model: nn.Module) -> str:
    """The attention implementation in use: `config._attn_implementation`; there is `set_attn_implementation` alone."""
    return model.config._attn_implementation


def can_change_attention(model: nn.Module) -> bool:
    """Whether `set_attn_implementation` has an effect on the architecture: `_can_set_attn_implementation`.

    Without asking first it only warns.
    """
    return model._can_set_attn_implementation()


def after_step(model: nn.Module, outputs: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the next step of generation: `_update_model_kwargs_for_generation`.

    Architectures override it, so there is nothing of one's own to put in its place in a `custom_generate`.
    """
    return model._update_model_kwargs_for_generation(outputs, kwargs)
