"""Imitation of a CUDA graph on a CPU.

A capture runs nothing: the test's function runs, and its writes are undone. It must not read a value into Python. A
replay repeats the same operations on the same memory, without Python in between.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select")  # a GPU would have to be waited for


class Operations(TorchDispatchMode):
    """Context that lists the operations in it, and refuses those that a graph cannot contain."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self.written: list[tuple[Tensor, Tensor]] = []  # tensors, and their values before

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.overloadpacket.__name__ in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written.append((value, value.clone()))
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result


def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a function that repeats the operations of `run`, into the same memory."""
    with Operations() as operations:
        output = run()
    for tensor, before in reversed(operations.written):
        tensor.copy_(before)

    def replay() -> Tensor:
        for function, args, kwargs, results in operations.calls:
            for old, new in zip(tree_leaves(results), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        return output

    return replay
