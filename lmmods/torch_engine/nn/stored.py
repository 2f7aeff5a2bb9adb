"""Deferred weights of a network that will be sharded: each process reads or initialises only its own rows.

Until then the network has placeholders: parameters with shape and dtype, but without memory. Their attribute `source`
reads their values. Code that needs the values earlier calls `fill`.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from lmmods.core.lazy_array import LazyArray
from lmmods.torch_engine.nn.sharding import like_shard, local_rows, shard_range

BLOCK, NESTED_BLOCK = 64, 256  # block sizes used by bitsandbytes


class Source(Protocol):
    """Source of a parameter's values. Both methods are collective calls."""

    def rows(self, rows: range) -> Tensor:
        """Return the rows of this process."""

    def whole(self) -> Tensor:
        """Return all rows."""


class Stored:
    """Values in a file."""

    def __init__(self, array: LazyArray):
        self._array = array

    def rows(self, rows: range) -> Tensor:
        return self._array.read_rows(slice(rows.start, rows.stop))

    def whole(self) -> Tensor:
        return self._array.read_rows(slice(None))


class Kept:
    """Values that can only be computed as a whole: each process keeps its rows in memory."""

    def __init__(self, whole: Tensor):
        self._length = whole.shape[0]
        # A copy, so that the whole can be freed.
        self._values = whole[self._rows_of(torch.distributed.get_rank())].clone()

    def _rows_of(self, rank: int) -> slice:
        rows = shard_range(self._length, rank, torch.distributed.get_world_size())
        return slice(rows.start, rows.stop)

    def rows(self, rows: range) -> Tensor:
        return self._values

    def whole(self) -> Tensor:
        result = self._values.new_zeros(self._length, *self._values.shape[1:])
        # One broadcast per process, as their numbers of rows may differ.
        for rank in range(torch.distributed.get_world_size()):
            rows = self._rows_of(rank)
            values = self._values if rank == torch.distributed.get_rank() else torch.empty_like(result[rows])
            torch.distributed.broadcast(values, rank)
            result[rows] = values
        return result


