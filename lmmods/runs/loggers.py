"""Support of the loggers that recipes name. Each logger has its own file, listed in `recipe.engines.LOGGERS`."""

import importlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmmods.recipe.engines import LOGGERS


class LoggerSupport:
    """What runs need to know about a logger. This class itself is for loggers that are not listed.

    `options` are the logger's `init_args` in the recipe, `root` is the run folder.

    Args:
        overwrites: Names of files in its folders that the logger overwrites.
    """

    def __init__(self, *overwrites: str) -> None:
        self.overwrites = overwrites

    def folders(self, options: Mapping[str, Any]) -> list[str | None] | None:
        """Return the folders that the logger writes to; None if unknown. A None entry means the run folder."""
        return None

    def configure(self, options: dict[str, Any], root: Path, goes_on: bool) -> None:
        """Set options before the logger is built. `goes_on` is true if an earlier start of the run may have used it."""

    def continues(self, root: Path) -> bool:
        """True if predict logs to the run that fit has logged to from this folder."""
        return False

    def paths(self, options: Mapping[str, Any], root: Path) -> set[str]:
        """Return the paths that the logger writes in a run folder; `*` stands for the time of a start."""
        return set()


def find_support(class_path: str) -> LoggerSupport:
    """Return the support of a logger. The end of the class name decides, so that subclasses share it."""
    module = next((module for name, module in LOGGERS.items() if class_path.endswith(name)), None)
    return importlib.import_module(module).SUPPORT if module else LoggerSupport()


def list_loggers(recipe: Mapping[str, Any]) -> Iterator[tuple[LoggerSupport, dict[str, Any]]]:
    """Yield the support and options of each logger in a recipe, which is written as in config.yaml."""
    loggers = (recipe.get("trainer") or {}).get("logger")
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        if isinstance(logger, dict):
            yield find_support(str(logger.get("class_path"))), logger.get("init_args") or {}


def logger_paths(recipe: Mapping[str, Any], root: Path) -> set[str]:
    """Return the paths that the loggers of a recipe write in its run folder; `*` stands for the time of a start."""
    return {path for support, options in list_loggers(recipe) for path in support.paths(options, root)}


class VersionedFolder(LoggerSupport):
    """Support of Lightning's loggers that write to SAVE_DIR/NAME/VERSION."""

    def folders(self, options: Mapping[str, Any]) -> list[str | None]:
        """Return that folder."""
        version = options.get("version")
        version = version if isinstance(version, str | None) else f"version_{version}"
        return [os.path.join(*(str(part or "") for part in (options.get("save_dir"), options.get("name"), version,
                                                            options.get("sub_dir"))))]
