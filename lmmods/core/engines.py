"""Names of the engines, and import of all their classes."""

import importlib
import pkgutil

ENGINES = ("torch", "jax")


def import_all(package: str) -> None:
    """Import every module of a package: recipes may name only imported classes by their short names."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
