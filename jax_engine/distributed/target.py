"""The devices that programs are made for: those at hand, or others that a plan names."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import psutil

from lmmods.core.hardware import Target, kind_of

_planned: ContextVar[Target | None] = ContextVar("target", default=None)


def target() -> Target:
    """What networks, losses and steps are made for now: it chooses their forms."""
    return _planned.get() or at_hand()


def at_hand() -> Target:
    """The devices that JAX has."""
    device = jax.local_devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit") or psutil.virtual_memory().total
    return Target(device.platform, device.device_kind, jax.device_count(), memory, kind_of(device.device_kind))


def lowering_platforms() -> tuple[str, ...] | None:
    """What programs are lowered for where devices of another platform may stand for the target's; None: for their own.
    """
    planned = _planned.get()
    if planned is None:
        return None
    return ("cpu",) if planned.is_simulated else ({"gpu": "cuda"}.get(planned.platform, planned.platform),)


@contextmanager
def made_for(planned: Target) -> Iterator[None]:
    """Make networks and lower steps for devices that need not be here."""
    token = _planned.set(planned)
    try:
        yield
    finally:
        _planned.reset(token)
