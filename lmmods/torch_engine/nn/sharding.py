"""Parameters cut over processes (FSDP2, DeepSpeed ZeRO-3), and whole tensors out of them and back."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(module: nn.Module, network: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the parameters of `module` over the processes of a one-dimensional mesh, in place.

    Each block of `network` is gathered when it runs, the rest of `module` (embeddings, head) while its forward runs.
    Blocks that an architecture runs several times a pass (ALBERT) are kept with the rest.
    """
    from torch.distributed.fsdp import fully_shard

    for block in _blocks(network):
        fully_shard(block, mesh=mesh)
    # By default the outermost stays whole after a forward pass, and what is saved then would not be its shards.
    fully_shard(module, mesh=mesh, reshard_after_forward=True)


def _blocks(network: nn.Module) -> list[nn.Module]:
    """The repeated layers of a transformer: the members of its longest list of modules of one class."""
    if hasattr(network.config, "num_hidden_groups"):  # layers share their weights
        return []
    lists = [list(module) for module in network.modules()
             if isinstance(module, nn.ModuleList) and len({type(member) for member in module}) == 1]
    return max(lists, key=len, default=[])


def outside_blocks(network: nn.Module) -> list[nn.Parameter]:
    """Parameters that are in no repeated layer: embeddings, the last norm, the head."""
    inside = {param for block in _blocks(network) for param in block.parameters()}
    return [param for param in network.parameters() if param not in inside]


def is_cut(tensor: Tensor) -> bool:
    """Whether each process holds a part of the tensor only."""
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_id")


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one, on every process (all must call this); any other as it is."""
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor; any other as it is. Shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: Tensor) -> tuple[Tensor, range]:
    """This process's part of a tensor that `shard` has cut, and the rows of the whole that it holds."""
    part, length = local(tensor), tensor.shape[0]
    if not isinstance(tensor, DTensor):
        return part, range(length)
    each = math.ceil(length / tensor.device_mesh.size())
    first = min(each * tensor.device_mesh.get_local_rank(), length)
    return part, range(first, first + part.shape[0])


def placed_like(full: Tensor, param: Tensor) -> Tensor:
    """A full tensor on the device of `param`, and cut as it is where that is sharded."""
    full = full.to(param.device)
    if isinstance(param, DTensor) and full.shape == param.shape:
        # No process sends its values to the others: each has the same.
        return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
    return full


@torch.no_grad()
def load_into(param: Tensor, full: Tensor) -> None:
    """Copy a full tensor into a parameter, sharded or not."""
    local(param).copy_(local(placed_like(full, param)))
