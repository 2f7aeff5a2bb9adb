"""Weights of a network that will be sharded, of which each process reads or draws only its own rows.

Until then stand-ins are in the network: parameters of the right shape and type without memory of their own, which know
where their values are. Whatever needs the values earlier calls `fill`.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from lmmods.core.lazy_array import LazyArray
from lmmods.torch_engine.nn.sharding import like_shard, local_rows, share_of

BLOCK, NESTED_BLOCK = 64, 256  # bitsandbytes' own choice


class Source(Protocol):
    """Where the values of a parameter are. Both are collective calls."""

    def rows(self, rows: range) -> Tensor:
        """Those of this process."""

    def whole(self) -> Tensor:
        """All of them."""


class Stored:
    """In a file."""

    def __init__(self, array: LazyArray):
        self._array = array

    def rows(self, rows: range) -> Tensor:
        return self._array.over_first(slice(rows.start, rows.stop))

    def whole(self) -> Tensor:
        return self._array.over_first(slice(None))


class Kept:
    """In the memory of the processes, a share in each: of what could only be made whole."""

    def __init__(self, whole: Tensor):
        self._length = whole.shape[0]
        self._part = whole[self._share(torch.distributed.get_rank())].clone()

    def _share(self, rank: int) -> slice:
        own = share_of(self._length, rank, torch.distributed.get_world_size())
        return slice(own.start, own.stop)

    def rows(self, rows: range) -> Tensor:
        return self._part

    def whole(self) -> Tensor:
        found = self._part.new_zeros(self._length, *self._part.shape[1:])
        for rank in range(torch.distributed.get_world_size()):
            own = self._share(rank)
            part = self._part if rank == torch.distributed.get_rank() else torch.empty_like(found[own])
            torch.distributed.broadcast(part, rank)
            found[own] = part
        return found


class Codes:
    """In a file, of which they are the 4-bit codes of bitsandbytes, to the bit: blocks do not depend on each other, and
    of scales, which are quantised all at once, each process finds those of its rows and gets the others'.

    Args:
        matrix: [out, in], or several [E, ...], which are one long row to bitsandbytes.
        quant_type: `nf4` or `fp4`.
        double: Quantise the scales too.
        storage: Type that the codes are kept in.
        device: Where they are made.
    """

    def __init__(self, matrix: LazyArray, quant_type: str, double: bool, storage: torch.dtype, device: torch.device):
        from bitsandbytes.functional import QuantState

        self._matrix = matrix if matrix.ndim == 2 else matrix.below_each_other()
        self.double, self.storage, self.device = double, storage, device
        num_bytes = -(-matrix.size // 2)
        if num_bytes % storage.itemsize:
            raise ValueError(f"{num_bytes} bytes of 4-bit codes cannot be kept as {storage}")
        self.shape = (num_bytes // storage.itemsize, 1)
        # bitsandbytes' description of the codes; its scales come with them
        self.state = QuantState(None, torch.Size(matrix.shape), blocksize=BLOCK, quant_type=quant_type,
                                dtype=matrix.dtype)

    def rows(self, rows: range) -> Tensor:
        codes, scales = self._quantized(rows)
        torch.distributed.all_reduce(scales, torch.distributed.ReduceOp.MAX)
        self._settle(scales)
        return codes

    def whole(self) -> Tensor:
        codes, scales = self._quantized(range(self.shape[0]))
        self._settle(scales)
        return codes

    def _quantized(self, rows: range) -> tuple[Tensor, Tensor]:
        """Codes of some rows, and the absolute largest values of all blocks, zero where they are of none of these."""
        from bitsandbytes.functional import quantize_4bit

        width, size = BLOCK // 2, self.storage.itemsize  # in bytes
        scales = torch.zeros(-(-self._matrix.size // BLOCK), device=self.device)
        if not rows:
            return torch.empty(0, 1, dtype=self.storage, device=self.device), scales
        first, last = rows.start * size // width, -(-rows.stop * size // width)
        packed, state = quantize_4bit(self._flat(first * BLOCK, min(last * BLOCK, self._matrix.size)).to(self.device),
                                      quant_type=self.state.quant_type)
        scales[first:last] = state.absmax
        own = packed.view(-1)[rows.start * size - first * width:rows.stop * size - first * width]
        return own.clone().view(self.storage).unsqueeze(1), scales

    def _flat(self, first: int, last: int) -> Tensor:
        length = self._matrix.shape[1]
        begin = first // length
        found = self._matrix.over_first(slice(begin, -(-last // length))).reshape(-1)
        return found[first - begin * length:last - begin * length]

    def _settle(self, scales: Tensor) -> None:
        from bitsandbytes.functional import QuantState, get_4bit_type, quantize_blockwise

        state, offset, nested = self.state, None, None
        if self.double:
            offset = scales.mean()
            scales, nested = quantize_blockwise(scales - offset, blocksize=NESTED_BLOCK)
        vars(state).update(vars(QuantState(
            scales, state.shape, get_4bit_type(state.quant_type, self.device), BLOCK, state.quant_type, state.dtype,
            offset, nested)))


def wait_for(value: Tensor | LazyArray, array: LazyArray | None, device: torch.device) -> nn.Parameter:
    """A stand-in for a weight, of which this process keeps no more than its rows.

    Args:
        array: The values, where they are not `value` itself.
    """
    if isinstance(value, LazyArray):
        param = nn.Parameter(_nothing(value.shape, value.dtype, device), requires_grad=value.dtype.is_floating_point)
        param.source = Stored(value)
        return param
    param = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=value.is_floating_point())
    if not hasattr(param, "source"):
        let_wait(param, Kept(param.data) if array is None else Stored(array))
    return param


def let_wait(param: nn.Parameter, source: Source) -> None:
    """Make a stand-in of a parameter."""
    param.source = source
    param.data = _nothing(param.shape, param.dtype, param.device)


def wait_for_codes(codes: Codes, module: nn.Module | None) -> nn.Parameter:
    """A stand-in for a weight in 4 bits, of a layer of bitsandbytes or of experts."""
    from bitsandbytes.nn import Params4bit

    state = codes.state
    param = Params4bit(_nothing(codes.shape, codes.storage, codes.device), quant_state=state, blocksize=BLOCK,
                       compress_statistics=codes.double, quant_type=state.quant_type, quant_storage=codes.storage,
                       module=module, bnb_quantized=True)
    if module is not None:
        module.quant_state = state
    param.source = codes
    return param


def _nothing(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that takes no memory. Who computes with it gets no numbers, if it can hold any such thing."""
    return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device).expand(shape)


