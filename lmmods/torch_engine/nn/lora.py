"""LoRA adapters through PEFT: add a new one, or load one from a folder."""

import re
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmmods.core.adapters import (
    ANSWER_HEADS,
    KEY,
    adapted_layers,
    adapted_parameters,
    adapter_config,
    adapter_weights,
    check_head,
    check_rows,
    fitting_adapter,
    left_over,
    mismatch_error,
    modules_in_full,
    not_finite_reason,
    quantised_in_full,
    saved_name,
    token_indices,
    trained_rows,
)
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.experts import mixture_of
from lmmods.core.image_models import OTHERS, has_other_parts
from lmmods.core.settings import LoRA
from lmmods.torch_engine.compat.bitsandbytes import is_8bit, matrix_of
from lmmods.torch_engine.compat.peft import has_variant, ignore_tying_warning, is_lora_of_linear, lora_layers
from lmmods.torch_engine.compat.torch import has_forward_hooks, version_of
from lmmods.torch_engine.nn.classifier import has_new_head, head_modules
from lmmods.torch_engine.nn.experts import is_stacked, packed_parameter_names, use_placeholders
from lmmods.torch_engine.nn.initialization import init_adapter
from lmmods.torch_engine.nn.principal import PrincipalParts, adaptable
from lmmods.torch_engine.nn.stored import fill

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def add_lora(model: nn.Module, settings: LoRA, trainable_tokens: list[int], dtype: torch.dtype,
             task_type: str | None = None, seed: int = 0, abstract: bool = False,
             principal: PrincipalParts | None = None) -> nn.Module:
    """Wrap `model` with a new PEFT adapter; the base is frozen. Raises UserError.

    Args:
        trainable_tokens: Tokens new to the model, whose rows of embedding and output layer train with the adapter.
        dtype: Type of the trainable parameters.
        task_type: PEFT's name of the task, by which its own loaders choose the model class.
        seed: Seed of the adapter's initial values.
        abstract: Leave the adapter's values arbitrary.
        principal: Provides the initial A and B. Default: if `settings` ask for it, one that splits the weights of
            `model`.
    """
    from peft import LoraConfig, get_peft_model

    heads = head_modules(model) if has_new_head(model) else []
    # Check targets and modules by name before PEFT changes the model, so that errors name recipe keys.
    linear, in_heads = adaptable(model)
    has_experts = mixture_of(model.config) is not None
    adapted = adapted_layers(settings, linear, has_experts, model.config.model_type)
    in_full = modules_in_full(settings, dict(model.named_modules()), linear)
    packed = packed_parameter_names(model)
    if settings.dora and fill(model):
        say("Base: each process reads all weights, as DoRA starts from the norms of their rows.")
    for name in sorted(in_full):
        if any(parameter_name.startswith(f"{name}.") for parameter_name in packed):
            raise UserError(quantised_in_full(name, "4 bits"))
        module = model.get_submodule(name)
        for layer in module.modules():
            if isinstance(layer, nn.Linear) and not layer.weight.is_floating_point():
                storage = "int8" if layer.weight.dtype == torch.int8 else "4 bits"
                raise UserError(quantised_in_full(name, storage))
        fill(module)  # PEFT copies its values
    stacked = [name for name, parameter in model.named_parameters() if is_stacked(name, parameter)]
    adapted_parameters(settings, [*packed, *stacked], in_full)
    if task_type == "QUESTION_ANS":  # in the files, earlier layers may belong to another head
        heads = in_heads = [name for name in ANSWER_HEADS if hasattr(model, name)]
    targets = [settings.targets] if isinstance(settings.targets, str) else settings.targets
    if "all-linear" in targets and has_experts:  # PEFT's "all-linear" would include experts and their router
        targets = sorted({name.rsplit(".", 1)[-1] for name in adapted})
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules="all-linear" if "all-linear" in targets else targets,
        # for answer spans PEFT itself adds "qa_outputs"
        modules_to_save=[*(settings.modules_to_save or []), *(name for name in heads if name != "qa_outputs")] or None,
        target_parameters=settings.target_parameters,
        use_dora=settings.dora,
        use_rslora=settings.rslora,
        trainable_token_indices=_token_rows(model, trainable_tokens, in_full),
        # Modules that do not see text, or those that train in full, on which an adapter would clash.
        exclude_modules=OTHERS if has_other_parts(model) else in_heads or None,
        task_type=task_type,
    )
    layers = {model.get_input_embeddings(), model.get_output_embeddings()}
    untied = sorted(name for name in in_full if model.get_submodule(name) in layers)
    if untied and getattr(model.config, "tie_word_embeddings", False):
        say(f"lora.modules_to_save: {' and '.join(untied)}: the base ties its embedding to its output layer. The "
            "adapter trains a separate copy, so they will differ.")
    with use_placeholders(model), ignore_tying_warning():
        # PEFT would cast an adapter in half precision to float32; `_cast_trainable` sets the dtype instead.
        wrapped = _wrap_outline(model, config) if abstract else get_peft_model(model, config,
                                                                               autocast_adapter_dtype=False)
    # PEFT may add experts to the targets, for model types whose experts were modules with these names.
    if moved := set(config.target_parameters or ()) - set(settings.target_parameters or ()):
        raise UserError(f"lora.targets: for a {model.config.model_type}, PEFT adapts experts or their router "
                        f"({', '.join(sorted(moved))}) for {', '.join(targets)}. Use attention layers.")
    wrapped = _cast_trainable(wrapped, dtype)
    # PEFT used torch's generator. Initialise again with a random stream per parameter, equal on all processes.
    if not abstract:
        init_adapter(wrapped, seed)
        if settings.is_principal:
            (principal or PrincipalParts(settings)).start(wrapped)
    return wrapped


