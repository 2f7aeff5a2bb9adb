"""What is in memory while torch computes without values: each tensor's storage from when it is made until it is gone.

Where nothing has values, nothing can be asked for them. A program that asks whether something holds (the check of a
kernel, whether all tokens are real) is told that it does; a number is 1; and where it looks for what is scored, or
routed, all of it is.
"""

import weakref
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmmods.core.plan import Traffic
from lmmods.torch_engine.compat.torch import (
    GROUPED,
    INDEXING,
    READING,
    DispatchMode,
    arithmetic,
    group_of,
    grouped,
    has_values,
    resizing,
    tensors_in,
)

aten = torch.ops.aten
# Collectives by the names of their operators, those of processes and those of sharded tensors.
COLLECTIVES = {"_allgather_base_": "all-gather", "all_gather_into_tensor": "all-gather",
               "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_tensor": "reduce-scatter",
               "allreduce_": "all-reduce", "all_reduce": "all-reduce"}
ANSWERS = {READING: lambda x: 1.0 if x.is_floating_point() else x.dtype == torch.bool or 1,
           aten.allclose.default: lambda _: True, aten.equal.default: lambda _: True,
           aten.nonzero.default: lambda x: x.new_empty((x.numel(), x.ndim), dtype=torch.long)}


class Ledger(DispatchMode):
    """Counts bytes, arithmetic and collectives of what runs while it is entered, within `without_values`.

    Args:
        vocab_size: Tensors of this width are named logits.
    """

    def __init__(self, vocab_size: int | None = None) -> None:
        super().__init__()
        self.flops = 0
        self.traffic: dict[tuple[str, int], Traffic] = {}  # by kind and processes
        self._vocab_size = vocab_size
        self._kinds: dict[int, str] = {}
        self._sizes: dict[int, int] = {}  # bytes of what lives
        self._numbers: dict[int, tuple[int, weakref.ref]] = {}  # by the storage's id
        self._num_seen = 0
        self._events: list[tuple[int, int]] = []  # a storage's number, and the bytes that it gains or loses
        self._before: dict[int, int] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> "Ledger":
        self._hooks.enter_context(resizing(self._resize))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._hooks.close()

    def begin(self) -> None:
        """From here on peak, arithmetic and collectives are counted."""
        self.flops, self.traffic, self._events, self._before = 0, {}, [], dict(self._sizes)

    def name(self, kind: str, tensors: list[Tensor]) -> None:
        """Say what tensors are, for as long as they have lived."""
        for tensor in tensors:
            self._kinds[self._number(tensor.untyped_storage())] = kind

    @property
    def num_seen(self) -> int:
        """Storages until now."""
        return self._num_seen

    def name_new(self, kind: str, first: int) -> None:
        """Say what all is that lives, has no name, and was seen when there had been `first` others, or later."""
        for number in self._sizes:
            if number >= first:
                self._kinds.setdefault(number, kind)

    def peak(self) -> dict[str, int]:
        """Bytes by kind at the moment since `begin` when they were most."""
        total = most = sum(self._before.values())
        end = 0
        for place, (_, change) in enumerate(self._events, 1):
            total += change
            if total > most:
                most, end = total, place
        sizes = Counter(self._before)
        for number, change in self._events[:end]:
            sizes[number] += change
        kinds: Counter[str] = Counter()
        for number, size in sizes.items():
            kinds[self._kinds.get(number, "temporaries")] += size
        return {kind: size for kind, size in kinds.items() if size}

    # What is seen ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does to the parts that are here comes next
        if func in ANSWERS and not has_values(args[0]):
            return ANSWERS[func](args[0])
        if func in INDEXING and any(x is not None and x.dtype == torch.bool for x in args[1]):
            args = (args[0], _all_places(args[1]), *args[2:])
        before = self._num_seen
        result = (grouped if func is GROUPED and not has_values(args[0]) else func)(*args, **kwargs)
        made = [x for x in tensors_in(result) if not x.is_meta]  # by which sharded tensors find whole ones' shapes
        for tensor in made:
            number = self._number(tensor.untyped_storage())
            if number >= before and self._vocab_size in tensor.shape[-1:] and tensor.is_floating_point():
                self._kinds[number] = "logits"
        if made:
            self.flops += arithmetic(func, args, kwargs, result)
        kind = COLLECTIVES.get(func.overloadpacket.__name__)
        if kind is not None:
            sizes = [tensor.nbytes for tensor in tensors_in(args)]
            ranks = group_of(args)
            span = ranks[-1] + 1 - ranks[0]
            new = Traffic(1, sum(sizes) if kind == "all-reduce" else max(sizes), len(ranks),
                          span if span > len(ranks) else 0)
            key = kind, len(ranks)
            self.traffic[key] = self.traffic.get(key, Traffic(0, 0, 1)).plus(new)
        return result

    def _number(self, storage: torch.UntypedStorage) -> int:
        """A storage's number; one that is new is counted from here on."""
        place = id(storage)
        if place not in self._numbers:
            number, self._num_seen = self._num_seen, self._num_seen + 1
            self._numbers[place] = number, weakref.ref(storage, lambda _: self._gone(place))
            self._change(number, storage.nbytes())
        return self._numbers[place][0]

    def _gone(self, place: int) -> None:
        number, _ = self._numbers.pop(place)
        self._change(number, -self._sizes[number])
        del self._sizes[number]

    def _resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        number = self._number(storage)
        self._kinds[number] = "gathered parameters"  # nothing else is resized
        self._change(number, num_bytes - self._sizes[number])

    def _change(self, number: int, num_bytes: int) -> None:
        self._sizes[number] = self._sizes.get(number, 0) + num_bytes
        self._events.append((number, num_bytes))


def _all_places(indices: list[Tensor | None]) -> list[Tensor | None]:
    """The same with a place for each element of a mask, as if all were true."""
    found: list[Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype == torch.bool
        found += [index.new_empty(index.numel(), dtype=torch.long)] * index.ndim if is_mask else [index]
    return found
