"""Compiled programs that the JAX runs of one test worker share.

JAX keeps a program with the function it was traced from, and every run makes its functions anew: a run that traces and
loads what another one has done spends three quarters of its time on it. Here runs with the same task, network,
optimiser, clipping and devices share their functions, so that JAX finds the programs; what evaluates is shared whatever
trains. They are functions of these alone. Where a test has patched anything that may be traced, nothing is shared.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

MADE: dict[str, Any] = {}
TRACED = ("jax_engine.distributed", "jax_engine.models", "jax_engine.optim", "jax_engine.tasks")
PARTS: dict[tuple[object, str], object] = {}  # of these, as they are when no test has patched them
known: set[str] = set()  # modules that these parts are from

# Of a task, what no program of a step is made of: where weights are from, what moves them and how text is continued.
UNTRACED = {"network", "optimizer", "choice_ids", "pretrained", "revision", "config", "adapter", "generation",
            "save_dtype", "survey", "_sums", "_evaluated"}  # `survey` is a method of the task
RULE = ("name", "weight_decay", "betas", "eps", "momentum")  # of the optimiser; the rate of a step is an argument


def share() -> None:
    """From now on runs share programs."""
    import jax_engine.models.generate as generate
    import jax_engine.trainer as trainer

    if not PARTS:
        trainer.Steps = _sharing_functions(trainer.Steps)
        generate._compiled = _shared(generate._compiled, lambda network, *others: (_of_network(network), *others))
    new = [name for name in list(sys.modules) if name.startswith(TRACED) and name not in known]
    known.update(new)
    PARTS.update(((owner, name), part) for owner, name, part in _parts(new))


def forget() -> None:
    """Let go of all programs."""
    MADE.clear()


def _shared(make: Callable, key: Callable) -> Callable:
    """`make`, whose results for arguments of the same key are one object."""
    def shared(*args: Any) -> Any:
        return _once(lambda: make(*args), make.__name__, key(*args)) if _are_whole() else make(*args)

    shared.unshared = make
    return shared


def _sharing_functions(make: Callable) -> Callable:
    """`Steps`, each of whose compiled functions is one object for all that it is made of."""
    @functools.wraps(make, updated=())
    def steps(parallel: Any, loss: Any, optimizer: Any, clipping: Any, *others: Any) -> Any:
        made, task = make(parallel, loss, optimizer, clipping, *others), loss.__self__
        if not _are_whole():
            return made
        traced = {name: value for name, value in vars(task).items() if name not in UNTRACED}
        devices = (type(parallel), parallel.num_devices, parallel.data_parallel_size,
                   repr(getattr(parallel, "mesh", None)))
        seen = _hash((type(task), traced, _of_network(task.network), devices))
        updated = clipping, optimizer and [getattr(task.optimizer, field) for field in RULE]
        parts = {"_accumulate": (), "_survey": (), "_eval": (), "_rows": getattr(task, "choice_ids", None),
                 "_new_accumulation": (), "_new_state": updated, "_update": updated, "_full": updated}
        for name, also in parts.items():
            function = getattr(made, name)
            setattr(made, name, _once(lambda function=function: function, name, (seen, also)))
        return made

    steps.unshared = make
    return steps


def _of_network(network: Any) -> dict[str, Any]:
    """All of a network but the folder it is from."""
    return {**vars(network), "config": {**network.config.to_dict(), "_name_or_path": None}}


def _hash(parts: Any) -> str:
    from datasets.fingerprint import Hasher

    return Hasher.hash(parts)


def _once(make: Callable[[], Any], name: str, key: Any) -> Any:
    """What `make` gave where it was first asked for by this name and key, under JAX's settings of now."""
    import jax

    found = _hash((name, str(sorted(jax.config.values.items())), key))
    return MADE[found] if found in MADE else MADE.setdefault(found, make())


def _are_whole() -> bool:
    """Whether nothing that may be traced is patched."""
    return all(vars(owner).get(name) is part for (owner, name), part in PARTS.items())


def _parts(modules: Iterable[str]) -> Iterator[tuple[object, str, object]]:
    """What programs are made of: each module and class that may be traced, a name in there, and what bears the name."""
    for name in modules:
        module = sys.modules[name]
        classes = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == name]
        for owner in (module, *classes):
            for attribute, part in list(vars(owner).items()):
                yield owner, attribute, part
