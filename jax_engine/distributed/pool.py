"""XLA's memory pool on a GPU: the fraction of the memory that it takes, and the largest block that still fits.

A pool that is reserved at the start is one region. A growing pool adds a region whenever no free block is large enough,
and never joins two regions.
"""

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lmmods.core.errors import UserError
from lmmods.core.hardware import USABLE, Target

# Environment variables of JAX (docs.jax.dev, "GPU memory allocation"). It rejects both names of the fraction at once.
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
PREALLOCATE, ALLOCATOR = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"
XLA_DEFAULT = 0.75  # fraction that XLA takes if none is set
FIRST_REGION = 2 * 2**20  # bytes
ALIGNMENT = 256  # bytes; arrays take multiples of it


@contextmanager
def larger_pool() -> Iterator[None]:
    """Let XLA take `USABLE` of each GPU if it starts in this context, unless the environment configures its pool.

    The variable is removed afterwards, so that programs started by this process do not inherit it.
    """
    if any(os.environ.get(name) for name in (*FRACTIONS, PREALLOCATE, ALLOCATOR)):
        yield
        return
    os.environ[FRACTIONS[0]] = str(USABLE)
    try:
        yield
    finally:
        del os.environ[FRACTIONS[0]]


@dataclass(frozen=True)
class Pool:
    """Memory pool of a run.

    Args:
        fraction: Fraction of the GPU's memory.
        grows: True if it is extended when needed.
        has_regions: False for allocators that can build a block from any free pages, so that no gap limits it.
    """

    fraction: float
    grows: bool = False
    has_regions: bool = True

    @staticmethod
    def from_environment() -> "Pool":
        """Return the pool that JAX creates from the environment and `larger_pool`.

        Raises:
            UserError: The fraction is not a number.
        """
        preallocate, allocator = os.environ.get(PREALLOCATE), os.environ.get(ALLOCATOR)
        fraction = XLA_DEFAULT if preallocate or allocator else USABLE
        for name in FRACTIONS:
            if text := os.environ.get(name):
                try:
                    fraction = float(text)
                except ValueError as error:
                    raise UserError(f"The environment variable {name} is {text!r}, which is not a number. Set it to a "
                                    "fraction such as 0.9.") from error
        return Pool(fraction, preallocate in ("false", "False", "0"),
                    not allocator or allocator.lower() in ("default", "bfc"))

    def largest_gap(self, limit: float, sizes: Iterable[int]) -> float:
        """Return the bytes of the largest block that fits after the arrays; 0 if they fill the pool.

        Args:
            limit: Maximum bytes of the pool.
            sizes: Bytes of the arrays, in the order in which they are placed.
        """
        sizes = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        if not self.grows:
            return max(limit - sum(sizes), 0)
        # Like XLA's allocator (BFC): use the smallest free block that is large enough, or a new region. Regions double.
        gaps, free, region = [], limit, FIRST_REGION
        for size in sizes:
            large_enough = [gap for gap in gaps if gap >= size]
            if large_enough:
                gap = min(large_enough)
                gaps.remove(gap)
            elif size > free:
                return 0
            else:
                is_larger = size > region
                while size > region:
                    region *= 2
                gap = min(region, free)
                free -= gap
                region = region if is_larger else 2 * region
            gaps.append(gap - size)
        return max(*gaps, free) if gaps else free


def largest_gap(on: Target, limit: float, sizes: Iterable[int]) -> float:
    """Return the bytes of the largest block that fits on a device after the arrays; infinite if no gap limits it.

    Args:
        limit: Maximum bytes of a run on the device.
        sizes: Bytes of the arrays there, in the order in which they are placed.
    """
    pool = Pool.from_environment()
    return pool.largest_gap(limit, sizes) if on.platform == "gpu" and pool.has_regions else math.inf
