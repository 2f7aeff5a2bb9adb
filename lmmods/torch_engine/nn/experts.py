"""Mixture of experts: routing metrics, the load-balancing loss, and experts quantised to 4 bits."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize

from lmmods.core.experts import Mixture, mixture_of
from lmmods.torch_engine.compat.bitsandbytes import dequantize_by_blocks
from lmmods.torch_engine.compat.peft import adapted_parameter, has_one_adapter, lora_layers
from lmmods.torch_engine.compat.torch import hides_saved_tensors, storage_of
from lmmods.torch_engine.nn.loss import LossSums

# transformers' network outputs probabilities as router logits, without an argument `output_router_logits`.
GEMMA = "gemma4_text"


def routed_mixture(model: nn.Module) -> Mixture | None:
    """Return the mixture of experts of a network, with or without PEFT; None if it does not output router logits."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    has_router_logits = "output_router_logits" in inspect.signature(type(base).forward).parameters
    return mixture_of(model.config) if has_router_logits or model.config.model_type == GEMMA else None


def router_probabilities(model: nn.Module, outputs: Any) -> list[Tensor]:
    """Return the float32 probabilities of each layer's router, [B * T, E], from outputs with router logits."""
    if model.config.model_type == GEMMA:
        return list(outputs.router_logits)
    return [logits.float().softmax(-1) for logits in outputs.router_logits]


def add_load(sums: LossSums, router_probabilities: list[Tensor], mixture: Mixture, real: Tensor, row_weights: Tensor,
             coefficient: float) -> LossSums:
    """Add the load-balancing loss of each row (DeepSeek-V3's sequence-wise form), and append `core.experts.METRICS`.

    For a row and layer the loss is E sum_e f_e P_e, with f_e the number of choices of expert e per token and P_e its
    mean probability; its mean over layers is weighted by the row's target tokens.

    Args:
        router_probabilities: Of each layer, float32 [B * T, E].
        real: [B, T], False for padding.
        row_weights: [B], each row's part of `sums.weight`.
        coefficient: Weight of the load-balancing loss.
    """
    real, layers = real.float(), []
    # A row with only padding has load 0, not NaN.
    num_tokens = real.sum(1, keepdim=True).clamp(min=1)
    for probabilities in router_probabilities:
        probabilities = probabilities.view(*real.shape, -1)  # [B * T, E] -> [B, T, E]
        chosen = probabilities.detach().topk(mixture.per_token, -1).indices
        # One-hot choices [B, T, E]. They have no gradient: the loss reaches the router through the probabilities only.
        is_chosen = torch.zeros_like(probabilities).scatter_(-1, chosen, 1.0)
        # f and P of the docstring, [B, E]; padding counts in neither.
        counts, means = (torch.einsum("bte,bt->be", x, real) / num_tokens for x in (is_chosen, probabilities))
        load = counts * (mixture.num / mixture.per_token)  # 1 for each expert if balanced
        layers.append(torch.stack([mixture.num * (counts * means).sum(-1), load.amax(-1), load.amin(-1)]))  # [3, B]
    by_row = torch.stack(layers).mean(0)  # [3, B]
    summed = by_row @ row_weights.to(by_row)  # [3, B] [B] -> [3]
    metrics = torch.stack([summed.detach(), row_weights.sum().to(summed).expand(3)], 1)
    if sums.metrics is not None:
        metrics = torch.cat([sums.metrics, metrics])
    return sums._replace(total=sums.total + coefficient * summed[0], metrics=metrics)


# ---------------------------------------------------------------------------------------------------------------------
# 4-bit experts: the stacked matrices of a layer are stored as bitsandbytes' codes and dequantised when they are read.
#
# While a layer runs, each of its matrices exists once. The backward pass dequantises them again, so that only codes are
# saved for it.

def is_stacked(name: str, parameter: Tensor) -> bool:
    """True if a parameter contains the stacked matrices of all experts of a layer, [E, ...]."""
    return ".experts." in name and parameter.ndim == 3


def pack(model: nn.Module, states: dict[str, Any]) -> None:
    """Parametrise the packed parameters of a model, so that reading one gives its dequantised matrices.

    Args:
        states: bitsandbytes' `QuantState` of each parameter, by name.
    """
    if states:
        dequantize_by_blocks()
    for name, state in states.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if not isinstance(module, _Recomputing):
            # The layer's own class follows in the method resolution order, so that `super().forward` is its forward.
            cls = type(module)
            module.__class__ = type(cls.__name__, (_Recomputing, cls), {})
            # Record the order before the parametrisation moves these parameters to a submodule.
            module.parameter_order = [name for name, _ in module.named_parameters(recurse=False)]
        # `unsafe` permits codes and matrices to differ in shape and dtype.
        parametrize.register_parametrization(module, leaf, _Matrices(state), unsafe=True)