def _wrap_outline(model: nn.Module, config: "PreTrainedConfig") -> nn.Module:
    """Wrap `model` with an adapter whose values are arbitrary."""
    from peft import get_peft_model

    device = next(model.parameters()).device
    # PEFT moves new layers to the base's device by `Module.to`, which fake tensors do not support, but not from meta.
    with torch.device("meta"):
        wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
    for module in wrapped.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if param.is_meta:
                setattr(module, name, nn.Parameter(torch.empty_like(param, device=device), param.requires_grad))
    return wrapped


def continue_adapter(model: nn.Module, folder: str, dtype: torch.dtype, drops: bool = True, abstract: bool = False
                     ) -> nn.Module:
    """Wrap `model` with the adapter in `folder` (written by PEFT or by this project), to train it further.

    Args:
        drops: True keeps the adapter's own dropout.
        abstract: As in `load_adapter`.

    Raises:
        UserError: The folder has no adapter, or an adapter that does not fit the model.
    """
    check_rows(folder, model.get_input_embeddings().weight.shape[0])
    if has_new_head(model):
        check_head(folder, head_modules(model)[-1])
    return _cast_trainable(load_adapter(model, folder, drops=drops, trains=True, abstract=abstract), dtype)


def load_adapter(model: nn.Module, folder: str | Path, key: str = KEY, drops: bool = True, trains: bool = False,
                 abstract: bool = False) -> nn.Module:
    """Wrap `model` with the adapter in `folder`.

    Args:
        key: Key or option that named the folder, for messages.
        drops: True keeps the adapter's own dropout.
        trains: True to train it further. If False, PEFT casts weights in half precision to float32.
        abstract: Leave the adapter's values arbitrary: its weights are not read.

    Raises:
        UserError: The folder has no adapter, or an adapter that does not fit the model.
    """
    from peft import PeftConfig, PeftModel, PeftType

    adapter_type = adapter_config(folder, key)["peft_type"]
    if adapter_type not in PeftType.__members__:
        raise mismatch_error(folder, f"PEFT does not support peft_type {adapter_type}.", key)
    adapter_weights(folder, key)
    with fitting_adapter(folder, key):
        config = PeftConfig.from_pretrained(folder)
        if not _is_plain(config) and fill(model):
            say(f"Base: each process reads all weights, as the adapter in {folder} may need them.")
        if not drops and hasattr(config, "lora_dropout"):
            config.lora_dropout = 0.0
        with use_placeholders(model), ignore_tying_warning():
            if abstract:
                config.inference_mode = False
                return _wrap_outline(model, config)
            with _all_loaded(model, folder, key):
                wrapped = PeftModel.from_pretrained(model, folder, is_trainable=trains, config=config,
                                                    autocast_adapter_dtype=not trains)
    # An adapter that diverged in training loads without error and computes NaN.
    for name, parameter in wrapped.named_parameters():
        if ".default" in name and not parameter.isfinite().all():
            raise mismatch_error(folder, not_finite_reason(saved_name(name)), key)
    return wrapped


