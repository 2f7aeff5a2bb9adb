"""Report on JAX and its devices for `doctor`: `python -m jax_engine.probe` prints it as JSON."""

import json
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from jax_engine.distributed.devices import choose_precision


def probe() -> dict[str, Any]:
    """Return versions, devices, precision, and for each device the error of a matrix product ("" if correct)."""
    return {"version": jax.__version__, "flax": flax.__version__, "platform": jax.devices()[0].platform,
            "devices": [device.device_kind for device in jax.local_devices()], "precision": choose_precision(),
            "products": {str(device): _product_problem(device) for device in jax.local_devices()}}


def _product_problem(device: jax.Device) -> str:
    """Return what is wrong with a matrix product on a device; empty if nothing is."""
    a, b = (np.random.default_rng(seed).standard_normal((64, 64)).astype(np.float32) for seed in range(2))
    try:
        product = jnp.matmul(*(jax.device_put(x, device) for x in (a, b)), precision="highest")
        deviation = np.abs(np.asarray(product) - a @ b).max() / np.abs(a @ b).max()
    except Exception as error:  # any error of the device is its problem
        return f"{type(error).__name__}: {error}"
    return "" if deviation < 1e-4 else f"a matrix product is off by {deviation:.2g} of its scale"


if __name__ == "__main__":
    print(json.dumps(probe()))
