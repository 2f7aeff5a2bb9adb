"""What the torch engine needs of torch that has no public name. Held by tests/compat/test_torch.py; read in torch 2.13.

`torch.nn.Module._apply` is replaced on models that lie on several devices: see `never_move`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode  # sees every operation that torch runs
from torch.utils._python_dispatch import _disable_current_modes as with_values  # amid `without_values`: as ever
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_ON_GPU = {getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{end}"):
           getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{end}") for end in ("", "_backward")}
READING = torch.ops.aten._local_scalar_dense.default  # what `item` and `bool` run
INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default,
            torch.ops.aten._index_put_impl_.default)  # second argument: indices
GROUPED = torch.ops.aten._grouped_mm.default  # what `torch.nn.functional.grouped_mm` runs, forward and backward

__all__ = ["DispatchMode", "with_values"]


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 products. `torch.cpu.get_capabilities` tells so in 2.13."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def scale_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all tensors of a device in place, in one kernel on GPUs: `_foreach_mul_`; a loop is public."""
    torch._foreach_mul_(tensors, factor)


def add_to_all(sums: list[Tensor], values: list[Tensor]) -> None:
    """Add to each sum its value in place, in one kernel on GPUs: `_foreach_add_`; a loop is public."""
    torch._foreach_add_(sums, values)


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether something runs around the module's forward: hooks can be registered and removed, but not listed."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def storage_of(tensor: Tensor) -> int:
    """Which storage a tensor has, as long as that is alive: `_cdata`; tensors without values have no `data_ptr`."""
    return tensor.untyped_storage()._cdata


def hides_saved_tensors() -> bool:
    """Whether hooks are on what autograd saves, as in checkpointing: `_top_saved_tensors_default_hooks`.

    Others inside of them would take their place.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def never_move(model: nn.Module) -> None:
    """Let nobody move or cast the model as a whole: `_apply` is what `to`, `cuda` and `float` all end in."""
    model._apply = lambda *_, **__: model


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested arguments of an operation; `torch.utils` has no public name for its trees."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def without_values() -> Iterator[None]:
    """While this is entered, what is made or computed has shape, type and device, but no values: `FakeTensorMode`.

    `Module.to` and its kin swap such parameters (`torch.utils.swap_tensors`), which fails where anybody watches them;
    they get the other one's memory instead.
    """
    original = torch.utils.swap_tensors
    torch.utils.swap_tensors = lambda one, other: setattr(one, "data", other.data)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        torch.utils.swap_tensors = original


def has_values(tensor: Tensor) -> bool:
    """Whether there is anything to read: not in a tensor made `without_values`, nor on the device `meta`."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def is_plain(tensor: Tensor) -> bool:
    """Whether it is torch's own tensor, with or `without_values`, and none of a library's subclasses."""
    return type(tensor) in (Tensor, FakeTensor)


def arithmetic(func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> int:
    """Additions and multiplications of an operation: `torch.utils.flop_counter`, whose table has no public name.

    Attention on processors is not in it, and counted as that on GPUs, whose operators begin with the same arguments.
    Nor are products of groups of rows or columns, which all of them together are in one group each.
    """
    if func is GROUPED:
        return 2 * args[0].shape[-2] * args[0].shape[-1] * args[1].shape[-1]
    count = flop_registry.get(_ON_GPU.get(func.overloadpacket, func.overloadpacket))
    return 0 if count is None else count(*args, **kwargs, out_val=result)


def group_of(args: tuple) -> list[int]:
    """The processes of a collective, by its operator's arguments: a boxed `ProcessGroup`, or its name behind all else.

    Only `torch.distributed.distributed_c10d._resolve_process_group` finds one by its name.
    """
    for value in args:
        if isinstance(value, torch.ScriptObject) and value._type().name() == "ProcessGroup":
            return torch.distributed.get_process_group_ranks(torch.distributed.ProcessGroup.unbox(value))
    return torch.distributed.get_process_group_ranks(
        torch.distributed.distributed_c10d._resolve_process_group(args[-1]))


def grouped(left: Tensor, right: Tensor, ends: Tensor, *_: Any) -> Tensor:
    """The product of groups, without values: torch's own outline of `GROUPED` takes bfloat16 alone.

    Args:
        left: [S, K] with `right` [G, K, N], or [M, S] with [S, N]: S is cut into G groups; or [G, M, K] with [K, S].
        ends: [G] of the groups.
    """
    shape = (*left.shape[:-1], right.shape[-1])
    if left.ndim == right.ndim == 2:
        return left.new_empty(len(ends), *shape)
    return left.new_empty(shape[-2:])


@contextmanager
def resizing(changed: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """`changed` is called with each storage that is resized, and its new bytes: `UntypedStorage.resize_`.

    FSDP2 frees and makes whole parameters so, past all operations.
    """
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        changed(storage, num_bytes)
        return original(storage, num_bytes)

    torch.UntypedStorage.resize_ = resize
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original


@contextmanager
def imagined_processes(number: int) -> Iterator[None]:
    """While this is entered, this is the first of so many processes, whose collectives do nothing: backend `fake`.

    The numbers in a `DeviceMesh`, of which FSDP2 makes some of its own, are values also amid `without_values`.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    original = DeviceMesh.__init__

    def init(*args: Any, **kwargs: Any) -> None:
        with with_values():
            original(*args, **kwargs)

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    DeviceMesh.__init__ = init
    try:
        yield
    finally:
        DeviceMesh.__init__ = original
        torch.distributed.destroy_process_group()
