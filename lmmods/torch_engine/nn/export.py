"""A model, or its adapter, as the folder that from_pretrained or PeftModel reads."""

from pathlib import Path

import torch
from torch import Tensor, nn

from lmmods.torch_engine.nn import sharding
from lmmods.torch_engine.nn.loading import base_names


def save(model: nn.Module, folder: Path, adapter_only: bool, dtype: torch.dtype | None, writes: bool) -> None:
    """Write a model of transformers or PEFT. All processes must call this.

    Args:
        adapter_only: The base stays where it came from.
        dtype: Of what has trained, in the file; None keeps its own.
        writes: Whether this process is the one that writes.
    """
    # New rows of the embedding are the mean of the old and need not travel; those that train are in the adapter.
    # transformers would write names as they were read, which it could not read itself where `base_names` helped, and
    # where they are those of MXFP4 codes (5.23).
    keeps_names = _is_renamed(model) or getattr(model, "is_unpacked", False)
    options = {"save_embedding_layers": False} if adapter_only else {"save_original_format": not keeps_names}
    sharded = any(sharding.is_cut(param) for param in model.parameters())
    if sharded:
        options["state_dict"] = _whole_state(model, adapter_only, dtype)
    trained = {} if sharded else {param: param.data for param in model.parameters() if param.requires_grad}
    if dtype:
        for param in trained:
            param.data = param.data.to(dtype)
    if writes:
        model.save_pretrained(folder, **options)
    for param, data in trained.items():  # training may go on, in the type it has
        param.data = data


def _is_renamed(model: nn.Module) -> bool:
    return type(model).__name__.endswith("ForQuestionAnswering") and bool(base_names(model.config))


def _whole_state(model: nn.Module, adapter_only: bool, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """What goes into the folder, gathered from all processes; a tied parameter appears once."""
    wanted = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad or not adapter_only}
    buffers = set(model.state_dict()) & {name for name, _ in model.named_buffers()}
    if not adapter_only:
        wanted |= {name: model.get_buffer(name) for name in sorted(buffers)}
    return {name: sharding.whole(tensor).detach().to(dtype or tensor.dtype) for name, tensor in wanted.items()}
