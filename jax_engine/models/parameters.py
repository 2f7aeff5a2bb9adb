"""Parameters of modules: while a network is described they have a shape and a way to start, and no values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx

from lmmods.core.initialization import Normal, Uniform, fill


@dataclass(frozen=True)
class Rows:
    """A table whose rows start at random, but for `zeros`, that of the padding token, if there is one."""

    std: float
    zeros: int | None = None


# A number fills the parameter; a function makes it of its shape.
Start = Normal | Uniform | Rows | float | Callable[..., np.ndarray]


def parameter(shape: tuple[int, ...], start: Start) -> nnx.Param:
    """A parameter of this shape. Its values are zeros, from which `nnx.eval_shape` keeps the shape alone."""
    return nnx.Param(jnp.zeros(shape), start=start)


def starts(module: nnx.Module) -> dict[tuple[str, ...], Start]:
    """How the parameters of a module start, by path."""
    return {path: node.get_metadata("start") for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Param)}


def first_values(start: Start, shape: tuple[int, ...], seed: int, names: Sequence[str]) -> np.ndarray:
    """First values of a leaf, float32.

    Args:
        shape: Of one layer.
        names: In the Hugging Face folder; several for a leaf of stacked layers [layers, *shape].
    """
    leaf = np.zeros((len(names), *shape), np.float32)
    for name, layer in zip(names, leaf, strict=True):
        if isinstance(start, float):
            layer[...] = start
        elif callable(start):
            layer[...] = start(*shape)
        else:
            fill(seed, name, Normal(start.std) if isinstance(start, Rows) else start, layer)
            if isinstance(start, Rows) and start.zeros is not None:
                layer[start.zeros] = 0.0
    return leaf
