"""Tensor parallelism: matrices of a network cut over processes that compute every micro-batch together.

As Megatron-LM cuts them (Shoeybi et al. 2019): of the attention whole heads, of the MLP inner features; what follows
adds up over the processes. Embeddings, norms and the output head are computed by each process.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lmmods.core.errors import UserError
from lmmods.torch_engine.compat.peft import has_variant, is_lora_of_linear

FIRST = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # each process has some of the outputs
SECOND = ("o_proj", "down_proj")  # and of these it takes them as inputs
# Layers of these modules and no others, and nothing between the two that would see features of other processes.
FAMILIES = ("gemma", "granite", "llama", "mistral", "qwen2", "smollm3")


def check_network(config: Any, num_processes: int) -> None:
    """UserError for a network whose matrices cannot be cut.

    Args:
        config: Of transformers.
        num_processes: That compute a micro-batch together.
    """
    if config.model_type not in FAMILIES:
        raise UserError(f"trainer.strategy: tensor_parallel_size {num_processes} knows no way to cut "
                        f"{config.model_type}, only {', '.join(FAMILIES)}. Set it to 1: parameters are sharded anyway.")
    sizes = {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads",
                                                      "intermediate_size")}
    if odd := [f"{name} {size}" for name, size in sizes.items() if size % num_processes]:
        raise UserError(f"trainer.strategy: tensor_parallel_size {num_processes} must divide the model's "
                        f"{' and '.join(odd)}.")
    if config.attention_dropout:
        raise UserError(f"trainer.strategy: tensor_parallel_size {num_processes} does not go with attention_dropout "
                        f"{config.attention_dropout}, whose masks are those of all heads: set it to 0 in "
                        "model.config_overrides, or the size to 1.")


def cut_matrices(network: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the matrices of a network's layers over the processes of a one-dimensional mesh, in place.

    Raises:
        UserError: As `check_network`, or for adapters that cannot follow.
    """
    check_network(network.config.get_text_config(), mesh.size())
    for name, module in list(network.named_modules()):
        kind = name.rpartition(".")[2]
        if kind not in (*FIRST, *SECOND):
            continue
        style = ColwiseParallel if kind in FIRST else RowwiseParallel
        parts = [module]
        if is_lora_of_linear(module):
            _check_adapter(module, kind, mesh.size())
            parts = [module.base_layer, *(module.lora_B if kind in FIRST else module.lora_A).values()]
        elif type(module) is not nn.Linear:
            raise UserError(f"lora.modules_to_save: {kind} cannot be cut by tensor_parallel_size {mesh.size()}. Adapt "
                            "it by lora.targets, or set trainer.strategy's size to 1.")
        for part in parts:
            parallelize_module(part, mesh, style())


def _check_adapter(layer: nn.Module, kind: str, num_processes: int) -> None:
    if has_variant(layer):
        raise UserError(f"lora.dora does not go with tensor_parallel_size {num_processes}: set one of them off.")
    if kind in SECOND and any(getattr(dropout, "p", 0.0) for dropout in layer.lora_dropout.values()):
        raise UserError(f"lora.dropout does not go with tensor_parallel_size {num_processes} where {kind} is adapted, "
                        "of whose inputs each process has some: set it to 0, or leave the layer out of lora.targets.")
