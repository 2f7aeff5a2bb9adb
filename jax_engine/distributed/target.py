"""Target devices of compiled programs: the present ones, unless others are passed.

Networks, losses and distributions take a `Target`, or None for the present devices.
"""

import jax
import psutil

from lmmods.core.hardware import Target, kind_of


def target(on: Target | None) -> Target:
    """Return the devices to choose an implementation for: `on`, or the present ones."""
    return on or present_target()


def present_target() -> Target:
    """Return the present devices."""
    device = jax.local_devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit") or psutil.virtual_memory().total
    return Target(device.platform, device.device_kind, jax.device_count(), memory, kind_of(device.device_kind))


def lowering_platforms(on: Target | None) -> tuple[str, ...] | None:
    """Return the platforms to lower programs for; None lowers for the present devices."""
    if on is None:
        return None
    return ("cpu",) if on.is_simulated else ({"gpu": "cuda"}.get(on.platform, on.platform),)
