"""Sizes of a network: number of parameters, dtypes, FLOPs and memory of a training step."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psutil
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lmmods.core.errors import UserError
from lmmods.core.experts import mixture_of
from lmmods.core.image_models import has_other_parts, is_of_language_model
from lmmods.core.memory import NetworkShape, Step, StepMemory, estimate_step, flops_per_token, widths_of
from lmmods.torch_engine.nn.experts import is_stacked

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass
class Summary:
    """Sizes of a network.

    Args:
        num_params: Number of parameters; quantised ones count unpacked, tied ones once.
        dtypes: Number of parameters by storage dtype.
    """

    num_params: int
    num_trainable: int
    dtypes: dict[str, int]
    weight_bytes: int


def summarize(model: nn.Module) -> Summary:
    """Count the parameters of `model`."""
    params = list(model.parameters())
    dtypes: dict[str, int] = {}
    for param in params:
        dtype = storage_name(param)
        dtypes[dtype] = dtypes.get(dtype, 0) + num_elements(param)
    return Summary(num_params=sum(num_elements(p) for p in params),
                   num_trainable=sum(num_elements(p) for p in params if p.requires_grad), dtypes=dtypes,
                   weight_bytes=sum(p.numel() * p.element_size() + _scale_bytes(p) for p in params))


def num_elements(param: Tensor) -> int:
    """Return the number of elements of a parameter; for a packed 4-bit one, the number of weights."""
    state = getattr(param, "quant_state", None)
    # Under ZeRO-3 a parameter is empty while it is sharded; `ds_numel` is its full size.
    return state.shape.numel() if state is not None else getattr(param, "ds_numel", param.numel())


def storage_name(param: Tensor) -> str:
    """Return `nf4`, `fp4`, `int8` or the torch dtype."""
    state = getattr(param, "quant_state", None)
    return state.quant_type if state is not None else str(param.dtype).removeprefix("torch.")


def _scale_bytes(param: Tensor) -> int:
    """Return the bytes of the scales of a packed 4-bit weight."""
    state = getattr(param, "quant_state", None)
    if state is None:
        return 0
    scales = [state.absmax, *([state.state2.absmax] if state.state2 is not None else [])]
    return sum(scale.numel() * scale.element_size() for scale in scales)


def training_flops(model: nn.Module) -> int:
    """Return `flops_per_token` of a network, without parts that see images, and an embedding only looked up."""
    is_head_too = model.config.tie_word_embeddings and model.get_output_embeddings() is not None
    looked_up = None if is_head_too else model.get_input_embeddings().weight
    mixture = mixture_of(model.config)

    def count_active(name: str, param: Tensor) -> int:
        # A token only uses the experts that it is routed to.
        is_expert = mixture is not None and ".experts." in name
        return round(num_elements(param) * mixture.fraction) if is_expert else num_elements(param)

    counts = [(count_active(name, param), param.requires_grad) for name, param in model.named_parameters()
              if param is not looked_up and (is_of_language_model(name) or not has_other_parts(model))]
    return flops_per_token(sum(count for count, _ in counts), sum(count for count, trains in counts if trains))


def step_memory(model: nn.Module, step: Step, num_tokens: int, device: torch.device, copied: int = 0) -> StepMemory:
    """Return the estimated memory of a training step on a device.

    Args:
        step: Settings of the step; parameter counts are filled in.
        num_tokens: Tokens of a micro-batch, padding included.
        copied: Size in bytes of weights that the task keeps outside the network.
    """
    sizes, head = summarize(model), model.get_output_embeddings()
    trained = [param for param in model.parameters() if param.requires_grad]
    num_bytes = sum(num_elements(param) * param.element_size() for param in trained)
    in_head = [] if head is None else [param for param in head.parameters() if param.requires_grad]
    step = replace(step, num_trainable=sizes.num_trainable, param_bytes=num_bytes / max(sizes.num_trainable, 1),
                   chunk_bytes=0 if head is None else step.chunk_bytes, trained_head=sum(map(num_elements, in_head)))
    return estimate_step(widths_of(model.config, _has_qk_norm(model)), sizes.weight_bytes + copied, step, num_tokens,
                         available_bytes(device))


def _has_qk_norm(model: nn.Module) -> bool:
    return any(name.endswith((".q_norm", ".query_norm", ".q_layernorm")) for name, _ in model.named_modules())


def planned_shape(config: "PreTrainedConfig", auto_class: str) -> NetworkShape:
    """Return the sizes of a configuration's network, built on the meta device.

    Raises:
        UserError: transformers has no network of this class for the configuration.
    """
    import transformers

    try:
        with torch.device("meta"):
            model = getattr(transformers, auto_class).from_config(config)
    except ValueError as error:
        raise UserError(f"--model: transformers has no {auto_class.removeprefix('AutoModel')} network of type "
                        f"{config.model_type}. Use another model, or another --task.") from error
    head = model.get_output_embeddings()
    linear = [module.weight.shape for module in model.modules()
              if isinstance(module, nn.Linear | Conv1D) and module is not head]
    stacked = [parameter.shape for name, parameter in model.named_parameters() if is_stacked(name, parameter)]
    return NetworkShape(num_params=sum(map(num_elements, model.parameters())),
                        num_linear=sum(shape.numel() for shape in linear + stacked),
                        # A [r, in] and B [out, r]: in + out parameters of each layer per rank.
                        lora_per_rank=sum(map(sum, linear)), widths=widths_of(config, _has_qk_norm(model)),
                        head=0 if head is None else sum(map(num_elements, head.parameters())))


def available_bytes(device: torch.device) -> int:
    """Return the total memory of a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return psutil.virtual_memory().total
