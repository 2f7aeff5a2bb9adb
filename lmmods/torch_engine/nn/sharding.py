"""Sharded parameters (FSDP2, DeepSpeed ZeRO-3): shard them, gather whole tensors and load whole tensors."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lmmods.core.errors import UserError
from lmmods.core.image_models import has_other_parts, is_of_language_model
from lmmods.core.lazy_array import LazyArray
from lmmods.torch_engine.compat.peft import has_variant, is_lora_of_linear

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def shard(module: nn.Module, network: nn.Module, mesh: DeviceMesh, teacher: nn.Module | None = None) -> None:
    """Shard the parameters of `module` over the processes of Lightning's two-dimensional mesh, in place.

    Each block of `network` is gathered when it runs, the rest of `module` (embeddings, head, vision tower) during its
    forward. Blocks that run several times per pass (ALBERT) belong to the rest. Under tensor parallelism, a block is
    only gathered over processes with the same part of its matrices.

    Args:
        teacher: Another network of `module`, sharded in the same way.

    Raises:
        UserError: See `tensor_parallel`.
    """
    from torch.distributed.fsdp import fully_shard

    data_mesh = full_mesh = mesh["data_parallel"]
    if mesh["tensor_parallel"].size() > 1:
        split_matrices(network, mesh["tensor_parallel"])
        full_mesh = init_device_mesh(mesh.device_type, (mesh.size(),))
    # Inner modules first: each call shards the parameters in it that are not sharded yet.
    for block in [*_blocks(network), *([] if teacher is None else _blocks(teacher))]:
        fully_shard(block, mesh=data_mesh)
    # By default the root module stays gathered after a forward pass, so a checkpoint would not contain its shards.
    fully_shard(module, mesh=full_mesh, reshard_after_forward=True)


def model_parallel_size(strategy: Any) -> int:
    """Return the number of processes that compute each micro-batch together under a Lightning strategy."""
    return tensor_parallel_size(strategy) * context_parallel_size(strategy)


def tensor_parallel_size(strategy: Any) -> int:
    """Return the size of tensor parallelism: the number of processes that compute the same loss."""
    return getattr(strategy, "tensor_parallel_size", 1)


def context_parallel_size(strategy: Any) -> int:
    """Return the size of context parallelism: the number of processes that each row is split over."""
    return getattr(strategy, "context_parallel_size", 1)


def num_losses(strategy: Any) -> int:
    """Return the number of losses computed in parallel and summed: of micro-batches, or of parts of their rows."""
    return strategy.world_size // tensor_parallel_size(strategy)


def num_copies(tensor: Tensor) -> int:
    """Return the number of processes that have each shard of a sharded tensor."""
    # Mesh dimensions that split the tensor; processes along the other dimensions have equal shards.
    split_sizes = [size for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True)
                   if not placement.is_replicate()]
    return torch.distributed.get_world_size() // math.prod(split_sizes)


def _blocks(network: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a transformer: its longest list of modules of one class.

    Other parts than a language model are not among them: a process whose batch has no images does not run them.
    """
    if hasattr(network.config, "num_hidden_groups"):  # layers share their weights
        return []
    has_others = has_other_parts(network)
    lists = [list(module) for name, module in network.named_modules()
             if isinstance(module, nn.ModuleList) and len({type(member) for member in module}) == 1
             and (not has_others or is_of_language_model(name))]
    return max(lists, key=len, default=[])


def outside_blocks(network: nn.Module) -> list[nn.Parameter]:
    """Return the parameters outside the repeated layers: embeddings, final norm, head."""
    inside = {param for block in _blocks(network) for param in block.parameters()}
    return [param for param in network.parameters() if param not in inside]


def is_sharded(tensor: Tensor) -> bool:
    """True if each process has only a shard of the tensor."""
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_id")


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on every process; other tensors are returned as they are. A collective call."""
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):  # valid only in this context, so copy it
            return tensor.detach().clone()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a sharded tensor, sharing its memory; other tensors are returned as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: Tensor) -> tuple[Tensor, range]:
    """Return this process's shard of a tensor sharded by `shard`, and its rows in the whole tensor."""
    part, length = local(tensor), tensor.shape[0]
    if not isinstance(tensor, DTensor):
        return part, range(length)
    return part, shard_range(length, tensor.device_mesh.get_local_rank(), tensor.device_mesh.size())


def shard_range(length: int, rank: int, size: int) -> range:
    """Return the range of rows, of `length`, that `shard` gives to process `rank` of `size`."""
    # Like `Shard(0)` and `torch.chunk`: ceil(length / size) rows per process, fewer or none for the last ones.
    num_rows = math.ceil(length / size)
    return range(min(num_rows * rank, length), min(num_rows * (rank + 1), length))