def cast(param: nn.Parameter, dtype: torch.dtype) -> None:
    """Store a weight in another type, also one that waits."""
    param.data = _nothing(param.shape, dtype, param.device) if hasattr(param, "source") else param.data.to(dtype)


def values_of(param: nn.Parameter) -> Tensor:
    """All values of a weight, also of one that waits, which goes on waiting. A collective call."""
    return param.source.whole() if hasattr(param, "source") else param


def fill(module: nn.Module | None) -> bool:
    """Read all of the weights of a module that wait, on every process: all must call this. Whether there were any."""
    found = [param for param in module.parameters() if hasattr(param, "source")] if module is not None else []
    for param in found:
        param.data = param.source.whole().to(param.device, param.dtype)
        del param.source
    return bool(found)


def waiting(model: nn.Module) -> dict[str, Source]:
    """What waits in a network, by name. It is ready to be sharded then, and has no values."""
    found = {name: param.source for name, param in model.named_parameters() if hasattr(param, "source")}
    for param, places in _places(model).items():
        if hasattr(param, "source"):
            _put(places, torch.empty(param.shape, dtype=param.dtype, device="meta"), param.requires_grad)
    return found


@torch.no_grad()
def read_shards(model: nn.Module, sources: dict[str, Source]) -> None:
    """Read what `waiting` has told of a network that is sharded since; `sources` is empty then."""
    params, places = dict(model.named_parameters()), _places(model)
    for name in list(sources):
        param, source = params[name], sources.pop(name)
        part = source.rows(local_rows(param)[1]).to(param.dtype)
        _put(places[param], like_shard(part, param), param.requires_grad)


def _places(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Where each parameter is: the modules that have it, and its name there."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(param, []).append((module, name))
    return places


def _put(places: list[tuple[nn.Module, str]], value: Tensor, trains: bool) -> None:
    param = nn.Parameter(value, requires_grad=trains)
    for module, name in places:
        setattr(module, name, param)
