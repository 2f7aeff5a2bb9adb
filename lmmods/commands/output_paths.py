"""Where classes of Lightning that a recipe names write: in the run folder, unless the command line trusts the recipe.

Its loggers and profilers write wherever their settings say, over what is there and through links. So their settings are
looked at before any of them is built.
"""

import os
from pathlib import Path
from typing import Any

from lmmods.commands.trust import FLAG, PACKAGES, is_trusted
from lmmods.core.errors import UserError
from lmmods.runs.folder import RunFolder
from lmmods.runs.inside import way_out

PROFILERS = ("AdvancedProfiler", "PyTorchProfiler", "SimpleProfiler")
# Files that are written under these names each time; `*` is the name that the recipe gives a profile.
FILES = {"CSVLogger": ("metrics.csv", "hparams.yaml"), "TensorBoardLogger": ("hparams.yaml",),
         **dict.fromkeys(PROFILERS, ("*.txt", "*.prof", "*.json"))}
SERVERS = ("http://", "https://", "databricks")
TRUST = f"or, if you trust the recipe, add {FLAG} true to the command line."


def check_outputs(trainer: Any, folder: RunFolder) -> None:
    """Look at the loggers and profilers of a parsed recipe.

    Raises:
        UserError: One of Lightning's would write out of the run folder, over what no run wrote, or nobody knows where.
    """
    for key in ("logger", "profiler"):
        given = trainer.get(key)
        for spec in given if isinstance(given, list) else [given]:
            path = str(getattr(spec, "class_path", ""))
            if path.split(".")[0] in PACKAGES[:2] and not is_trusted():
                options = {name: value for part in ("init_args", "dict_kwargs") for name, value in
                           (spec.get(part) or {}).items()}
                _check(f"trainer.{key}", path.rsplit(".", 1)[-1], options, folder)
            elif path == "lmmods.runs.csv_logger.MetricsCSV":
                raise UserError("trainer.logger: MetricsCSV does not work here. Every run has it already.")


def _check(key: str, name: str, options: dict[str, Any], folder: RunFolder) -> None:
    if options.get("settings"):  # of wandb, with many paths among them
        raise UserError(f"{key}: {name} is given settings, which can name any place to write to. Leave them out, "
                        f"{TRUST}")
    places = _places(name, options)
    if places is None:
        raise UserError(f"{key}: it is not known where {name} writes. Name another one (docs/extending.md), {TRUST}")
    for place in filter(None, places):
        out = place if _is_odd(place) else way_out(folder.root, place)
        if out is not None:
            raise UserError(f"{key}: {name} would write to {out}, and what a run writes lies in its folder. Name a "
                            f"folder in {folder.root}, {TRUST}")
        taken = [path for pattern in FILES.get(name, ()) for path in Path(place).glob(pattern)]
        if taken and not folder.holds_run():
            raise UserError(f"{key}: {name} would write over {taken[0]}, which no run wrote. Name another folder in "
                            f"{folder.root}, {TRUST}")


def _places(name: str, options: dict[str, Any]) -> list[str] | None:
    """The folders that a class writes to, None where that is not known; one that is None is in the run folder."""
    if name in ("CSVLogger", "TensorBoardLogger"):
        version = options.get("version")
        version = version if isinstance(version, str | None) else f"version_{version}"
        return [os.path.join(*(str(part or "") for part in (options.get("save_dir"), options.get("name"), version,
                                                             options.get("sub_dir"))))]
    if name == "WandbLogger":
        return [options.get("save_dir"), options.get("dir")]
    if name == "MLFlowLogger":
        store = options.get("tracking_uri") or options.get("save_dir")
        is_users = str(store).startswith(SERVERS) or store == os.environ.get("MLFLOW_TRACKING_URI")
        return [None if is_users else _folder_of(store), _folder_of(options.get("artifact_location"))]
    if name in PROFILERS:
        return [options.get("dirpath")]
    return [] if name == "PassThroughProfiler" else None


def _folder_of(store: str | None) -> str | None:
    """The folder of a store of MLflow: itself, or that of a data base."""
    file = str(store).removeprefix("sqlite:///")
    return store if file == str(store) else os.path.dirname(file) or "."


def _is_odd(place: str) -> bool:
    """Whether a library may read a path as another one: of another file system, of a user, of a variable."""
    return place.startswith(("~", "file:", "local:")) or any(mark in place for mark in ("://", "::", "$"))
