"""The engines: their names, the classes that recipes configure on each, and the loggers of both."""

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

ENGINES = ("torch", "jax")
ENTRIES = {"torch": "lmmods.torch_engine.engine", "jax": "jax_engine.engine"}
# Loggers that a recipe may give by short name -> the file whose SUPPORT says how runs use it (lmmods.runs.loggers). If
# the class is ours, it is defined there, too.
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
    """Import an engine. Raises UserError: one of its libraries is missing or of the wrong version."""
    types = importlib.import_module(ENTRIES[engine]).load()
    for module in LOGGERS.values():  # short names are found among the classes that are imported
        importlib.import_module(module)
    return types


def import_all(package: str) -> None:
    """Import every module of a package: recipes can name only imported classes by their short names."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
