"""The engines: their names, the classes that recipes configure on each, and the loggers of both."""

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

ENGINES = ("torch", "jax")
ENTRIES = {"torch": "lmmods.torch_engine.engine", "jax": "jax_engine.engine"}
# Loggers that a recipe may name without their import path -> the file whose SUPPORT defines how runs use them
# (lmmods.runs.loggers). The project's own logger classes are defined in these files, too.
LOGGERS = {
    "CSVLogger": "lmmods.runs.csv_logger",
    "MLFlowLogger": "lmmods.runs.mlflow",
    "TensorBoardLogger": "lmmods.runs.tensorboard",
    "TrackioLogger": "lmmods.runs.trackio",
    "WandbLogger": "lmmods.runs.wandb",
}


@dataclass(frozen=True)
class EngineTypes:
    """Classes of an engine that a recipe configures.

    Args:
        model: Base class of all tasks.
        data: Base class of all data modules.
        blocks: Classes of `checkpoint`, `samples`, `mmlu` and `publish`.
        libraries: Stand-in of a library's class in the fields of `trainer` -> the class.
    """

    trainer: type
    model: type
    data: type
    blocks: dict[str, type]
    libraries: dict[type, Any]


def load_engine(engine: str) -> EngineTypes:
    """Import an engine. Raises UserError if one of its libraries is missing or has a wrong version."""
    types = importlib.import_module(ENTRIES[engine]).load()
    for module in LOGGERS.values():  # short names are looked up among imported classes
        importlib.import_module(module)
    return types


def import_all(package: str) -> None:
    """Import every module of a package: recipes can name only imported classes by their short names."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
