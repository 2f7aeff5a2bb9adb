"""Private parts of torch that the torch engine uses, as of torch 2.13; tested by tests/compat/test_torch.py.

`torch.nn.Module._apply` is replaced on models that are spread over several devices: see `disable_moving`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode  # sees every operation that torch runs
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_ON_GPU = {getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{end}"):
           getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{end}") for end in ("", "_backward")}
READING = torch.ops.aten._local_scalar_dense.default  # operator of `item` and `bool`
INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default,
            torch.ops.aten._index_put_impl_.default)  # second argument: indices
GROUPED = torch.ops.aten._grouped_mm.default  # operator of `torch.nn.functional.grouped_mm`, forward and backward

__all__ = ["DispatchMode"]


def cpu_multiplies_bfloat16() -> bool:
    """True if this CPU has instructions for bfloat16 products; `torch.cpu.get_capabilities` has them from 2.13 on."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def add_to_all(sums: list[Tensor], values: list[Tensor]) -> None:
    """Add a value to each sum in place, in one kernel on GPUs: `_foreach_add_`."""
    torch._foreach_add_(sums, values)


def version_of(x: Tensor) -> int:
    """Return how often x has been changed in place: `_version`, by which autograd checks its saved tensors."""
    return x._version


def has_forward_hooks(module: nn.Module) -> bool:
    """True if a module has forward hooks, which the public API can register and remove, but not list."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def storage_of(tensor: Tensor) -> int:
    """Return an id of a tensor's storage, unique while it is alive: `_cdata`; fake tensors have no `data_ptr`."""
    return tensor.untyped_storage()._cdata


def hides_saved_tensors() -> bool:
    """True if saved-tensor hooks are active, as in checkpointing: `_top_saved_tensors_default_hooks`.

    Nested hooks would replace them.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def disable_moving(model: nn.Module) -> None:
    """Make `to`, `cuda`, `float` and the like return the model unchanged: all of them call `_apply`."""
    model._apply = lambda *_, **__: model


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested arguments of an operation; torch's pytree functions are private."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _WithoutValues(FakeTensorMode):
    """A mode that copies of its tensors share: `deepcopy` copies a tensor's attributes, and the mode is one of them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_WithoutValues":
        return self


def without_values() -> FakeTensorMode:
    """Return a context in which new tensors have shape, dtype and device, but no values; it may be entered again."""
    return _WithoutValues(allow_non_fake_inputs=True)


def has_values(tensor: Tensor) -> bool:
    """True unless a tensor was made `without_values` or is on the meta device."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def keep_values() -> AbstractContextManager:
    """Return a context inside `without_values` in which tensors have values: `unset_fake_temporarily`."""
    return unset_fake_temporarily()


def is_plain(tensor: Tensor) -> bool:
    """True if a tensor is of torch's own class, with or `without_values`, not of a library's subclass."""
    return type(tensor) in (Tensor, FakeTensor)


def count_flops(func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> int:
    """Return the FLOPs of an operation: `torch.utils.flop_counter`, whose table is private.

    The table lacks attention on CPUs, which is counted as that on GPUs: its operators begin with the same arguments. It
    also lacks grouped matrix products, which are counted here: each row or column is in exactly one group.
    """
    if func is GROUPED:
        return 2 * args[0].shape[-2] * args[0].shape[-1] * args[1].shape[-1]
    # Operators that the table does not have, such as elementwise ones, count 0.
    count = flop_registry.get(_ON_GPU.get(func.overloadpacket, func.overloadpacket))
    return 0 if count is None else count(*args, **kwargs, out_val=result)


def process_group_ranks(args: tuple) -> list[int]:
    """Return the ranks of a collective from its operator's arguments: a boxed `ProcessGroup`, or its name as the last.

    Only `torch.distributed.distributed_c10d._resolve_process_group` finds a group by name.
    """
    for value in args:
        if isinstance(value, torch.ScriptObject) and value._type().name() == "ProcessGroup":
            return torch.distributed.get_process_group_ranks(torch.distributed.ProcessGroup.unbox(value))
    return torch.distributed.get_process_group_ranks(
        torch.distributed.distributed_c10d._resolve_process_group(args[-1]))


def grouped_product(left: Tensor, right: Tensor, ends: Tensor, *_: Any) -> Tensor:
    """Return the output of `GROUPED` without values: torch's own meta function only supports bfloat16.

    Args:
        left: [S, K] with `right` [G, K, N], or [M, S] with [S, N], where S is split into G groups; or [G, M, K] with
            [K, S].
        ends: Ends of the groups, [G].
    """
    shape = (*left.shape[:-1], right.shape[-1])
    if left.ndim == right.ndim == 2:
        return left.new_empty(len(ends), *shape)
    return left.new_empty(shape[-2:])


@contextmanager
def watch_resizes(changed: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Call `changed` with each storage that is resized, and its new bytes: `UntypedStorage.resize_`.

    FSDP2 frees and allocates gathered parameters in this way, which no dispatch mode sees; torch's own memory tracker
    (`torch.distributed._tools.mem_tracker`) replaces the method likewise.
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
def simulate_processes(num_processes: int) -> Iterator[None]:
    """While entered, act as the first of `num_processes` processes, whose collectives do nothing: backend `fake`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_processes)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