class Codes:
    """4-bit codes of values in a file, bit-identical to those of bitsandbytes.

    Blocks are independent. The scales are quantised together, so each process computes the scales of its rows and
    receives the others.

    Args:
        matrix: [out, in], or stacked matrices [E, ...], which bitsandbytes treats as one flat array.
        quant_type: `nf4` or `fp4`.
        double: Quantise the scales too.
        storage: Dtype in which the codes are stored.
        device: Device on which they are computed.
    """

    def __init__(self, matrix: LazyArray, quant_type: str, double: bool, storage: torch.dtype, device: torch.device):
        from bitsandbytes.functional import QuantState

        self._matrix = matrix if matrix.ndim == 2 else matrix.concatenate_rows()
        self.double, self.storage, self.device = double, storage, device
        num_bytes = -(-matrix.size // 2)  # two codes per byte
        if num_bytes % storage.itemsize:
            raise ValueError(f"{num_bytes} bytes of 4-bit codes cannot be kept as {storage}")
        self.shape = (num_bytes // storage.itemsize, 1)
        # bitsandbytes' description of the codes; `_complete` adds the scales
        self.state = QuantState(None, torch.Size(matrix.shape), blocksize=BLOCK, quant_type=quant_type,
                                dtype=matrix.dtype)

    def rows(self, rows: range) -> Tensor:
        codes, scales = self._quantize(rows)
        # Scales are at least 0, and 0 outside a process's rows, so their maximum is the union.
        torch.distributed.all_reduce(scales, torch.distributed.ReduceOp.MAX)
        self._complete(scales)
        return codes

    def whole(self) -> Tensor:
        codes, scales = self._quantize(range(self.shape[0]))
        self._complete(scales)
        return codes

    def _quantize(self, rows: range) -> tuple[Tensor, Tensor]:
        """Return the codes of the given rows, and the absmax of all blocks, zero for blocks outside these rows."""
        from bitsandbytes.functional import quantize_4bit

        width, size = BLOCK // 2, self.storage.itemsize  # in bytes
        scales = torch.zeros(-(-self._matrix.size // BLOCK), device=self.device)
        # A process without rows still takes part in the reduction of `rows`, with zeros.
        if not rows:
            return torch.empty(0, 1, dtype=self.storage, device=self.device), scales
        # Blocks that overlap these rows, quantised in full: a block's scale depends on all of its 64 values.
        first, last = rows.start * size // width, -(-rows.stop * size // width)
        packed, state = quantize_4bit(self._flat(first * BLOCK, min(last * BLOCK, self._matrix.size)).to(self.device),
                                      quant_type=self.state.quant_type)
        scales[first:last] = state.absmax
        # Keep only the bytes of these rows; the first block may start before them.
        row_bytes = packed.view(-1)[rows.start * size - first * width:rows.stop * size - first * width]
        return row_bytes.clone().view(self.storage).unsqueeze(1), scales

    def _flat(self, first: int, last: int) -> Tensor:
        # Values `first` to `last` of the flattened matrix, read as the rows of the matrix that contain them.
        length = self._matrix.shape[1]
        first_row = first // length
        values = self._matrix.read_rows(slice(first_row, -(-last // length))).reshape(-1)
        return values[first - first_row * length:last - first_row * length]

    def _complete(self, scales: Tensor) -> None:
        from bitsandbytes.functional import QuantState, get_4bit_type, quantize_blockwise

        state, offset, nested = self.state, None, None
        # As in bitsandbytes: scales minus their mean, quantised in blocks of 256. Needs all scales.
        if self.double:
            offset = scales.mean()
            scales, nested = quantize_blockwise(scales - offset, blocksize=NESTED_BLOCK)
        # In place, as layers and parameters refer to this state.
        vars(state).update(vars(QuantState(
            scales, state.shape, get_4bit_type(state.quant_type, self.device), BLOCK, state.quant_type, state.dtype,
            offset, nested)))


def defer_weight(value: Tensor | LazyArray, array: LazyArray | None, device: torch.device) -> nn.Parameter:
    """Return a placeholder for a weight; this process keeps at most its own rows.

    Args:
        array: The values. Default: `value`.
    """
    if isinstance(value, LazyArray):
        param = nn.Parameter(_empty(value.shape, value.dtype, device), requires_grad=value.dtype.is_floating_point)
        param.source = Stored(value)
        return param
    param = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=value.is_floating_point())
    if not hasattr(param, "source"):
        defer(param, Kept(param.data) if array is None else Stored(array))
    return param


def defer(param: nn.Parameter, source: Source) -> None:
    """Turn a parameter into a placeholder."""
    param.source = source
    param.data = _empty(param.shape, param.dtype, param.device)


def defer_codes(codes: Codes, module: nn.Module | None) -> nn.Parameter:
    """Return a placeholder for a 4-bit weight of a bitsandbytes layer, or of experts if `module` is None."""
    from bitsandbytes.nn import Params4bit

    state = codes.state
    param = Params4bit(_empty(codes.shape, codes.storage, codes.device), quant_state=state, blocksize=BLOCK,
                       compress_statistics=codes.double, quant_type=state.quant_type, quant_storage=codes.storage,
                       module=module, bnb_quantized=True)
    if module is not None:
        module.quant_state = state
    param.source = codes
    return param


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor without memory: one NaN (0 for integers), expanded, so that misuse is visible."""
    return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device).expand(shape)


def cast(param: nn.Parameter, dtype: torch.dtype) -> None:
    """Change the dtype of a weight, deferred or not."""
    param.data = _empty(param.shape, dtype, param.device) if hasattr(param, "source") else param.data.to(dtype)


def read_values(param: nn.Parameter) -> Tensor:
    """Return all values of a weight; a deferred one stays deferred. A collective call."""
    return param.source.whole() if hasattr(param, "source") else param


def fill(module: nn.Module | None) -> bool:
    """Read all deferred weights of a module on every process; return True if there are any. A collective call."""
    deferred = [param for param in module.parameters() if hasattr(param, "source")] if module is not None else []
    for param in deferred:
        param.data = param.source.whole().to(param.device, param.dtype)
        del param.source  # now an ordinary parameter
    return bool(deferred)


def pop_sources(model: nn.Module) -> dict[str, Source]:
    """Return the sources of the deferred weights by name, and move the weights to the meta device for sharding."""
    sources = {name: param.source for name, param in model.named_parameters() if hasattr(param, "source")}
    for param, owners in _owners(model).items():
        if hasattr(param, "source"):
            # All modules with a tied parameter get the same new one, so that it stays tied.
            _assign(owners, torch.empty(param.shape, dtype=param.dtype, device="meta"), param.requires_grad)
    return sources


@torch.no_grad()
def read_shards(model: nn.Module, sources: dict[str, Source]) -> None:
    """Read this process's shards of the weights from `pop_sources`; the network is already sharded.

    Empties `sources`, so that each source is freed once it has been read.
    """
    params, owners = dict(model.named_parameters()), _owners(model)
    for name in list(sources):
        param, source = params[name], sources.pop(name)
        # In the same order on all processes, as some sources are collective.
        values = source.rows(local_rows(param)[1]).to(param.dtype)
        _assign(owners[param], like_shard(values, param), param.requires_grad)


def _owners(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Map each parameter to its modules and its names in them; a tied parameter has several."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(param, []).append((module, name))
    return owners


def _assign(owners: list[tuple[nn.Module, str]], value: Tensor, requires_grad: bool) -> None:
    param = nn.Parameter(value, requires_grad=requires_grad)
    for module, name in owners:
        setattr(module, name, param)
