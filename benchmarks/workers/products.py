"""Products of matrices and nothing else: what this machine reaches at the shapes of a step.

Prints one JSON object: FLOP per CPU-second of each library and precision, the shapes weighted by their FLOP.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from rounds import settings

SECONDS = 0.06  # of CPU, for each shape in each round
ROUNDS = 3


def main() -> None:
    asked = settings()
    shapes = [(tuple(map(int, shape.split())), count) for shape, count in asked["products"].items()]
    found = {}
    for name, make in {"float32, MKL": mkl, "float32, oneDNN": onednn, "bfloat16, oneDNN": bfloat16, "float32, XLA": xla
                       }.items():
        seconds = sum(count * best(*make(*shape)) for shape, count in shapes)
        found[name] = sum(2 * rows * inner * columns * count for (rows, inner, columns), count in shapes) / seconds
    print(json.dumps(found))


def best(run: Callable[[], Any], wait: Callable[[Any], Any] = lambda result: result) -> float:
    """CPU-seconds of one product, in the fastest of a few rounds."""
    wait(run())
    laps = []
    for _ in range(ROUNDS):
        start, count = time.process_time(), 0
        while (taken := time.process_time() - start) < SECONDS:
            result = run()
            count += 1
            wait(result)
        laps.append(taken / count)
    return min(laps)


def matrices(rows: int, inner: int, columns: int, dtype: str) -> tuple[Any, Any]:
    """Random operands [rows, inner] and, as weights are stored, [columns, inner] transposed."""
    import torch

    return (torch.randn(rows, inner).to(getattr(torch, dtype)),
            torch.randn(columns, inner).to(getattr(torch, dtype)).t())


def mkl(*shape: int) -> tuple[Callable[[], Any], ...]:
    """torch's product as it is."""
    left, right = matrices(*shape, "float32")
    return (lambda: left @ right,)


def onednn(*shape: int) -> tuple[Callable[[], Any], ...]:
    """The product that torch leaves to oneDNN, where that computes it in float32."""
    from lmmods.torch_engine.nn.cpu_kernels import fast_products

    left, right = matrices(*shape, "float32")

    def run() -> Any:
        with fast_products(left.device):
            return left @ right

    return (run,)


def bfloat16(*shape: int) -> tuple[Callable[[], Any], ...]:
    """torch's product of bfloat16."""
    left, right = matrices(*shape, "bfloat16")
    return (lambda: left @ right,)


def xla(*shape: int) -> tuple[Callable[[], Any], ...]:
    """XLA's dot, compiled for the shape."""
    import jax
    import jax.numpy as jnp

    rows, inner, columns = shape
    left, right = jnp.ones((rows, inner)), jnp.ones((columns, inner))
    product = jax.jit(lambda left, right: left @ right.T)
    return (lambda: product(left, right), jax.block_until_ready)


if __name__ == "__main__":
    main()