def packed_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of the packed parameters."""
    return [f"{path}.{name}" for path, module in model.named_modules() if isinstance(module, _Recomputing)
            for name in _matrices(module)]


@contextmanager
def use_placeholders(model: nn.Module) -> Iterator[None]:
    """Replace packed parameters by plain placeholders of their shape, as PEFT only adapts plain parameters."""
    packed: list[tuple[nn.Module, str, nn.Parameter, _Matrices]] = []
    for module in list(model.modules()):
        if isinstance(module, _Recomputing):
            cls = type(module)  # copies of a module share this class, but parametrised names are its properties
            module.__class__ = type(cls)(cls.__name__, cls.__bases__, {
                name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")})
            for name, matrices in _matrices(module).items():
                codes = module.parametrizations[name].original
                packed.append((module, name, codes, matrices))
                parametrize.remove_parametrizations(module, name, leave_parametrized=False)
                # One expanded element needs no memory.
                empty = torch.zeros((), dtype=matrices.state.dtype, device=codes.device).expand(matrices.state.shape)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))
            for name in module.parameter_order:  # the order in which PEFT wraps parameters
                parameter = getattr(module, name)
                delattr(module, name)
                setattr(module, name, parameter)
    try:
        yield
    finally:
        for module, name, codes, matrices in packed:
            setattr(module, name, codes)
            parametrize.register_parametrization(module, name, matrices, unsafe=True)
        # PEFT's forward does not support a parameter that is already parametrised.
        for _, layer in lora_layers(model):
            if (name := adapted_parameter(layer)) and isinstance(layer.get_base_layer(), _Recomputing):
                layer.forward = partial(_run_adapter, layer, name)


class _Matrices(nn.Module):
    """Parametrisation that dequantises codes to matrices [E, ...]."""

    def __init__(self, state: Any):
        super().__init__()
        self.state = state
        self.call: _Call | None = None  # call of the layer during which the matrices are read

    @torch.no_grad()
    def forward(self, codes: Tensor) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        # `Module.to` moves the codes, but not the state's scales.
        if self.state.absmax.device != codes.device:
            self.state.to(codes.device)
        matrices = dequantize_4bit(codes, self.state)
        if self.call is not None:
            self.call.note(matrices, self)
        return matrices


def _matrices(module: nn.Module) -> dict[str, _Matrices]:
    """Return the `_Matrices` of a layer by parameter name."""
    lists = module.parametrizations.items() if parametrize.is_parametrized(module) else ()
    return {name: parametrizations[0] for name, parametrizations in lists if isinstance(parametrizations[0], _Matrices)}


class _Recomputing(nn.Module):
    """Base class given to layers with packed experts: autograd saves codes, not dequantised matrices."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Within a call each matrix is dequantised once, however often the layer reads it.
        with parametrize.cached():
            if not torch.is_grad_enabled() or hides_saved_tensors():  # checkpointing saves nothing
                return super().forward(*args, **kwargs)
            # By identity, as the matrices report their owner to `note` when they are dequantised.
            call = _Call({id(matrices): partial(_again, self, name) for name, matrices in _matrices(self).items()})
            try:
                for matrices in _matrices(self).values():
                    matrices.call = call
                with saved_tensors_hooks(call.keep, call.give):
                    return super().forward(*args, **kwargs)
            finally:
                # From now on only codes exist; the backward pass dequantises matrices again.
                call.matrices.clear()
                for matrices in _matrices(self).values():
                    matrices.call = None


def _again(module: nn.Module, name: str) -> Tensor:
    matrices = module.parametrizations[name]
    return matrices[0](matrices.original)


class _Part(NamedTuple):
    """A view of matrices that autograd saves for the backward pass."""

    source: "_Source"
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Source:
    """Matrices that the backward pass dequantises for the first view, and frees with the last view."""

    def __init__(self, make: Callable[[], Tensor]):
        self._make, self._matrices = make, None

    def matrices(self) -> Tensor:
        if self._matrices is None:
            self._matrices = self._make()
        return self._matrices


class _Call:
    """Hooks on the tensors that autograd saves during one call of a layer.

    Args:
        makers: Functions that dequantise the matrices again, by the id of their `_Matrices`.
    """

    def __init__(self, makers: dict[int, Callable[[], Tensor]]):
        self._sources = {key: _Source(make) for key, make in makers.items()}
        # References to the tensors prevent the reuse of their storages' ids during the call.
        self.matrices: dict[int, tuple[Tensor, _Source]] = {}  # by their storages

    def note(self, matrices: Tensor, owner: _Matrices) -> None:
        self.matrices[storage_of(matrices)] = matrices, self._sources[id(owner)]

    def keep(self, tensor: Tensor) -> Tensor | _Part:
        _, source = self.matrices.get(storage_of(tensor), (None, None))
        if source is None:
            # Detached: an output saved with its own graph would be a reference cycle.
            return tensor.detach()
        # For a view of the matrices, save only its geometry; all views of a parameter share its source.
        return _Part(source, tensor.size(), tensor.stride(), tensor.storage_offset())

    def give(self, saved: Tensor | _Part) -> Tensor:
        if not isinstance(saved, _Part):
            return saved
        return saved.source.matrices().as_strided(saved.size, saved.stride, saved.offset)


class _Sum(nn.Module):
    """Parametrisation that adds an adapter's product to matrices: W + scaling left right."""

    def __init__(self, left: Tensor, right: Tensor, scaling: float):
        super().__init__()
        self.left, self.right, self.scaling = left, right, scaling

    def forward(self, matrices: Tensor) -> Tensor:
        with torch.autocast(matrices.device.type, enabled=False):  # keeps the matrices' dtype
            return torch.baddbmm(matrices, self.left, self.right, alpha=self.scaling)


def _run_adapter(layer: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """Run PEFT's adapter on a packed parameter.

    PEFT's forward (0.21) does not remove its sum from a parameter that is already parametrised.
    """
    if layer.disable_adapters or not has_one_adapter(layer):
        return layer.base_layer(*args, **kwargs)
    matrices = layer.get_base_layer().parametrizations[name]
    # Part of the parametrisation for this call only, so that matrices and sum form one tensor for the layer.
    matrices.append(_Sum(*layer.get_delta_factors(layer.active_adapters[0])))
    try:
        return layer.base_layer(*args, **kwargs)
    finally:
        del matrices[-1]
