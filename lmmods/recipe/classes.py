"""Classes that a recipe may name: tasks and data modules, and classes of libraries such as loggers and callbacks.

Names are checked against what is declared here and against the files of the packages, without importing them.
"""

import difflib
import functools
import importlib
import inspect
import itertools
import pkgutil
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

from lmmods.core.errors import UserError
from lmmods.recipe.engines import ENGINES, LOGGERS
from lmmods.recipe.tasks.base import CausalFields, DataFields, TaskFields
from lmmods.recipe.trust import PACKAGES, check_class, import_class, is_trusted

# Lightning's callbacks that a recipe may name: those that keep results reproducible and resuming exact.
ALLOWED = {
    "EarlyStopping": "Stops when a metric no longer improves.",
    "LearningRateMonitor": "Logs the learning rate of each parameter group, in addition to train/lr.",
    "ModelSummary": "Prints the layers and their sizes.",
    "RichModelSummary": "Like ModelSummary, as a table; needs the package rich.",
}

# Callback that is not supported -> reason, or what to use instead.
UNSUPPORTED = {
    "BackboneFinetuning": "Set model.lora with targets and modules_to_save.",
    "BaseFinetuning": "Set model.lora with targets and modules_to_save.",
    "BasePredictionWriter": "predict writes predictions.jsonl.",
    "BatchSizeFinder": "It would override the recipe's batch size. Set data.batch_size; inspect estimates the memory.",
    "Callback": "It does nothing. Use your own subclass of it.",
    "Checkpoint": "Use the checkpoint block.",
    "DeviceStatsMonitor": "The progress line shows memory, and W&B logs machine statistics.",
    "EMAWeightAveraging": "A run cannot resume from its checkpoints. Set model.optimizer.ema_decay.",
    "GradientAccumulationScheduler": "The learning-rate schedule would not match the number of steps, and resuming "
                                     "within an epoch would not be exact. Set trainer.accumulate_grad_batches.",
    "LambdaCallback": "It needs functions, which a recipe cannot contain. Use your own callback class.",
    "LearningRateFinder": "Use the command find.",
    "ModelCheckpoint": "Use the checkpoint block.",
    "ModelPruning": "Pruned layers cannot be exported or resumed from.",
    "OnExceptionCheckpoint": "Use the checkpoint block, and resume from the last checkpoint.",
    "ProgressBar": "Set trainer.enable_progress_bar.",
    "RichProgressBar": "Set trainer.enable_progress_bar.",
    "SpikeDetection": "A run cannot resume from its state. Set trainer.gradient_clip_val; a loss that is not a number "
                      "stops the run anyway.",
    "StochasticWeightAveraging": "A run cannot resume from its state. Set model.optimizer.ema_decay, or "
                                 "model.optimizer.schedule to wsd or cosine.",
    "TQDMProgressBar": "Set trainer.enable_progress_bar.",
    "ThroughputMonitor": "train/tokens_per_second and train/mfu are always logged.",
    "Timer": "Set trainer.max_time, for example {hours: 8}.",
    "WeightAveraging": "A run cannot resume from its checkpoints. Set model.optimizer.ema_decay.",
}


def check_callback(class_path: str) -> None:
    """Raise UserError if a recipe may not name this callback."""
    if reason := unsupported_reason(class_path):
        raise UserError(f"trainer.callbacks: {class_path.rsplit('.', 1)[-1]} is not supported. {reason}")


def unsupported_reason(class_path: str) -> str | None:
    """Return why a recipe may not name a callback; None if it may. Third-party callbacks are not checked."""
    name = class_path.rsplit(".", 1)[-1]
    if name in ALLOWED or class_path.split(".")[0] not in ("lightning", "lmmods"):
        return None
    if class_path.startswith("lmmods."):
        return "It is part of every run. Remove it."
    return UNSUPPORTED.get(name, "A resumed run could differ. Remove it.")


# Keys whose values are library classes, with the tested classes that may be given by short name; any other class needs
# its import path. Their settings are validated by the engine.
CLASSES = {
    "torch": {
        "trainer.logger": tuple(LOGGERS),
        "trainer.callbacks": tuple(ALLOWED),
        "trainer.strategy": ("lmmods.strategies.FSDP2", "lmmods.strategies.DeepSpeed", "DDPStrategy",
                             "SingleDeviceStrategy"),
        "trainer.plugins": ("KubeflowEnvironment", "LSFEnvironment", "LightningEnvironment", "MPIEnvironment",
                            "SLURMEnvironment", "TorchElasticEnvironment", "XLAEnvironment"),
        "trainer.profiler": ("AdvancedProfiler", "PyTorchProfiler", "SimpleProfiler"),
    },
    "jax": {"trainer.logger": tuple(LOGGERS), "trainer.callbacks": ("EarlyStopping",),
            "trainer.strategy": ("MeshSharding",)},
}
# Packages of further classes that a recipe may name without their module: user-defined tasks, our callbacks, loggers.
FOLDERS = {
    "torch": {"model": "lmmods.torch_engine.tasks", "data": "lmmods.data",
              "trainer.callbacks": "lmmods.torch_engine.callbacks", "trainer.logger": "lmmods.runs"},
    "jax": {"model": "jax_engine.tasks", "data": "lmmods.data", "trainer.callbacks": "jax_engine",
            "trainer.logger": "lmmods.runs"},
}


# ---------------------------------------------------------------------------------------------------------------------
# Tasks and data modules: a file in `lmmods/recipe/tasks` declares the fields of a task and of its data.

BASES = {"model": TaskFields, "data": DataFields}


@overload
def declared(block: Literal["model"]) -> dict[str, type[TaskFields]]: ...


@overload
def declared(block: Literal["data"]) -> dict[str, type[DataFields]]: ...


