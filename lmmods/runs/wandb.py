"""Weights & Biases: ids and folders of runs, API key, and logged tables, recipes and checkpoints."""

import glob
import json
import netrc
import os
import secrets
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmmods.core.compat import logged_checkpoints, without_anonymous
from lmmods.core.console import say
from lmmods.core.files import is_plain_name
from lmmods.core.redaction import redact, redacted
from lmmods.recipe.files import read_recipe
from lmmods.runs.loggers import LoggerSupport, list_loggers

PROJECT = "lmmods"  # unless the recipe names one
TABLE_ROWS = 1000
TABLE_PROMPTS = 4  # per rollout


class WandbSupport(LoggerSupport):
    """W&B writes to the run folder and keeps one run across resumes, to which predict adds its table."""

    def folders(self, options: Mapping[str, Any]) -> list[str | None]:
        """Return the folders of runs and other files."""
        return [options.get("save_dir"), options.get("dir")]

    def configure(self, options: dict[str, Any], root: Path, goes_on: bool) -> None:
        """Set run folder, project, name and id, and stay offline without an API key, which W&B would ask for.

        Names, tags and notes are redacted, as they are stored and uploaded.
        """
        for key, value in list(options.items()):
            if isinstance(value, str | list):
                options[key] = redacted(value)
        options["save_dir"] = str(root) if options.get("save_dir") in (None, ".") else options["save_dir"]
        options["project"] = options.get("project") or PROJECT
        options["name"] = options.get("name") or root.name
        if not (options.get("id") or options.get("version")):
            options["id"] = _known_id(root) if goes_on else None
            # A W&B sweep agent sets the id of the run that it starts.
            options["id"] = options["id"] or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        if reason := _reason_to_stay_offline(options):
            os.environ["WANDB_MODE"] = "offline"
            say(f"W&B: {reason}, so the run stays offline. Upload it later with: wandb sync "
                f"{options['save_dir']}/wandb/offline-run-*")

    def continues(self, root: Path) -> bool:
        """True if a run in this folder has logged to W&B."""
        return bool(_known_id(root))

    def paths(self, options: Mapping[str, Any], root: Path) -> set[str]:
        """Return the paths of the run's own folders, of the latest run and of the logs."""
        name = str(options.get("id") or "")
        if not is_plain_name(name) or Path(options.get("save_dir") or root).resolve() != root.resolve():
            return set()
        return {"wandb", f"wandb/*-{glob.escape(name)}", "wandb/latest-run", "wandb/debug.log",
                "wandb/debug-internal.log"}


SUPPORT = WandbSupport()


def _reason_to_stay_offline(options: Any) -> str | None:
    mode = os.environ.get("WANDB_MODE")
    if mode in ("offline", "dryrun"):
        return f"WANDB_MODE is {mode}"
    if mode is None and options.get("offline"):
        return "the logger's offline is true"
    return "no API key is set" if mode is None and not has_wandb_key() else None


def sync_commands(loggers: Iterable[Any]) -> list[str]:
    """Return commands that upload the runs which these loggers keep offline. Call after the first step."""
    folders = []
    for logger in loggers:
        run = logger.experiment if hasattr(logger, "log_table") else None
        if run is not None and not run.disabled and run.offline:
            folders.append(Path(run.dir).parent)  # run.dir is its subfolder `files`
    return [shlex.join(["wandb", "sync", _shorten_path(folder)]) for folder in folders]


def _shorten_path(path: Path) -> str:
    """Return a path relative to the working directory if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _known_id(root: Path) -> str | None:
    """Return the W&B id of the run in a folder."""
    config = root / "config.yaml"
    recipe = read_recipe(config) if config.exists() else {}
    return next((options.get("id") for support, options in list_loggers(recipe) if support is SUPPORT), None)


def has_wandb_key() -> bool:
    """True if W&B would find an API key, in the environment or where `wandb login` stores it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return any("wandb" in host for host in netrc.netrc(Path.home() / ".netrc").hosts)
    except (OSError, netrc.NetrcParseError):
        return False


def log_predictions(loggers: list[Any], rows: list[dict[str, Any]]) -> None:
    """Log the first rows of predictions.jsonl as the table `predictions`, to loggers that support tables."""
    if not rows:
        return
    data = [[value if isinstance(value, str | int | float | None) else json.dumps(value, ensure_ascii=False)
             for value in (row.get(name) for name in rows[0])] for row in rows[:TABLE_ROWS]]
    for logger in loggers:
        if hasattr(logger, "log_table"):
            without_anonymous(logger)
            with hidden_arguments():
                logger.log_table("predictions", columns=list(rows[0]), data=data)
            logger.finalize("success")


