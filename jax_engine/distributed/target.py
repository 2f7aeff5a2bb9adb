"""The devices that programs are compiled for: those present, or others that a plan names."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import psutil

from lmmods.core.hardware import Target, kind_of

_planned: ContextVar[Target | None] = ContextVar("target", default=None)


def target() -> Target:
    """Return the devices for which networks, losses and steps currently choose their implementation."""
    return _planned.get() or at_hand()


def at_hand() -> Target:
    """Return the devices that are present."""
    device = jax.local_devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit") or psutil.virtual_memory().total
    return Target(device.platform, device.device_kind, jax.device_count(), memory, kind_of(device.device_kind))


def lowering_platforms() -> tuple[str, ...] | None:
    """Return the platforms to lower programs for if the target is planned; None lowers for the present devices."""
    planned = _planned.get()
    if planned is None:
        return None
    return ("cpu",) if planned.is_simulated else ({"gpu": "cuda"}.get(planned.platform, planned.platform),)


@contextmanager
def made_for(planned: Target) -> Iterator[None]:
    """Build networks and lower steps for devices that need not be present."""
    token = _planned.set(planned)
    try:
        yield
    finally:
        _planned.reset(token)
