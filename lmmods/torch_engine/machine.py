"""torch's devices: whether those that a recipe asks for are here, and what manifest.json says of them."""

from typing import Any

import lightning as L
import torch

from lmmods.core.errors import UserError
from lmmods.core.hardware import no_device
from lmmods.core.machine import processor


def check_accelerator(accelerator: str, devices: list[int] | int | str) -> None:
    """Raise UserError where torch has no such devices on this machine, or not as many. Lightning checks the rest."""
    if accelerator == "tpu":
        raise UserError("trainer.accelerator is tpu, on which the torch engine trains nothing. Take --engine jax.")
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if not {"gpu": cuda or mps, "cuda": cuda, "mps": mps}.get(accelerator, True):
        raise no_device(accelerator, "torch")
    indices = devices if isinstance(devices, list) else range(devices) if isinstance(devices, int) else []
    if accelerator == "cpu" or not cuda:
        if isinstance(devices, list) and not mps:
            raise UserError(f"trainer.devices is {devices}, indices of GPUs, but torch finds none on this machine. "
                            "Set it to auto.")
    elif (number := torch.cuda.device_count()) <= max(indices, default=-1):
        raise UserError(f"trainer.devices is {devices}, but this machine has {number} (cuda). Lower it, or set it to "
                        "auto.")


def describe_machine(trainer: L.Trainer) -> dict[str, Any]:
    """Devices and settings of a run that is about to train; keys as on JAX."""
    device = trainer.strategy.root_device
    settings: dict[str, Any] = {
        "threads": torch.get_num_threads(), "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision()}
    if device.type == "cuda":
        settings |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
                     "cudnn_benchmark": torch.backends.cudnn.benchmark, "cudnn_tf32": torch.backends.cudnn.allow_tf32}
    return {"accelerator": device.type,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
            "num_devices": trainer.world_size, "num_processes": trainer.world_size,
            "strategy": type(trainer.strategy).__name__, "settings": settings}
