"""Measure the speed of matrix products alone, at the shapes of a step.

Prints one JSON object: FLOP per CPU-second of each library and precision, over all shapes.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from rounds import read_settings

SECONDS = 0.06  # of CPU, for each shape in each round
ROUNDS = 3


def main() -> None:
    settings = read_settings()
    shapes = [(tuple(map(int, shape.split())), count) for shape, count in settings["products"].items()]
    rates = {}
    for name, make in {"float32, MKL": mkl, "float32, oneDNN": onednn, "bfloat16, oneDNN": bfloat16, "float32, XLA": xla
                       }.items():
        seconds = sum(count * measure_fastest(*make(*shape)) for shape, count in shapes)
        rates[name] = sum(2 * rows * inner * columns * count for (rows, inner, columns), count in shapes) / seconds
    print(json.dumps(rates))


def measure_fastest(run: Callable[[], Any], wait: Callable[[Any], Any] = lambda result: result) -> float:
    """Return the CPU-seconds of one product in the fastest round."""
    wait(run())
    laps = []
    for _ in range(ROUNDS):
        start, count = time.process_time(), 0
        while (elapsed := time.process_time() - start) < SECONDS:
            result = run()
            count += 1
            wait(result)
        laps.append(elapsed / count)
    return min(laps)


def matrices(rows: int, inner: int, columns: int, dtype: str) -> tuple[Any, Any]:
    """Return random operands [rows, inner] and, as weights are stored, [columns, inner] transposed."""
    import torch

    return (torch.randn(rows, inner).to(getattr(torch, dtype)),
            torch.randn(columns, inner).to(getattr(torch, dtype)).t())


def mkl(*shape: int) -> tuple[Callable[[], Any], ...]:
    """Return torch's float32 product, by MKL."""
    left, right = matrices(*shape, "float32")
    return (lambda: left @ right,)


def onednn(*shape: int) -> tuple[Callable[[], Any], ...]:
    """Return the float32 product that torch computes with oneDNN."""
    from lmmods.torch_engine.nn.cpu_kernels import fast_products

    left, right = matrices(*shape, "float32")

    def run() -> Any:
        with fast_products(left.device):
            return left @ right

    return (run,)


def bfloat16(*shape: int) -> tuple[Callable[[], Any], ...]:
    """Return torch's bfloat16 product."""
    left, right = matrices(*shape, "bfloat16")
    return (lambda: left @ right,)


def xla(*shape: int) -> tuple[Callable[[], Any], ...]:
    """Return XLA's dot, compiled for the shape."""
    import jax
    import jax.numpy as jnp

    rows, inner, columns = shape
    left, right = jnp.ones((rows, inner)), jnp.ones((columns, inner))
    product = jax.jit(lambda left, right: left @ right.T)
    return (lambda: product(left, right), jax.block_until_ready)


if __name__ == "__main__":
    main()
