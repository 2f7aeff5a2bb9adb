"""Compiled programs that the JAX runs of one test worker share.

JAX keeps a program with the function it was traced from, and every run makes its functions anew: a run that traces and
loads what another one has done spends three quarters of its time on it. Here runs with the same task, network, seed,
clipping and devices share their functions, so that JAX finds the programs. They are functions of these alone. Where a
test has patched anything that may be traced, nothing is shared.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

MADE: dict[str, Any] = {}
TRACED = ("jax_engine.distributed", "jax_engine.models", "jax_engine.optim", "jax_engine.tasks")
PARTS: dict[tuple[object, str], object] = {}  # of these, as they are when no test has patched them


def share() -> None:
    """From now on runs share programs."""
    import jax_engine.models.generate as generate
    import jax_engine.trainer as trainer

    if not PARTS:
        trainer.Steps = _shared(trainer.Steps, lambda parallel, loss, optimizer, *settings: (
            type(parallel), parallel.num_devices, parallel.data_parallel_size, repr(getattr(parallel, "mesh", None)),
            loss.__self__, optimizer is None, *settings[:2]))
        generate._compiled = _shared(generate._compiled, lambda *args: args)
    for owner, name, part in _parts():
        PARTS.setdefault((owner, name), part)


def forget() -> None:
    """Let go of all programs."""
    MADE.clear()


def _shared(make: Callable, key: Callable) -> Callable:
    """`make`, whose results for arguments of the same key are one object."""
    def shared(*args: Any) -> Any:
        import jax
        from datasets.fingerprint import Hasher

        if any(PARTS.get((owner, name), part) is not part for owner, name, part in _parts()):
            return make(*args)
        found = Hasher.hash((make.__name__, str(sorted(jax.config.values.items())), key(*args)))
        return MADE[found] if found in MADE else MADE.setdefault(found, make(*args))

    shared.unshared = make
    return shared


def _parts() -> Iterator[tuple[object, str, object]]:
    """What programs are made of: each module and class that may be traced, a name in there, and what bears the name."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(TRACED):
            continue
        classes = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == name]
        for owner in (module, *classes):
            for attribute, part in list(vars(owner).items()):
                yield owner, attribute, part
