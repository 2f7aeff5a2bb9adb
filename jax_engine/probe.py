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
            "products": {str(device): _wrong_with(device) for device in jax.local_devices()}}


def _wrong_with(device: jax.Device) -> str:
    a, b = (np.random.default_rng(seed).standard_normal((64, 64)).astype(np.float32) for seed in range(2))
    try:
        found = jnp.matmul(*(jax.device_put(each, device) for each in (a, b)), precision="highest")
        off = np.abs(np.asarray(found) - a @ b).max() / np.abs(a @ b).max()
    except Exception as error:  # whatever the device raises is what is wrong with it
        return f"{type(error).__name__}: {error}"
    return "" if off < 1e-4 else f"a product is {off:.2g} of its scale off"


if __name__ == "__main__":
    print(json.dumps(probe()))
