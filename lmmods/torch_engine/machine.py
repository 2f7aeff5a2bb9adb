"""What manifest.json says of torch's devices, and of the settings that change numbers."""

from typing import Any

import lightning as L
import torch

from lmmods.core.machine import processor


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