@contextmanager
def _all_loaded(model: nn.Module, folder: str | Path, key: str) -> Iterator[None]:
    """Raise UserError if PEFT loads only part of an adapter: it would initialise the rest randomly."""
    missing, extra = [], []

    def note(_: nn.Module, incompatible: Any) -> None:
        # The base's own weights are always missing in an adapter's files.
        missing.extend(name for name in incompatible.missing_keys
                       if re.search(r"\.lora_\w+\.default\b|\.modules_to_save\.default\.", name))
        extra.extend(incompatible.unexpected_keys)

    handle = model.register_load_state_dict_post_hook(note)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # raised as an error below
            yield
    finally:
        handle.remove()
    if missing or extra:
        raise mismatch_error(folder, left_over(map(saved_name, missing), map(saved_name, extra)), key)


def _is_plain(config: "PreTrainedConfig") -> bool:
    """True if PEFT creates an adapter of this configuration without reading the base's values."""
    reads = ("use_dora", "modules_to_save", "trainable_token_indices", "layer_replication")
    return (config.peft_type == "LORA" and config.init_lora_weights in (True, False)
            and not any(getattr(config, name, None) for name in reads))


def _token_rows(model: nn.Module, tokens: list[int], in_full: set[str]) -> dict[str, list[int]] | list[int] | None:
    """Return PEFT's `trainable_token_indices`."""
    names = {module: name for name, module in model.named_modules()}
    embedding, output = names[model.get_input_embeddings()], model.get_output_embeddings()
    if tokens:
        # PEFT copies these rows, so deferred values must be read now.
        fill(model.get_input_embeddings())
        fill(output)
    rows = trained_rows(tokens, embedding, names.get(output), in_full,
                        tied=getattr(model.config, "tie_word_embeddings", False),
                        has_bias=getattr(output, "bias", None) is not None)
    return token_indices(rows, embedding)