def log_classes(loggers: Iterable[Any], files: dict[str, Any], role: str, step: int) -> None:
    """Log classes.json of an evaluation as tables, to loggers that support tables.

    `ROLE/classes` and, for tagged entities, `ROLE/entities` have precision, recall, F1 and support of each name.
    `ROLE/confusion` has the positive counts of the confusion matrix, largest first, in the columns of W&B's own charts
    of such matrices. Each table has at most TABLE_ROWS rows.

    Args:
        files: Files of the evaluation by name, as `NumbersCodec.evaluate` returns them.
        role: val or test.
        step: Optimiser steps done.
    """
    classes = files.get("classes.json")
    if not classes:
        return
    tables = {}
    for name in ("classes", "entities"):
        if scores := classes.get(name):
            measures = list(next(iter(scores.values())))
            tables[name] = ["name", *measures], [[class_name, *(row[measure] for measure in measures)]
                                                 for class_name, row in scores.items()]
    if "confusion" in classes:
        counts = [[actual, predicted, count] for actual, row in zip(classes["names"], classes["confusion"], strict=True)
                  for predicted, count in zip(classes["names"], row, strict=True) if count]
        tables["confusion"] = ["Actual", "Predicted", "nPredictions"], sorted(counts, key=lambda row: -row[2])
    for logger in loggers:
        for name, (columns, data) in tables.items() if hasattr(logger, "log_table") else ():
            logger.log_table(f"{role}/{name}", columns=columns, data=data[:TABLE_ROWS], step=step)


class RolloutTable:
    """The table `rollouts`: answers to the first prompts of a rollout, with their rewards."""

    def __init__(self) -> None:
        self._last: int | None = None  # step of the last table

    def log(self, loggers: Iterable[Any], lines: list[dict[str, Any]], step: int, every: int) -> None:
        """Log a rollout to loggers that support tables, unless the last table is too recent.

        Args:
            lines: Its answers, as in the readable rollout file.
            step: Optimiser steps done.
            every: Minimum number of steps between two tables.
        """
        loggers = [logger for logger in loggers if hasattr(logger, "log_table")]
        if not loggers or not lines or self._last is not None and step - self._last < every:
            return
        self._last = step
        prompts = list(dict.fromkeys(line["prompt"] for line in lines))[:TABLE_PROMPTS]
        names = list(lines[0]["rewards"])
        columns = ["prompt", "answer", "reward", *(f"rewards/{name}" for name in names), "advantage", "ended",
                   "missing"]
        data = [[line["asked"], line["answer"], line["reward"], *(line["rewards"][name] for name in names),
                 line["advantage"], line["ended"],
                 "; ".join(f"{name}: {reason}" for name, reason in line.get("missing", {}).items())]
                for line in lines if line["prompt"] in prompts]
        for logger in loggers:
            logger.log_table("rollouts", columns=columns, data=data[:TABLE_ROWS], step=step)


def log_recipe(loggers: Iterable[Any], recipe: dict[str, Any], report: dict[str, Any]) -> None:
    """Log recipe and data report as hyperparameters."""
    with hidden_arguments():
        for logger in loggers:
            without_anonymous(logger)
            logger.log_hyperparams({"recipe": recipe, "data_report": report})


@contextmanager
def hidden_arguments() -> Iterator[None]:
    """Context with a redacted sys.argv, for opening a run, as W&B stores the command line."""
    arguments, sys.argv = sys.argv, [redact(argument) for argument in sys.argv]
    try:
        yield
    finally:
        sys.argv = arguments


def log_checkpoint(loggers: Iterable[Any], checkpoint: Path | None, ends: bool = False) -> None:
    """Log a checkpoint as an artifact if a WandbLogger's `log_model` is `all`, or true at the end of the run.

    Args:
        checkpoint: Folder of the complete checkpoint; None if the run does not write checkpoints.
        ends: True if the run is finished.
    """
    for logger in loggers:
        log_model = logged_checkpoints(logger)
        if checkpoint is not None and (log_model == "all" and not ends or log_model is True and ends):
            import wandb

            artifact = wandb.Artifact(f"model-{logger.experiment.id}", type="model",
                                      metadata={"checkpoint": checkpoint.name})
            artifact.add_dir(str(checkpoint))
            logger.experiment.log_artifact(artifact, aliases=["latest", checkpoint.name.replace("=", "-")])
