"""Save a model or its adapter as a folder for from_pretrained or PeftModel."""

from pathlib import Path

import torch
from torch import Tensor, nn

from lmmods.torch_engine.nn import sharding
from lmmods.torch_engine.nn.loading import base_names
from lmmods.torch_engine.nn.principal import changes


def save(model: nn.Module, folder: Path, adapter_only: bool, dtype: torch.dtype | None, writes: bool) -> None:
    """Write a model of transformers or PEFT. A collective call.

    Args:
        adapter_only: Write the adapter without the base.
        dtype: Dtype of the weights in the file; None does not change it.
        writes: True on the process that writes.
    """
    # New embedding rows are not saved: they are the mean of the old rows or, if they train, part of the adapter.
    # By default transformers writes weights under their names in the loaded files. It cannot read these if
    # `load_pretrained` mapped the names, or if they are names of MXFP4 codes (5.23).
    keeps_names = _is_renamed(model) or getattr(model, "maps_names", False)
    options = {"save_embedding_layers": False} if adapter_only else {"save_original_format": not keeps_names}
    has_shards = any(sharding.is_sharded(param) for param in model.parameters())
    is_change = adapter_only and getattr(model, "first_factors", None)
    if is_change:
        settings, state = changes(model)
        options["state_dict"] = {name: tensor.to(dtype or tensor.dtype) for name, tensor in state.items()}
    elif has_shards:
        options["state_dict"] = _whole_state(model, adapter_only, dtype)
    # Without an adapter, frozen parameters are also written.
    written = {} if has_shards or is_change else {
        param: param.data for param in model.parameters() if param.requires_grad or not adapter_only}
    if dtype:
        for param in written:
            param.data = param.data.to(dtype)
    if writes and is_change:
        original_settings, model.peft_config["default"] = model.peft_config["default"], settings
        model.save_pretrained(folder, **options)
        model.peft_config["default"] = original_settings
    elif writes:
        model.save_pretrained(folder, **options)
    for param, data in written.items():  # restore the dtype, as training may continue
        param.data = data


def _is_renamed(model: nn.Module) -> bool:
    return type(model).__name__.endswith("ForQuestionAnswering") and bool(base_names(model.config))


def _whole_state(model: nn.Module, adapter_only: bool, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the state dict to save, gathered from all processes; a tied parameter appears once."""
    tensors = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad or not adapter_only}
    buffers = set(model.state_dict()) & {name for name, _ in model.named_buffers()}
    if not adapter_only:
        tensors |= {name: model.get_buffer(name) for name in sorted(buffers)}
    return {name: sharding.whole(tensor).detach().to(dtype or tensor.dtype) for name, tensor in tensors.items()}
