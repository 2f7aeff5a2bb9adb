"""Parameters of modules: while a network is described they have a shape and a way to start, and no values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx

from lmmods.core.initialization import Normal, Uniform, draw_part
from lmmods.core.lazy_array import LazyArray, Part


@dataclass(frozen=True)
class Rows:
    """A table whose rows start at random, but for `zeros`, that of the padding token, if there is one."""

    values: Normal
    zeros: int | None = None


# A number fills the parameter; a function makes it of its shape.
Start = Normal | Uniform | Rows | float | Callable[..., np.ndarray]


def parameter(shape: tuple[int, ...], start: Start) -> nnx.Param:
    """A parameter of this shape. Its values are zeros, from which `nnx.eval_shape` keeps the shape alone."""
    return nnx.Param(jnp.zeros(shape), start=start)


def starts(module: nnx.Module) -> dict[tuple[str, ...], Start]:
    """How the parameters of a module start, by path."""
    return {path: node.get_metadata("start") for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Param)}


class FirstValues(LazyArray):
    """First values of a leaf, float32 or narrowed, that nobody has drawn yet: a part is drawn without other rows.

    Args:
        shape: Of one layer.
        names: In the Hugging Face folder; several for a leaf of stacked layers [layers, *shape].
        stacked: Whether the leaf has the layer as its leading axis.
    """

    def __init__(self, start: Start, shape: tuple[int, ...], seed: int, names: Sequence[str], stacked: bool,
                 dtype: np.dtype):
        self._start, self._layer_shape, self._seed = start, shape, seed
        self._names, self._stacked = names, stacked
        super().__init__((len(names), *shape) if stacked else shape, dtype, self._drawn)

    def _drawn(self, part: Part) -> np.ndarray:
        layers, part = (part[0], part[1:]) if self._stacked else (slice(None), part)
        drawn = [self._layer(name, part).astype(self.dtype) for name in self._names[layers]]
        return np.stack(drawn) if self._stacked else drawn[0]

    def _layer(self, name: str, part: Part) -> np.ndarray:
        start, shape = self._start, self._layer_shape
        if isinstance(start, float):
            return np.full(shape, start, np.float32)[part]
        if callable(start):
            return np.asarray(start(*shape), np.float32)[part]
        if not isinstance(start, Rows):
            return draw_part(self._seed, name, start, shape, part)
        rows = draw_part(self._seed, name, start.values, shape, part)
        if start.zeros is not None:
            rows[np.arange(shape[0])[part[0]] == start.zeros] = 0.0
        return rows
