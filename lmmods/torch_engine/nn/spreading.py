"""A base spread over the GPUs of one machine by accelerate, as in qlora.py: layers in turn, each whole on a device."""

import re
from typing import Any

import torch
from torch import nn

from lmmods.core.errors import UserError
from lmmods.torch_engine.compat.torch import never_move

SIZE = re.compile(r"\d+(\.\d+)?\s*[KMGT]i?B", re.IGNORECASE)


def placement(max_memory: str | dict[int | str, str]) -> dict[str, Any]:
    """Arguments of from_pretrained that spread a model under these limits.

    Args:
        max_memory: Of each GPU alike ("20GiB", "20000MB"), or by device: number of a GPU; `cpu` where there is none.

    Raises:
        UserError: No such device, or no size.
    """
    num_gpus = torch.cuda.device_count()
    known = list(range(num_gpus)) or ["cpu"]
    if isinstance(max_memory, str) and not num_gpus:
        raise UserError(f"model.max_memory is {max_memory}, for each GPU, but this machine has none. Take it out, or "
                        "name the device: {cpu: 8GiB}.")
    limits = dict.fromkeys(known, max_memory) if isinstance(max_memory, str) else max_memory
    for device, size in limits.items():
        if device not in known:
            raise UserError(f"model.max_memory names the device {device!r}, which does not train on this machine. "
                            f"There are: {', '.join(map(str, known))}.")
        if not SIZE.fullmatch(str(size).strip()):
            raise UserError(f"model.max_memory: {size!r} is no size of memory. Examples: 20GiB, 20000MB.")
    return {"device_map": "auto", "max_memory": dict(limits)}


def keep_in_place(model: nn.Module, max_memory: str | dict[int | str, str]) -> None:
    """Let nobody move a spread model as a whole, as Lightning would, once all of it has found a device.

    Raises:
        UserError: Parts were left for host memory or the disk, where nothing trains.
    """
    known = set(range(torch.cuda.device_count())) or {"cpu"}
    places = getattr(model, "hf_device_map", {})  # missing where all of it is on one device
    left = [part for part, device in places.items() if device not in known]
    if left:
        raise no_room(max_memory, left[0])
    if places:
        never_move(model)


def no_room(max_memory: str | dict[int | str, str], part: str = "some of its layers") -> UserError:
    """What to say where a part of the model would go to host memory or the disk."""
    return UserError(f"model.max_memory is {max_memory}, where not all of the model finds room ({part} does not). "
                     "Raise it, or set model.quantize.")
