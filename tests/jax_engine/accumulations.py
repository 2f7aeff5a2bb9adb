"""Accumulations with gradients that a test chooses."""

from typing import Any

import jax
import numpy as np

from jax_engine.distributed.steps import Steps


def accumulation_of(steps: Steps, state: Any, gradients: Any, sums: dict[str, np.generic]) -> Any:
    """Return an accumulation whose gradients and sums over all devices are these host arrays."""
    def put(leaf: jax.Array, value: np.ndarray) -> jax.Array:
        # With a replica per device, arrays have a leading device axis: the first device gets the whole sum.
        whole = np.zeros(leaf.shape, leaf.dtype)
        whole[(0,) * (leaf.ndim - np.ndim(value))] = value
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: whole[index])

    return jax.tree.map(put, steps.new_accumulation(state), {"gradients": gradients, "sums": sums})
