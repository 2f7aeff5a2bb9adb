"""Classes that a recipe may name: tasks and data modules, and classes of libraries such as loggers and callbacks.

Names are checked against what is declared here and against the files of the packages, without importing them.
"""

import difflib
import functools
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

from lmmods.core.errors import UserError
from lmmods.recipe.engines import ENGINES, LOGGERS
from lmmods.recipe.tasks.base import CausalFields, DataFields, TaskFields

# Lightning's callbacks that a recipe may name: those that keep results reproducible and resuming exact.
ALLOWED = {
    "EarlyStopping": "Stops when a metric no longer improves.",
    "LearningRateMonitor": "Logs the learning rate of each parameter group, in addition to train/lr.",
    "ModelSummary": "Prints the layers and their sizes.",
    "RichModelSummary": "The same as a table; needs the package rich.",
}

# Refused callback -> reason, or what to use instead.
REFUSED = {
    "BackboneFinetuning": "What trains is chosen by model.lora, its targets and modules_to_save.",
    "BaseFinetuning": "What trains is chosen by model.lora, its targets and modules_to_save.",
    "BasePredictionWriter": "predict writes predictions.jsonl.",
    "BatchSizeFinder": "It changes the batch size behind the recipe's back. Set data.batch_size; inspect estimates the "
                       "memory.",
    "Callback": "It does nothing. Name a callback of your own.",
    "Checkpoint": "Checkpoints are written by the block checkpoint.",
    "DeviceStatsMonitor": "The progress line shows the memory, and W&B logs its own statistics of the machine.",
    "EMAWeightAveraging": "Its checkpoints cannot be resumed from.",
    "GradientAccumulationScheduler": "The learning rate would follow another number of steps, and a resume inside an "
                                     "epoch would not be exact. Set trainer.accumulate_grad_batches.",
    "LambdaCallback": "It takes functions, which a recipe cannot hold. Write a callback of your own.",
    "LearningRateFinder": "Compare short runs with several --model.optimizer.lr instead.",
    "ModelCheckpoint": "Checkpoints are written by the block checkpoint.",
    "ModelPruning": "Pruned layers cannot be exported or resumed from.",
    "OnExceptionCheckpoint": "The last checkpoint of the block checkpoint is enough to go on from.",
    "ProgressBar": "Progress is shown with trainer.enable_progress_bar.",
    "RichProgressBar": "Progress is shown with trainer.enable_progress_bar.",
    "SpikeDetection": "Its state cannot be resumed from. A loss that is not a number stops the run anyway; "
                      "trainer.gradient_clip_val bounds a step.",
    "StochasticWeightAveraging": "Its state cannot be resumed from. model.optimizer.schedule wsd or cosine ends a run "
                                 "on small steps.",
    "TQDMProgressBar": "Progress is shown with trainer.enable_progress_bar.",
    "ThroughputMonitor": "train/tokens_per_second and train/mfu are logged always.",
    "Timer": "Set trainer.max_time, for example {hours: 8}.",
    "WeightAveraging": "Its checkpoints cannot be resumed from.",
}


def check_callback(class_path: str) -> None:
    """Raise UserError if a recipe may not name this callback."""
    if reason := reason_against(class_path):
        raise UserError(f"trainer.callbacks: {class_path.rsplit('.', 1)[-1]} does not work here. {reason}")


def reason_against(class_path: str) -> str | None:
    """Return why a recipe may not name a callback; None if it may. Third-party callbacks are not judged."""
    name = class_path.rsplit(".", 1)[-1]
    if name in ALLOWED or class_path.split(".")[0] not in ("lightning", "lmmods"):
        return None
    if class_path.startswith("lmmods."):
        return "Every run has it already."
    return REFUSED.get(name, "It is not supported: a resumed run could differ.")


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


@functools.cache
def declared(block: str) -> dict[str, type]:
    """Return the fields of every declared task (`model`) or data module (`data`) by class name: SFT, SFTData."""
    found = {}
    # Found by their files, so that a new task needs no entry in a list.
    package = importlib.import_module("lmmods.recipe.tasks")
    for module in sorted(each.name for each in pkgutil.iter_modules(package.__path__) if each.name != "base"):
        name = f"{package.__name__}.{module}"
        # Only classes defined in the module itself, not those it imports.
        for kind in vars(importlib.import_module(name)).values():
            if inspect.isclass(kind) and issubclass(kind, BASES[block]) and kind.__module__ == name:
                found[class_name(kind)] = kind
    return dict(sorted(found.items()))


def tasks_that_write() -> list[str]:
    """Return the names of the tasks whose networks write text."""
    return [name for name, kind in declared("model").items() if issubclass(kind, CausalFields)]


def class_name(kind: type) -> str:
    """Return the name that a recipe gives to the class with these fields: SFT for SFTFields, or for SFT itself."""
    return kind.__name__.removesuffix("Fields")


def module_of(kind: type, package: str) -> str:
    """Return the module in a package that holds the class with these fields; it has the name of their own module."""
    return f"{package}.{kind.__module__.rpartition('.')[2]}"


def implementation(fields: type, package: str) -> type:
    """Import the class with these fields from a package: an engine's tasks, or `lmmods.data`."""
    return getattr(importlib.import_module(module_of(fields, package)), class_name(fields))


def names_of(key: str, engine: str) -> tuple[str, ...]:
    """Return the names of the classes that a key may have without their import path."""
    return tuple(declared(key)) if key in BASES else CLASSES[engine].get(key, ())


def known_class(block: str, path: str, engine: str) -> type | None:
    """Return the fields of a task or data module by the name or import path of its class; None if it is not declared.
    """
    package, _, name = path.rpartition(".")
    kind = declared(block).get(name)
    # The import path of another class may end in a declared name, too.
    return kind if kind and package in ("", module_of(kind, FOLDERS[engine][block])) else None


def check_name(key: str, name: str, engine: str) -> None:
    """Raise UserError for the short name of a class that does not exist."""
    listed = names_of(key, engine)
    folders = {each: FOLDERS[each].get(key) for each in ENGINES}
    folder = folders.pop(engine)
    if key == "trainer.callbacks" and engine == "torch" and name in REFUSED:
        check_callback(f"lightning.{name}")
    if folder is None or name in _classes_in(folder):
        return
    if key == "model":
        for other, elsewhere in folders.items():
            if name in _classes_in(elsewhere):
                raise UserError(f"model is {name}, a task of engine {other} alone: {folder} has no file for it. "
                                f"Use --engine {other}, or write that file (docs/extending.md).")
    if name in listed:
        return
    near = difflib.get_close_matches(name, listed, 1)
    raise UserError(f"{key} is {name}, but must be {', '.join(listed)} or the import path of a class."
                    + (f" Did you mean {near[0]}?" if near else ""))


def _classes_in(package: str) -> set[str]:
    """Return the class names defined in a package's files, without importing them."""
    files = [path for folder in importlib.import_module(package).__path__ for path in Path(folder).glob("*.py")]
    return {name for path in files for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)}