def place_like(full: Tensor | LazyArray, param: Tensor) -> Tensor:
    """Put a full tensor on the device of `param`, sharded in the same way.

    If `param` is sharded over one mesh dimension, only this process's rows of a lazy array are read.
    """
    if isinstance(full, LazyArray):
        # Rows of a shard on several mesh dimensions are not a single range, so read the whole array.
        if isinstance(param, DTensor) and full.shape == param.shape and len(param.placements) == 1:
            _, rows = local_rows(param)
            return like_shard(full.read_rows(slice(rows.start, rows.stop)), param)
        full = full.read_rows(slice(None))
    full = full.to(param.device)
    if isinstance(param, DTensor) and full.shape == param.shape:
        # src_data_rank=None skips the broadcast: every process has the same values.
        return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
    return full


def like_shard(part: Tensor, param: DTensor) -> DTensor:
    """Return a sharded tensor of `param`'s shape and placement; this process's shard is a copy of `part`."""
    return DTensor.from_local(part.to(param.device_mesh.device_type, copy=True), param.device_mesh, param.placements,
                              run_check=False, shape=param.shape, stride=param.stride())


@torch.no_grad()
def load_into(param: Tensor, full: Tensor | LazyArray) -> None:
    """Copy a full tensor into a parameter, sharded or not."""
    local(param).copy_(local(place_like(full, param)))


# ---------------------------------------------------------------------------------------------------------------------
# Tensor parallelism: matrices are split over processes that compute each micro-batch together.
#
# As in Megatron-LM (Shoeybi et al. 2019), attention is split by heads and the MLP by inner features; the outputs of the
# following matrices are summed over the processes. Every process computes embeddings, norms and output head in full.

FIRST = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # split by output features
SECOND = ("o_proj", "down_proj")  # split by input features
# Architectures whose layers have only these matrices, and mix no features between FIRST and SECOND.
FAMILIES = ("gemma", "granite", "llama", "mistral", "qwen2", "smollm3")


def check_network(config: "PreTrainedConfig", num_processes: int) -> None:
    """Raise UserError if a network does not support tensor parallelism.

    Args:
        config: Configuration of transformers.
        num_processes: Number of processes that compute a micro-batch together.
    """
    if config.model_type not in FAMILIES:
        raise UserError(f"trainer.strategy: tensor_parallel_size {num_processes} is not supported for "
                        f"{config.model_type}, only for {', '.join(FAMILIES)}. Set it to 1; parameters are sharded "
                        "anyway.")
    sizes = {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads",
                                                      "intermediate_size")}
    if indivisible := [f"{name} {size}" for name, size in sizes.items() if size % num_processes]:
        raise UserError(f"trainer.strategy: tensor_parallel_size {num_processes} must divide the model's "
                        f"{' and '.join(indivisible)}. Set it to a common divisor.")
    if config.attention_dropout:
        raise UserError(f"trainer.strategy: tensor_parallel_size {num_processes} cannot be combined with "
                        f"attention_dropout {config.attention_dropout}, whose masks need all heads. Set it to 0 in "
                        "model.config_overrides, or set the size to 1.")


def split_matrices(network: nn.Module, mesh: DeviceMesh) -> None:
    """Split the matrices of a network's layers over the processes of a one-dimensional mesh, in place.

    Raises:
        UserError: See `check_network`; or an adapter does not support it.
    """
    check_network(network.config.get_text_config(), mesh.size())
    for path, module in list(network.named_modules()):
        name = path.rpartition(".")[2]
        if name not in (*FIRST, *SECOND):
            continue
        style = ColwiseParallel if name in FIRST else RowwiseParallel
        layers = [module]
        if is_lora_of_linear(module):
            _check_adapter(module, name, mesh.size())
            # In an adapter B A x, split the matrix that shares the split dimension with W; the other stays whole.
            layers = [module.base_layer, *(module.lora_B if name in FIRST else module.lora_A).values()]
        elif type(module) is not nn.Linear:
            raise UserError(f"lora.modules_to_save: {name} cannot be split by tensor_parallel_size {mesh.size()}. Add "
                            "it to lora.targets instead, or set the size in trainer.strategy to 1.")
        for layer in layers:
            parallelize_module(layer, mesh, style())


def _check_adapter(layer: nn.Module, name: str, num_processes: int) -> None:
    if has_variant(layer):
        raise UserError(f"lora.dora cannot be combined with tensor_parallel_size {num_processes}. Turn one off.")
    if name in SECOND and any(getattr(dropout, "p", 0.0) for dropout in layer.lora_dropout.values()):
        raise UserError(f"lora.dropout cannot be combined with tensor_parallel_size {num_processes} if {name} is "
                        "adapted, as each process has only some of its inputs. Set it to 0, or remove the layer from "
                        "lora.targets.")