@overload
def declared(block: str) -> dict[str, type[TaskFields | DataFields]]: ...


@functools.cache
def declared(block: str) -> dict[str, Any]:
    """Return the fields of every declared task (`model`) or data module (`data`) by class name: SFT, SFTData."""
    fields = {}
    # Found by their files, so that a new task needs no entry in a list.
    package = importlib.import_module("lmmods.recipe.tasks")
    for module in sorted(entry.name for entry in pkgutil.iter_modules(package.__path__) if entry.name != "base"):
        name = f"{package.__name__}.{module}"
        # Only classes defined in the module itself, not those it imports.
        for cls in vars(importlib.import_module(name)).values():
            if inspect.isclass(cls) and issubclass(cls, BASES[block]) and cls.__module__ == name:
                fields[class_name(cls)] = cls
    return dict(sorted(fields.items()))


def list_all(block: str, read: Callable[[Any], tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names that the declared classes of a block and their bases list, such as their `may_change`."""
    return tuple(dict.fromkeys(name for fields in declared(block).values() for cls in reversed(fields.__mro__)
                               if issubclass(cls, BASES[block]) for name in read(cls)))


class NamedModel(NamedTuple):
    """A model, a configuration or an adapter that a recipe names.

    Args:
        key: Key in `model`, such as teacher.adapter.
        block: Mapping that contains the last part of the key.
        last: Last part of the key.
        name: Folder or hub id.
        revision: Revision of a hub model; None for adapters and for models that do not train.
    """

    key: str
    block: dict[str, Any]
    last: str
    name: str
    revision: str | None


def named_models(model: dict[str, Any]) -> list[NamedModel]:
    """Return the models that the `model_keys` of tasks name in a recipe's `model`, merged to one level."""
    models = []
    for key in list_all("model", lambda task: task.model_keys):
        *outer, last = key.split(".")
        block = model
        for part in outer:
            block = block.get(part) or {}
        if isinstance(name := block.get(last), str):
            models.append(NamedModel(key, block, last, name,
                                     model.get("revision") if block is model and last != "adapter" else None))
    return models


def tasks_that_write() -> list[str]:
    """Return the names of the tasks whose models generate text."""
    return [name for name, cls in declared("model").items() if issubclass(cls, CausalFields)]


def class_name(cls: type) -> str:
    """Return the name of the class with these fields in recipes: SFT for SFTFields, or for SFT itself."""
    return cls.__name__.removesuffix("Fields")


def module_of(cls: type, package: str) -> str:
    """Return the module in a package that has the class with these fields: it is named like the fields' module."""
    return f"{package}.{cls.__module__.rpartition('.')[2]}"


def implementation(fields: type, package: str) -> type:
    """Import the class with these fields from a package: an engine's tasks, or `lmmods.data`."""
    return getattr(importlib.import_module(module_of(fields, package)), class_name(fields))


def names_of(key: str, engine: str) -> tuple[str, ...]:
    """Return the names of the classes that a key accepts without their import path."""
    return tuple(declared(key)) if key in BASES else CLASSES[engine].get(key, ())


def known_class(block: str, path: str, engine: str) -> type | None:
    """Return the fields of a task or data module by its class's name or import path; None if it is not declared."""
    package, _, name = path.rpartition(".")
    cls = declared(block).get(name)
    # Another class's import path may also end in a declared name.
    return cls if cls and package in ("", module_of(cls, FOLDERS[engine][block])) else None


def find_class(name: str, bases: tuple[Any, ...], key: str) -> Any:
    """Return the class with an import path, or a loaded one with a short name; None if there is no such short name.

    Args:
        bases: Allowed base classes.

    Raises:
        UserError: There is no such class, or the recipe may not name it.
    """
    if "." in name:
        return import_class(name, bases, key)
    candidates = [base for base in bases if base is not Callable]
    for candidate in candidates:  # grows
        candidates += candidate.__subclasses__()
    cls = next((candidate for candidate in candidates if candidate.__name__ == name
                and (is_trusted() or candidate.__module__.partition(".")[0] in PACKAGES)), None)
    return cls and check_class(cls, bases, key)


def import_path(cls: Any) -> str:
    """Return the shortest import path of a class or function, from the outermost package that has it."""
    module, name = cls.__module__, cls.__qualname__
    packages = itertools.accumulate(module.split("."), lambda outer, inner: f"{outer}.{inner}")
    package = next((package for package in packages if getattr(sys.modules[package], name, None) is cls), module)
    return f"{package}.{name}"


def check_name(key: str, name: str, engine: str) -> None:
    """Raise UserError if no class has this short name."""
    names = names_of(key, engine)
    folders = {engine_name: FOLDERS[engine_name].get(key) for engine_name in ENGINES}
    folder = folders.pop(engine)
    if key == "trainer.callbacks" and engine == "torch" and name in UNSUPPORTED:
        check_callback(f"lightning.{name}")
    if folder is None or name in _classes_in(folder):
        return
    if key == "model":
        for other, elsewhere in folders.items():
            if elsewhere is not None and name in _classes_in(elsewhere):
                raise UserError(f"model is {name}, which only engine {other} supports: {folder} has no file for it. "
                                f"Use --engine {other}, or add that file (docs/extending.md).")
    if name in names:
        return
    near = difflib.get_close_matches(name, names, 1)
    raise UserError(f"{key} is {name}, but must be {', '.join(names)} or the import path of a class."
                    + (f" Did you mean {near[0]}?" if near else ""))


def _classes_in(package: str) -> set[str]:
    """Return the class names defined in a package's files, without importing them."""
    files = [path for folder in importlib.import_module(package).__path__ for path in Path(folder).glob("*.py")]
    return {name for path in files for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)}
