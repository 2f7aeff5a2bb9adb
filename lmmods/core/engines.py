"""The engines by name, and how their classes become known."""

import importlib
import pkgutil

ENGINES = ("torch", "jax")


def import_all(package: str) -> None:
    """Import every module of a package, so that the classes in it are known by their short names."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
