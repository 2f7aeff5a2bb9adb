"""Names of the engines, the choice of one by a command line, and import of all their classes."""

import importlib
import pkgutil

from lmmods.core.errors import UserError
from lmmods.recipe.files import CONFIG_OPTIONS, config_argument, option_values

ENGINES = ("torch", "jax")


def import_all(package: str) -> None:
    """Import every module of a package: recipes can name only imported classes by their short names."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")


def peek_engine(arguments: list[str]) -> str:
    """Return the engine named by `--engine`, or else by the last `--config` that names one.

    It decides which classes the parser knows, so it is read before the parser is built. Raises UserError: a recipe file
    cannot be read, or no engine has this name.
    """
    engine = "torch"
    for value in option_values(arguments, *CONFIG_OPTIONS):
        engine = config_argument(value).get("engine", engine)
    engine = next(reversed(option_values(arguments, "--engine")), engine)
    if engine not in ENGINES:
        raise UserError(f"engine is {engine!r}, but must be torch or jax.")
    return engine
