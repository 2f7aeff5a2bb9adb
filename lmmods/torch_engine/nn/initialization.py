"""Weight initialisation by each architecture's own scheme, with random numbers from `core.initialization`."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lmmods.core.adapters import saved_name
from lmmods.core.initialization import (
    Distribution,
    LogUniform,
    Normal,
    Uniform,
    draw,
    fill,
    init_part,
    row_norms,
    stream_key,
)
from lmmods.torch_engine.compat.peft import magnitudes, reset_adapter
from lmmods.torch_engine.compat.torch import DispatchMode, tensors_in
from lmmods.torch_engine.compat.transformers import (
    before_each_module,
    replace_truncated_normals,
    skip_initial_weights,
    wrap_missing_weights,
)
from lmmods.torch_engine.nn.stored import defer

aten = torch.ops.aten
DISTRIBUTIONS = {
    aten.normal_.default: lambda mean=0.0, std=1.0: Normal(std, mean),
    aten.uniform_.default: lambda low=0.0, high=1.0: Uniform(low, high),
}
CONSTANTS = (aten.zero_.default, aten.fill_.Scalar)
SHAPES_ALONE = (aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default)


@dataclass
class _Memory:
    """A storage with deferred values.

    Args:
        tensor: Keeps the storage alive.
        stream: Name of its random stream, if it does not belong to a parameter.
        writes: Deferred writes to it and to parts of it, in order.
    """

    tensor: Tensor
    stream: str
    writes: list[tuple[Tensor, Callable, tuple]] = field(default_factory=list)

    def is_simple(self) -> bool:
        """True if one random write in row-major order fills it, followed only by constants in contiguous parts."""
        # The first write is to the whole, as `_write` drops earlier ones. `values` is its distribution.
        (tensor, _, values), *parts = self.writes
        return (_is_whole(tensor) and tensor.is_contiguous() and isinstance(values[0], Distribution)
                and all(part.is_contiguous() and not isinstance((*value, 0)[0], Distribution)
                        for part, _, value in parts))


@dataclass
class InitialValues:
    """Initial values of a deferred parameter, generated when they are read; a `Source`.

    Args:
        name: Name of the parameter in the model's folder.
        constants: Start, end and value of each constant part, in row-major order.
    """

    seed: int
    name: str
    distribution: Distribution
    shape: tuple[int, ...]
    constants: list[tuple[int, int, float]]

    def rows(self, rows: range) -> Tensor:
        """Return the values of some rows, float32 [len(rows), ...]."""
        part = (slice(rows.start, rows.stop), *[slice(None)] * (len(self.shape) - 1))
        values = init_part(self.seed, self.name, self.distribution, self.shape, part)
        first = rows.start * math.prod(self.shape[1:])  # index of the first element in the flattened whole
        for start, end, constant in self.constants:
            # Clip to these rows; an end at or below the start selects nothing.
            values.reshape(-1)[max(start - first, 0):max(end - first, 0)] = constant
        return torch.from_numpy(values)

    def whole(self) -> Tensor:
        return self.rows(range(self.shape[0]))


class InitialWeights(DispatchMode):
    """Mode in which `normal_` and `uniform_` use a separate random stream for each parameter.

    So does transformers' `trunc_normal_`. Random writes are deferred until their values are read or `start` ends, so
    overwritten writes, or writes to parameters that are then tied, cost nothing. A part of a parameter gets the same
    values as in a write to the whole. The stream of a tensor that is not a parameter is named by its module and an
    index. Other random functions use torch's generator, which is seeded for each module.

    Args:
        seed: Seed of the run.
    """

    def __init__(self, seed: int):
        super().__init__()
        self._seed = seed
        self._names: dict[int, str] = {}
        self._deferred: dict[int, _Memory] = {}
        self._module_name, self._num_unnamed = "", 0

    @torch.no_grad()
    def start(self, model: nn.Module, initialize: Callable[[], None], file_name: Callable[[str], str] = str,
              by_parts: bool = False) -> None:
        """Run the initialisation of a model that has been built.

        Args:
            file_name: Maps a parameter's name in the model to its name in the model's folder.
            by_parts: Defer parameters whose rows can be initialised separately; see `stored`.
        """
        def names() -> dict[int, str]:
            tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
            # Reversed, so that a tied tensor gets the first of its names.
            return {_memory(tensor): file_name(name) for name, tensor in reversed(tensors) if _is_real(tensor)}

        # Initialisation may tie tensors, so collect names again afterwards.
        names_before, modules = names(), {module: name for name, module in model.named_modules()}
        # torch.manual_seed stores a traceback for each device type, even without devices: too slow for every module.
        set_seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed

        def enter(module: nn.Module) -> None:
            self._module_name, self._num_unnamed = modules[module], 0
            set_seed(stream_key(self._seed, self._module_name) >> 64)  # from 128 bits to torch's 64

        self._names = names_before
        with before_each_module(enter), replace_truncated_normals(self._draw_truncated):
            initialize()
        self._names = names()
        # Parameters filled by one random write become placeholders; complete the rest below.
        if by_parts:
            for name, param in model.named_parameters():
                memory = self._deferred.get(_memory(param)) if _is_real(param) else None
                if memory is not None and memory.is_simple():
                    _, _, (distribution,) = memory.writes[0]
                    constants = [(part.storage_offset(), part.storage_offset() + part.numel(), value[0] if value else 0)
                                 for part, _, value in memory.writes[1:]]
                    del self._deferred[_memory(param)]
                    defer(param, InitialValues(self._seed, file_name(name), distribution, tuple(param.shape),
                                               constants))
        for storage in list(self._deferred):
            if storage in names_before and storage not in self._names:  # tied to something else
                del self._deferred[storage]
            else:
                self._complete(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        # Record, but do not run, random writes, and constants then written to parts (a padding row of zeros).
        if func in DISTRIBUTIONS and _is_real(args[0]) and args[0].is_floating_point():
            self._write(args[0], self._draw, (DISTRIBUTIONS[func](*args[1:]),))
            return args[0]
        if func in CONSTANTS and _is_real(args[0]) and _memory(args[0]) in self._deferred and not _is_whole(args[0]):
            self._write(args[0], lambda _, tensor, *value: func(tensor, *value), args[1:])
            return args[0]
        # Also record a random write's logarithm (A_log of linear attention): its rounding differs between libraries.
        if func is aten.log_.default and _memory(args[0]) in self._deferred and _is_whole(args[0]):
            tensor, write, values = self._deferred[_memory(args[0])].writes[-1]
            if isinstance(values[0], Uniform) and _is_whole(tensor):
                self._write(args[0], write, (LogUniform(values[0].low, values[0].high),))
                return args[0]
        # Other operations need the values, unless they overwrite all of them or only need views and shapes.
        if self._deferred and not func.is_view and func not in SHAPES_ALONE:
            for tensor in tensors_in((args, kwargs)):
                if _is_real(tensor) and _memory(tensor) in self._deferred:
                    overwritten = tensor is args[0] and _is_whole(tensor) and func in (*CONSTANTS, aten.copy_.default)
                    self._deferred.pop(_memory(tensor)) if overwritten else self._complete(_memory(tensor))
        return func(*args, **kwargs or {})

    def _draw_truncated(self, tensor: Tensor, mean: float, std: float, cut: float) -> None:
        if _is_real(tensor):
            self._write(tensor, self._draw, (Normal(std, mean, cut),))

    def _write(self, tensor: Tensor, write: Callable, values: tuple) -> None:
        memory = _memory(tensor)
        is_deferred = memory in self._deferred
        if not is_deferred:
            self._num_unnamed += memory not in self._names
            self._deferred[memory] = _Memory(tensor, f"{self._module_name}#{self._num_unnamed}")
        if _is_whole(tensor):  # a write to the whole replaces earlier writes
            self._deferred[memory].writes.clear()
        self._deferred[memory].writes.append((tensor, write, values))
        if not (is_deferred or _is_whole(tensor)):  # the rest of the storage already has values
            self._complete(memory)

    def _complete(self, memory: int) -> None:
        deferred = self._deferred.pop(memory)
        for tensor, write, values in deferred.writes:
            write(self._names.get(memory, deferred.stream), tensor, *values)

    def _draw(self, name: str, tensor: Tensor, distribution: Distribution) -> None:
        param = tensor.detach()
        # Usually in place, without a temporary.
        if param.device.type == "cpu" and param.dtype == torch.float32 and param.is_contiguous() and _is_whole(param):
            fill(self._seed, name, distribution, param.numpy())
        else:
            # Generate values for the whole storage, as a view gets the values that it has in the whole.
            size = param.untyped_storage().nbytes() // param.element_size()
            values = torch.from_numpy(draw(self._seed, name, distribution, (size,)))
            param.copy_(values.as_strided(param.shape, param.stride(), param.storage_offset()))


def _is_real(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.numel() > 0


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def from_config(make: Callable[[], nn.Module], seed: int, by_parts: bool = False) -> nn.Module:
    """Return a model of transformers with random initial weights.

    Args:
        make: Builds it from a configuration.
        by_parts: See `InitialWeights.start`.
    """
    with InitialWeights(seed) as weights:
        with skip_initial_weights():
            model = make()
        weights.start(model, model.init_weights, by_parts=by_parts)
    return model


@contextmanager
def init_missing_weights(seed: int) -> Iterator[None]:
    """While entered, from_pretrained initialises weights that the files lack as in `from_config`."""
    def start(model: nn.Module, initialize: Callable[[], None]) -> None:
        with InitialWeights(seed) as weights:
            weights.start(model, initialize)

    with wrap_missing_weights(start):
        yield


@torch.no_grad()
def init_adapter(model: nn.Module, seed: int) -> None:
    """Initialise a new LoRA adapter with PEFT's distributions, and DoRA's magnitudes from the base."""
    with InitialWeights(seed) as weights:
        weights.start(model, lambda: reset_adapter(model), saved_name)
    for magnitude, weight, is_conv1d in magnitudes(model):
        norms = row_norms(weight.float().cpu().numpy(), is_conv1d)
        magnitude.copy_(torch.from_numpy(norms))
