"""PEFT adapters that start as the principal part of the base; see `lmmods.core.principal`."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lmmods.core.adapters import adapted_layers
from lmmods.core.errors import UserError
from lmmods.core.experts import mixture_of
from lmmods.core.image_models import has_other_parts, is_of_language_model
from lmmods.core.lazy_array import LazyArray, lazy
from lmmods.core.principal import Principal, check_rank, exported_factor, no_whole_weights
from lmmods.core.settings import LoRA
from lmmods.torch_engine.compat.peft import lora_layers
from lmmods.torch_engine.nn import sharding
from lmmods.torch_engine.nn.classifier import has_new_head, head_modules
from lmmods.torch_engine.nn.stored import fill

PREFIX = "base_model.model."  # PEFT's prefix of the network's names


def adaptable(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the linear layers outside and inside a new head, without a vocabulary's output layer.

    Quantised layers and GPT-2's Conv1D are included. Raises UserError if there are no linear layers.
    """
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    names = [name for name, module in model.named_modules()
             if isinstance(module, (nn.Linear, Conv1D)) and module is not output]
    if has_other_parts(model):  # these are not adapted
        names = [name for name in names if is_of_language_model(name)]
    if not names:
        raise UserError("lora.targets: this model has no linear layer to adapt. Use another model.")
    heads = tuple(f"{head}." for head in head_modules(model)) if has_new_head(model) else ()
    in_heads = [name for name in names if f"{name}.".startswith(heads)]
    return [name for name in names if name not in in_heads], in_heads


class PrincipalParts:
    """Split of the matrices with a principal adapter; matrices to be quantised are split when they are read.

    Principal vectors need whole matrices, so a process that keeps some rows reads the whole matrix.
    """

    def __init__(self, settings: LoRA):
        self._settings = settings
        self._adapted: set[str] | None = None
        self._parts: dict[str, Principal] = {}  # by the layer's name

    def residual(self, model: nn.Module, name: str, weight: Tensor | LazyArray) -> Tensor | LazyArray:
        """Return the part of a weight that is quantised: all of it without an adapter.

        Args:
            name: The parameter's name in `model`, whose layers are in place.
            weight: [out, in], or [in, out] of a Conv1D.
        """
        if self._adapted is None:
            self._adapted = adapted_layers(self._settings, adaptable(model)[0], mixture_of(model.config) is not None,
                                           model.config.model_type)
            layers = [model.get_submodule(layer) for layer in self._adapted]
            if any(hasattr(layer, "in_features") and min(layer.in_features, layer.out_features) < self._settings.rank
                   for layer in layers):
                self._adapted = set()  # `start` raises the error, which from_pretrained would only log
        layer = name.rpartition(".")[0]
        if layer not in self._adapted:
            return weight
        return self._split(layer, weight, _is_conv1d(model.get_submodule(layer)))

    def _split(self, layer: str, weight: Tensor | LazyArray, conv1d: bool) -> Tensor | LazyArray:
        matrix, dtype = lazy(weight.detach() if isinstance(weight, Tensor) else weight, torch.empty), weight.dtype
        part = Principal(matrix.transposed() if conv1d else matrix, self._settings.rank, self._settings.scaling, layer,
                         lambda values: values.float().cpu().numpy(),
                         lambda values: torch.from_numpy(np.ascontiguousarray(values)).to(dtype))
        self._parts[layer] = part
        residual = part.residual.transposed() if conv1d else part.residual
        if isinstance(weight, LazyArray):
            return residual
        return residual.read_rows(slice(None)).contiguous().to(weight.device)

    @torch.no_grad()
    def start(self, model: nn.Module) -> None:
        """Set the initial values of a new adapter, and subtract them from layers that are not quantised.

        Args:
            model: PEFT model. Its `first_factors` will contain the initial values by parameter name, for `changes`.

        Raises:
            UserError: A layer is saved quantised, or has fewer singular values than the adapter's rank.
        """
        model.first_factors = {}
        for path, layer in lora_layers(model):
            check_rank((layer.out_features, layer.in_features), self._settings.rank, path.removeprefix(PREFIX))
        for path, layer in lora_layers(model):
            base, name = layer.get_base_layer(), path.removeprefix(PREFIX)
            if name not in self._parts:
                if not base.weight.is_floating_point() or hasattr(base, "quant_state"):
                    raise no_whole_weights(name)
                fill(base)
                base.weight.data = self._split(name, base.weight, _is_conv1d(base))
            for factor, value in zip(("lora_A", "lora_B"), self._parts[name].factors, strict=True):
                param = getattr(layer, factor)["default"].weight
                param.copy_(torch.from_numpy(value))
                model.first_factors[f"{path}.{factor}.default.weight"] = param.detach().cpu().clone()
            del self._parts[name]
        if self._parts:
            raise RuntimeError(f"PEFT does not adapt {', '.join(self._parts)}, which have been split for an adapter.")


def _is_conv1d(layer: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return issubclass(getattr(layer, "source_cls", None) or type(layer), Conv1D)


def changes(model: nn.Module) -> tuple[Any, dict[str, Tensor]]:
    """Return PEFT's settings and the parameters of an equivalent adapter for the original base.

    A collective call if parameters are sharded.

    Args:
        model: PEFT model with a principal adapter.
    """
    config = model.peft_config["default"]
    settings = LoRA(rank=config.r, alpha=config.lora_alpha, rslora=config.use_rslora).for_export()
    state = {name: sharding.whole(param).detach() for name, param in model.named_parameters() if param.requires_grad}
    for name, initial in model.first_factors.items():
        factor, value = name.split(".")[-3], state[name]
        halves = exported_factor(factor, value.float(), initial.to(value.device).float())
        state[name] = torch.cat(halves, 0 if factor == "lora_A" else 1).to(value.dtype)
    return replace(config, r=settings.rank, lora_alpha=settings.alpha), state