def _cast_trainable(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.to(dtype)
    return model


# ---------------------------------------------------------------------------------------------------------------------
# A linear layer and its LoRA adapter fused into one autograd function.
#
# PEFT runs the two separately: the base's output is copied, the adapter's is scaled and added; each is a pass over all
# outputs for which autograd saves tensors. Around quantised layers, and where it checks for autocast on CPUs, tensors
# are cast to float32 and back. Here the adapter's product is accumulated onto the base's, both in the compute dtype,
# and the backward pass only needs the input, the adapter's inner features and the base's matrix, dequantised again.

def fuse_adapters(model: nn.Module) -> None:
    """Fuse each LoRA layer of a PEFT model with its base layer; the same function up to rounding.

    PEFT's own forward is kept for other cases (DoRA, several adapters or none, a merged one, hooks of a strategy, bases
    other than plain and quantised linear layers), and in decoding, for which bitsandbytes has kernels. Reports which
    layers cannot be fused, and why.
    """
    unfused: dict[str, list[str]] = defaultdict(list)
    layers = lora_layers(model)
    for name, layer in layers:
        if reason := _unsupported_reason(layer):
            unfused[reason].append(name.rpartition(".")[2])
        if is_lora_of_linear(layer) and _is_linear(layer.base_layer):
            layer.forward = partial(_forward, layer)
    for reason, names in unfused.items():
        say(f"LoRA: {len(names)} of {len(layers)} adapted layers ({', '.join(dict.fromkeys(names))}) are not fused "
            f"with their adapters and run slower: {reason}.")


def _is_linear(base: nn.Module) -> bool:
    return type(base) is nn.Linear or type(base).__name__ == "Linear4bit" or is_8bit(base)


def _unsupported_reason(layer: nn.Module) -> str | None:
    """Return why a layer cannot be fused with its adapter, in words; None if it can."""
    if not is_lora_of_linear(layer) or not _is_linear(layer.base_layer):
        return f"they are {type(layer.base_layer).__name__}, neither plain nor quantised linear layers"
    if has_variant(layer):
        return "DoRA scales the sum of both outputs"
    return None if _is_fusible(layer) else "their biases train"


def _forward(layer: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Map features [..., in] to [..., out] in the compute dtype."""
    dtype = _compute_dtype(layer.base_layer, x)
    # One position per row is decoding, for which bitsandbytes has its own kernels.
    if args or kwargs or dtype is None or x.shape[-2] == 1 or not _is_fusible(layer):
        return type(layer).forward(layer, x, *args, **kwargs)
    [name] = layer.active_adapters
    dropped = layer.lora_dropout[name](x)  # x itself if nothing is dropped
    output = _AdaptedProduct.apply(x, None if dropped is x else dropped, layer.lora_A[name].weight,
                                   layer.lora_B[name].weight, layer.scaling[name], layer.base_layer, dtype)
    return output.view(*x.shape[:-1], -1)  # not a view made inside the function: some networks modify it in place


def _is_fusible(layer: nn.Module) -> bool:
    if layer.disable_adapters or layer.merged or has_variant(layer) or len(layer.active_adapters) != 1:
        return False
    name, base = layer.active_adapters[0], layer.base_layer
    if name not in layer.lora_A or layer.lora_B[name].bias is not None or base.weight.requires_grad:
        return False
    if base.bias is not None and base.bias.requires_grad:
        return False
    modules = (base, layer.lora_A[name], layer.lora_B[name])
    return not any(map(has_forward_hooks, modules))


def _compute_dtype(base: nn.Module, x: Tensor) -> torch.dtype | None:
    """Return the dtype of the matrix products; None if input and base differ in dtype without autocast."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    # 8-bit layers compute in the dtype of x, 4-bit ones in their `compute_dtype`, plain ones in that of the weight.
    layer_dtype = x.dtype if is_8bit(base) else getattr(base, "compute_dtype", None) or base.weight.dtype
    return x.dtype if layer_dtype == x.dtype else None


def _matrix(base: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return the base's weight [out, in], dequantised if needed."""
    if type(base) is nn.Linear:
        return base.weight.detach().to(dtype)
    return matrix_of(base, dtype)


_last_cast: tuple[weakref.ref, int, Tensor] | None = None


def _in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`. Layers with the same input, such as q, k and v of attention, share one cast."""
    global _last_cast
    if x.dtype == dtype:
        return x
    if x.is_inference():  # its changes are not counted, so a cached cast may be stale
        return x.to(dtype)
    if _last_cast is not None:
        source, version, result = _last_cast
        if source() is x and version == version_of(x) and result.dtype == dtype:
            return result
    result = x.to(dtype)
    _last_cast = weakref.ref(x), version_of(x), result
    return result


class _AdaptedProduct(torch.autograd.Function):
    """x W^T + b + scaling (d A^T) B^T, where d is x after dropout."""

    @staticmethod
    def forward(ctx, x: Tensor, dropped: Tensor | None, a: Tensor, b: Tensor, scaling: float, base: nn.Module,
                dtype: torch.dtype) -> Tensor:
        flat = _in_dtype(x, dtype).reshape(-1, x.shape[-1])  # [N, in]
        adapter_input = flat if dropped is None else dropped.reshape(flat.shape).to(dtype)
        low_a, low_b = a.to(dtype), b.to(dtype)
        inner = adapter_input @ low_a.t()  # [N, r]
        bias = None if base.bias is None else base.bias.to(dtype)
        # In place on the base's output [N, out]: no copy of it, and no pass to scale and add.
        result = F.linear(flat, _matrix(base, dtype), bias).addmm_(inner, low_b.t(), alpha=scaling)
        # The base's matrix is not saved: a quantised one would then stay in memory in full.
        ctx.save_for_backward(adapter_input, inner, low_a, low_b)
        ctx.base, ctx.scaling, ctx.types = base, scaling, (x.dtype, a.dtype, b.dtype)
        ctx.shape = x.shape[:-1]
        return result

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        adapter_input, inner, a, b = ctx.saved_tensors
        shape, (dtype_x, dtype_a, dtype_b) = ctx.shape, ctx.types
        grad_inner = (grad @ b).mul_(ctx.scaling)  # [N, out] [out, r] -> [N, r]
        grad_b = (grad.t() @ inner).to(dtype_b).mul_(ctx.scaling)
        grad_a = (grad_inner.t() @ adapter_input).to(dtype_a)
        # The adapter's part of the gradient goes through dropout if there is any, else straight into that of x.
        grad_x = grad_dropped = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ _matrix(ctx.base, grad.dtype)
            if not ctx.needs_input_grad[1]:
                grad_x.addmm_(grad_inner, a)
            grad_x = grad_x.view(*shape, -1).to(dtype_x)
        if ctx.needs_input_grad[1]:
            grad_dropped = (grad_inner @ a).view(*shape, -1).to(dtype_x)
        return grad_x, grad_dropped, grad_a, grad_b, None, None, None
