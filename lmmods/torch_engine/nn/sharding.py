"""Sharded parameters (FSDP2, DeepSpeed ZeRO-3): shard them, gather whole tensors from them and put them back."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lmmods.core.errors import UserError
from lmmods.core.lazy_array import LazyArray
from lmmods.torch_engine.compat.peft import has_variant, is_lora_of_linear

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def shard(module: nn.Module, network: nn.Module, mesh: DeviceMesh, teacher: nn.Module | None = None) -> None:
    """Shard the parameters of `module` over the processes of Lightning's two-dimensional mesh, in place.

    Each block of `network` is gathered when it runs, the rest of `module` (embeddings, head) during its forward. Blocks
    that run several times per pass (ALBERT) belong to the rest. Under tensor parallelism, a block is gathered only
    among processes with the same part of its matrices.

    Args:
        teacher: Another network of `module`, sharded likewise.

    Raises:
        UserError: See `tensor_parallel`.
    """
    from torch.distributed.fsdp import fully_shard

    data = everyone = mesh["data_parallel"]
    if mesh["tensor_parallel"].size() > 1:
        split_matrices(network, mesh["tensor_parallel"])
        everyone = init_device_mesh(mesh.device_type, (mesh.size(),))
    # Inner modules first: each call shards the parameters below it that are not sharded yet.
    for block in [*_blocks(network), *([] if teacher is None else _blocks(teacher))]:
        fully_shard(block, mesh=data)
    # By default the root module stays gathered after a forward pass, and a checkpoint would not hold its shards.
    fully_shard(module, mesh=everyone, reshard_after_forward=True)


def model_parallel_size(strategy: Any) -> int:
    """Return how many processes compute each micro-batch together under a strategy of Lightning."""
    return tensor_parallel_size(strategy) * context_parallel_size(strategy)


def tensor_parallel_size(strategy: Any) -> int:
    """Return how many of them compute the same loss: the size of tensor parallelism."""
    return getattr(strategy, "tensor_parallel_size", 1)


def context_parallel_size(strategy: Any) -> int:
    """Return how many processes each row is cut over, whose losses add up: the size of context parallelism."""
    return getattr(strategy, "context_parallel_size", 1)


def num_losses(strategy: Any) -> int:
    """Return how many losses are computed in parallel and add up: of micro-batches, or of parts of their rows."""
    return strategy.world_size // tensor_parallel_size(strategy)


def num_copies(tensor: Tensor) -> int:
    """Return how many processes hold each shard of a sharded tensor."""
    # Mesh dimensions that split the tensor; processes along the others hold equal shards.
    parts = [size for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True)
             if not placement.is_replicate()]
    return torch.distributed.get_world_size() // math.prod(parts)


def _blocks(network: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a transformer: the members of its longest list of modules of one class."""
    if hasattr(network.config, "num_hidden_groups"):  # layers share their weights
        return []
    lists = [list(module) for module in network.modules()
             if isinstance(module, nn.ModuleList) and len({type(member) for member in module}) == 1]
    return max(lists, key=len, default=[])


def outside_blocks(network: nn.Module) -> list[nn.Parameter]:
    """Return the parameters outside the repeated layers: embeddings, final norm, head."""
    inside = {param for block in _blocks(network) for param in block.parameters()}
    return [param for param in network.parameters() if param not in inside]


def is_sharded(tensor: Tensor) -> bool:
    """True if each process holds only a shard of the tensor."""
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_id")


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on every process; other tensors are returned as they are. A collective call."""
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):  # valid inside only, hence the copy
            return tensor.detach().clone()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a sharded tensor, sharing its memory; other tensors are returned as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: Tensor) -> tuple[Tensor, range]:
    """Return this process's shard of a tensor sharded by `shard`, and the rows of the whole tensor that it holds."""
    part, length = local(tensor), tensor.shape[0]
    if not isinstance(tensor, DTensor):
        return part, range(length)
    return part, shard_range(length, tensor.device_mesh.get_local_rank(), tensor.device_mesh.size())


def shard_range(length: int, rank: int, size: int) -> range:
    """Return the rows, of `length`, that `shard` gives to process `rank` of `size`."""
    # As `Shard(0)`, which splits like `torch.chunk`: ceil(length / size) rows each, fewer or none for the last.
    each = math.ceil(length / size)
    return range(min(each * rank, length), min(each * (rank + 1), length))


def place_like(full: Tensor | LazyArray, param: Tensor) -> Tensor:
    """Put a full tensor on the device of `param`, sharded in the same way.

    Of a lazy array no more than this process's rows are read if `param` is sharded over one mesh dimension.
    """
    if isinstance(full, LazyArray):
        # Rows of a shard on several mesh dimensions are not one range, so the array is read in full.
        if isinstance(param, DTensor) and full.shape == param.shape and len(param.placements) == 1:
            _, rows = local_rows(param)
            return like_shard(full.over_first(slice(rows.start, rows.stop)), param)
        full = full.over_first(slice(None))
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
# Tensor parallelism: matrices are cut over processes that compute each micro-batch together.
#
# As in Megatron-LM (Shoeybi et al. 2019), attention is cut by heads and the MLP by inner features; the outputs of the
# following matrices are summed over the processes. Every process computes embeddings, norms and output head in full.

FIRST = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # cut by output features
SECOND = ("o_proj", "down_proj")  # cut by input features
# Architectures whose layers have only these matrices, and nothing between FIRST and SECOND that mixes the features.
FAMILIES = ("gemma", "granite", "llama", "mistral", "qwen2", "smollm3")


def check_network(config: "PreTrainedConfig", num_processes: int) -> None:
    """Raise UserError if a network does not support tensor parallelism.

    Args:
        config: Configuration of transformers.
        num_processes: Processes that compute a micro-batch together.
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


def split_matrices(network: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the matrices of a network's layers over the processes of a one-dimensional mesh, in place.

    Raises:
        UserError: As `check_network`, or for adapters that do not support it.
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
            # Of an adapter B A x, the matrix that shares the cut dimension with W is cut; the other stays whole.
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
