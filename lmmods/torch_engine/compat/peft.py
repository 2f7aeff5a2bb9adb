"""Undocumented parts of PEFT's layers that the torch engine uses, as of peft 0.21.

Tested by tests/compat/test_peft.py. The adapter's own parts (`lora_A`, `lora_B`, `lora_dropout`, `scaling`,
`base_layer`, `active_adapters`, `merged`, `disable_adapters`) are those that PEFT documents for custom layers.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

KINDS = ("Linear", "Linear4bit", "Linear8bitLt")


def is_lora_of_linear(module: nn.Module) -> bool:
    """True if a module is LoRA on a linear layer: the names of classes in `peft.tuners.lora`.

    By name, as the classes for quantised layers exist only with bitsandbytes, and others also wrap linear layers.
    """
    from peft.tuners.lora import LoraLayer

    return isinstance(module, LoraLayer) and type(module).__name__ in KINDS


def lora_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the LoRA layers of a model with their names: `peft.tuners.lora.LoraLayer`."""
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def adapts_parameters(model: nn.Module) -> bool:
    """True if any adapter is on a parameter instead of a layer."""
    return any(adapted_parameter(layer) for _, layer in lora_layers(model))


def adapted_parameter(layer: nn.Module) -> str | None:
    """Return the name of the parameter that a LoRA layer adapts; None if it adapts a layer.

    `parameter_name` of a `ParamWrapper`, which is recognised by its class name.
    """
    return layer.parameter_name if type(layer).__name__ == "ParamWrapper" else None


def has_one_adapter(layer: nn.Module) -> bool:
    """True if a LoRA layer has the active adapter. Raises RuntimeError if several are active or it is merged."""
    if layer.merged or len(layer.active_adapters) > 1:
        raise RuntimeError("An adapter on packed experts cannot be merged or combined with another one.")
    return any(name in layer.lora_A for name in layer.active_adapters)


def has_variant(layer: nn.Module) -> bool:
    """True if a LoRA layer does not compute W x + scaling B A x, such as DoRA: `lora_variant`.

    A dictionary with an entry for each such adapter.
    """
    return bool(layer.lora_variant)


def trained_rows(layer: nn.Module) -> tuple[nn.Module, list[int], Tensor] | None:
    """Return a layer's base layer, its trained tokens [K] and their rows [K, D]; None if no token rows train.

    `TrainableTokensWrapper.token_adapter` with its `base_layer`, `token_indices` and `trainable_tokens_delta` by the
    adapter's name. A tied output layer shares the embedding's rows.
    """
    if not hasattr(layer, "token_adapter"):
        return None
    adapter, (name,) = layer.token_adapter, layer.token_adapter.active_adapters
    return adapter.base_layer, adapter.token_indices[name], adapter.trainable_tokens_delta[name]


def reset_adapter(model: nn.Module) -> None:
    """Initialise the adapters of a model again: `reset_lora_parameters` of each LoRA layer."""
    from peft.tuners.lora import LoraLayer

    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for name in layer.active_adapters:
                layer.reset_lora_parameters(name, init_lora_weights=True)


def magnitudes(model: nn.Module) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield each DoRA layer's magnitude [out], its base matrix, and True if the matrix is [in, out].

    `lora_magnitude_vector` by the adapter's name, `fan_in_fan_out` and `dequantize_module_weight`.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.integrations import dequantize_module_weight

    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for magnitude in layer.lora_magnitude_vector.values():
                weight = dequantize_module_weight(layer.get_base_layer())
                yield magnitude.weight, weight, layer.fan_in_fan_out


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Disable the adapters of a network temporarily: `_disable_adapters` of each layer and wrapper of PEFT.

    PEFT's `disable_adapter` would also change the adapters' `requires_grad`.
    """
    layers = [layer for layer in model.modules() if hasattr(layer, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def ignore_tying_warning() -> Iterator[None]:
    """Ignore PEFT's warning about an adapter on one of two tied layers, which names a setting of PEFT.

    It is matched by its first words. Such a layer is saved and merged as a separate copy.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True` and a tied layer is part of")
        yield
