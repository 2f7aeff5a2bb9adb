"""`sweep`: search hyperparameters, locally (Optuna) or with W&B agents."""

import hashlib
import json
import os
import shlex
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from lmmods.commands.programs import TYPED, last_error, run_program
from lmmods.commands.registry import options_of
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.redaction import redact
from lmmods.core.settings import require
from lmmods.core.signals import Interrupted
from lmmods.extras.report.command import render
from lmmods.extras.report.reading import read_curves, read_runs
from lmmods.extras.report.tables import TrialRow, TrialTable
from lmmods.extras.sweep.study import Parameter, Study, as_words, grid, read_space
from lmmods.recipe.files import CONFIG_OPTIONS, as_yaml, config_argument, option_values, read_recipe
from lmmods.recipe.reader import parse, with_library_classes
from lmmods.recipe.tasks.base import TaskFields
from lmmods.runs.folder import RunFolder
from lmmods.runs.loggers import list_loggers
from lmmods.runs.run_files import write_text
from lmmods.runs.wandb import PROJECT, SUPPORT

RESERVED = ("--trainer.default_root_dir", "--ckpt_path", "--overwrite")
TRIALS = 20
MAX_PLOTTED = 30  # maximum number of runs with curves in the report; its table lists all trials


def sweep(recipe: list[str], parameters: list[str] = [], space: str | None = None,  # noqa: B006
          backend: Literal["optuna", "wandb"] = "optuna", folder: str | None = None, trials: int | None = None,
          sampler: Literal["tpe", "random", "grid"] = "tpe", pruner: Literal["median", "none"] | None = None,
          seed: int = 0, metric: str | None = None, mode: Literal["min", "max"] | None = None) -> None:
    """Train a recipe with many settings, each in its own run folder, and compare the trials on one page.

    All other options are those of fit: `--config`, `--engine`, `--trainer.max_steps` and so on.

    Args:
        recipe: Arguments of fit.
        parameters: Keys to vary: KEY=LOW..HIGH, followed by ,log or ,step=S, or KEY=A,B,C.
        space: YAML file of more keys to vary, each with a list of values, or with low, high and log: true or step.
        backend: `optuna` runs the trials on this machine; `wandb` writes a sweep file for W&B agents, which run them.
        folder: Sweep folder; an existing sweep continues. Default: sweeps/ and the name of the recipe.
        trials: Number of trials. Default: 20, or the whole grid.
        sampler: `tpe` learns from earlier trials (W&B: bayes), `random` does not, `grid` tries every combination.
        pruner: `median` stops a trial whose metric is worse than the median of the other trials at this step; `none`
            stops no trial. Default: median with optuna; not available with wandb.
        seed: Random seed of the sampler.
        metric: Metric by which trials are ranked. Default: val/loss, for reinforcement learning val/reward.
        mode: Whether smaller or larger values of the metric are better. Default: the mode of the default metric, or
            min for another metric.

    Raises:
        UserError: The recipe with these settings is wrong, the folder contains another sweep, or Optuna is missing.
    """
    search_space = read_space(parameters, space)
    require(trials is None or trials >= 1, "--trials", trials, "1 or more")
    require(seed >= 0, "--seed", seed, "0 or more")
    if sampler == "grid":
        grid(search_space)
    ranked_by = check_space(recipe, search_space)
    metric = metric or ranked_by[0]
    mode = mode or (ranked_by[1] if metric == ranked_by[0] else "min")
    root = Path(folder or Path("sweeps") / _recipe_name(recipe))
    if backend == "wandb":
        if pruner or trials:
            raise UserError(f"{'--pruner' if pruner else '--trials'} applies only to --backend optuna. Remove it: W&B "
                            "counts and stops runs itself (wandb agent --count N, and early_terminate in sweep.yaml).")
        path = root / "sweep.yaml"
        text = build_sweep_file(root, recipe, search_space, sampler, metric, mode)
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise UserError(f"{path} exists and differs. Delete it, or choose another --folder.")
        write_text(path, text)
        print(f"Wrote {path}. Register it with: wandb sweep {path}\n"
              "Then start the agent that it prints, in the folder of train.py, on any number of machines.")
        return
    settings = {"space": [vars(parameter) for parameter in search_space], "sampler": sampler,
                "pruner": pruner or "median", "seed": seed, "metric": metric, "mode": mode,
                "recipe": redact(" ".join(recipe)), "files": _digest(recipe)}
    check_study(root, settings)
    study = Study(root, search_space, sampler, pruner or "median", seed, mode)
    try:
        Worker(study, root, recipe, metric).work(trials or (None if sampler == "grid" else TRIALS))
    finally:
        ranked = conclude(root, study, [parameter.key for parameter in search_space], metric, mode)
    if problem := next((trial.user_attrs["problem"] for trial in ranked if "problem" in trial.user_attrs), None):
        if all(trial.state.name == "FAIL" for trial in ranked):
            raise UserError(f"sweep: every trial has failed, the first with: {problem}")


def check_space(recipe: list[str], space: list[Parameter]) -> tuple[str, Literal["min", "max"]]:
    """Reject what fit would reject, for both ends of every range and every listed value.

    Returns:
        The metric that the task's checkpoints are ranked by, and whether the smaller or the larger is better.

    Raises:
        UserError: A key is set by the sweep itself, or set twice.
        SystemExit: The parser printed help or an error.
    """
    options_set = {word.partition("=")[0] for word in recipe}
    for key in [*RESERVED, *(f"--{parameter.key}" for parameter in space)]:
        if key in options_set:
            raise UserError(f"sweep: {key} is set by the sweep for each trial. Remove it.")
        if key in RESERVED and key[2:] in {parameter.key for parameter in space}:
            raise UserError(f"sweep: {key[2:]} cannot vary, as each trial has its own run folder. Remove it.")
    options, _ = options_of("fit")
    first = {parameter.key: parameter.extremes()[0] for parameter in space}
    task = parse(["fit", *recipe, *as_words(first)], options).fields_class("model")
    for parameter in space:
        for value in parameter.extremes()[1:]:
            parse(["fit", *recipe, *as_words(first | {parameter.key: value})], options)
    return getattr(task, "ranked_by", TaskFields.ranked_by)


def check_study(folder: Path, settings: dict[str, Any]) -> None:
    """Save the settings of a new sweep, or check that they match the sweep in the folder.

    Raises:
        UserError: The folder contains another sweep, or something else.
    """
    path, settings = folder / "study.yaml", yaml.safe_load(as_yaml(_to_lists(settings)))
    if path.exists():
        stored = read_recipe(path)
        if changed := [key for key in settings if stored.get(key) != settings[key]]:
            differences = "; ".join(f"{key} was {stored.get(key)}, is {settings[key]}" for key in changed)
            raise UserError(f"{folder} contains a sweep with other settings: {differences}. Restore them, or choose "
                            "another --folder.")
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and does not contain a local sweep. Choose another --folder.")
    write_text(path, as_yaml(settings))


def conclude(folder: Path, study: Study, keys: list[str], metric: str, mode: str) -> list[Any]:
    """Print the trials, best first, write them and the curves of the best ones to report.html, and return them."""
    trials = study.trials()
    if not trials:
        return []
    sign, states = (1 if mode == "min" else -1), ("COMPLETE", "PRUNED", "RUNNING", "FAIL")

    def rank(trial: Any) -> tuple[int, float, int]:
        value = last_value(trial)
        return states.index(trial.state.name), sign * value if value is not None else 0.0, trial.number

    ranked = sorted(trials, key=rank)
    table = TrialTable(keys, metric, [TrialRow(
        trial.number, trial.state.name.lower(), last_value(trial), [trial.params.get(key) for key in keys],
        trial.user_attrs.get("problem", "")) for trial in ranked])
    print("\n" + table.as_text(), flush=True)
    plotted = [str(run) for trial in ranked if trial.state.name != "FAIL"
               for run in [trial_folder(folder, trial.number)] if RunFolder(run).has_run()][:MAX_PLOTTED]
    if plotted:
        write_text(folder / "report.html", render(read_runs(plotted), datetime.now().astimezone(), table))
        best = trial_folder(folder, ranked[0].number) if ranked[0].state.name == "COMPLETE" else "none is complete yet"
        print(f"Wrote {folder / 'report.html'}. Best: {best}", flush=True)
    return ranked


def last_value(trial: Any) -> float | None:
    """Return the last measured value of a trial."""
    if trial.state.name == "COMPLETE":
        return trial.value
    return trial.intermediate_values[max(trial.intermediate_values)] if trial.intermediate_values else None


def _recipe_name(recipe: list[str]) -> str:
    """Return the name of the first recipe file."""
    paths = [Path(value) for value in option_values(recipe, *CONFIG_OPTIONS) if value.endswith((".yaml", ".yml"))]
    return paths[0].stem if paths else "sweep"


def _digest(recipe: list[str]) -> str:
    """Return a digest of the recipe files' contents: trials of one sweep may differ only in its parameters."""
    contents = [config_argument(value) for value in option_values(recipe, *CONFIG_OPTIONS)]
    return hashlib.sha256(repr(contents).encode()).hexdigest()[:16]


def _to_lists(value: Any) -> Any:
    """Convert tuples to lists, for YAML."""
    if isinstance(value, dict):
        return {key: _to_lists(item) for key, item in value.items()}
    return [_to_lists(item) for item in value] if isinstance(value, list | tuple) else value


# ---------------------------------------------------------------------------------------------------------------------
# Local trials: each runs fit in its own process and folder.

POLL_SECONDS = 0.2
INTERRUPTED = 130


@dataclass(frozen=True)
class Worker:
    """Process that runs trials of a sweep.

    Args:
        folder: Folder of the sweep.
        recipe: Arguments of fit that all trials share.
        metric: Logged metric that the study compares by its value at the end of a run.
    """

    study: Study
    folder: Path
    recipe: list[str]
    metric: str

    def work(self, max_trials: int | None) -> None:
        """Run trials until the study has `max_trials`, or its whole grid.

        Raises:
            UserError: The runs do not log the metric.
            Interrupted: Ctrl+C or SIGTERM; the current trial has saved what it needs to resume.
        """
        while (claim := self.study.ask(max_trials)) is not None:
            trial, lock = claim
            try:
                self._run(trial, lock)
            except Interrupted as stop:
                raise Interrupted(f"Interrupted in trial {trial.number}. The same command continues it.") from stop
            finally:
                os.close(lock)

    def _run(self, trial: Any, lock: int) -> None:
        run, log = RunFolder(trial_folder(self.folder, trial.number)), self.folder / "logs" / f"{trial.number}.txt"
        log.parent.mkdir(exist_ok=True)
        words = [*self.recipe, *as_words(trial.params), "--trainer.default_root_dir", str(run.root)]
        say(f"trial {trial.number}{' (resumed)' if run.has_run() else ''}: "
            + "  ".join(f"{key} {_format_value(value)}" for key, value in trial.params.items()))
        is_pruned = False
        with run_program(["fit", *words, "--ckpt_path", "auto"], log, keeps=(lock,)) as process:
            while process.poll() is None and not is_pruned:
                time.sleep(POLL_SECONDS)
                is_pruned = self.study.should_prune(trial, self._points(run))
        # Judge finished trials too: pruning must depend only on measurements, not on the run's speed.
        if is_pruned or self.study.should_prune(trial, self._points(run)):
            self.study.finish(trial, "pruned")
            say(f"trial {trial.number}: stopped early, {self.metric} {_format_value(self._points(run)[-1][1])}")
        elif process.returncode == INTERRUPTED:
            raise Interrupted("")
        else:
            self._record_result(trial, run, process.returncode, log)

    def _record_result(self, trial: Any, run: RunFolder, status: int, log: Path) -> None:
        final = json.loads(run.metrics_json.read_text()) if status == 0 else {}
        value = final.get(self.metric)
        if status:
            problem = last_error(log) if status > 0 else f"killed by signal {-status}"
        elif value is None:
            problem = f"logged no {self.metric}"
        else:
            problem = "" if value == value else f"{self.metric} is not a number"
        self.study.finish(trial, "fail" if problem else "complete", None if problem else value, problem)
        say(f"trial {trial.number}: " + (f"failed: {problem} (see {log})" if problem else
                                         f"{self.metric} {_format_value(value)}"))
        if status == 0 and value is None:
            raise UserError(f"--metric {self.metric} is not logged by these runs ({', '.join(sorted(final))}). Use one "
                            "of these and a new --folder; val/loss needs data.val_source or data.val_size.")

    def _points(self, run: RunFolder) -> list[tuple[int, float]]:
        """Return the run's logged values of the metric as (optimiser step, value)."""
        return read_curves(run.metrics_csv).get(self.metric, [])


def trial_folder(folder: Path, number: int) -> Path:
    """Return the run folder of a trial."""
    return folder / f"trial={number}"


def _format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------------------------------------------------------------
# W&B sweeps: the file that `wandb sweep` reads and from which `wandb agent` starts runs.

METHODS = {"tpe": "bayes", "random": "random", "grid": "grid"}


def build_sweep_file(folder: Path, recipe: list[str], space: list[Parameter], sampler: str, metric: str, mode: str
                     ) -> str:
    """Return the text of the sweep file.

    Args:
        folder: Parent of the run folders, which are named after the run ids.
        recipe: Arguments of fit.

    Raises:
        UserError: The recipe does not log to W&B, or the command contains a password, which W&B would see.
    """
    fit = shlex.join([*TYPED, "fit", *recipe])
    if redact(fit) != fit:
        raise UserError("sweep: the command line contains a password or token, which W&B would see. Move it to the "
                        "recipe file or the environment.")
    run_folder = f'{shlex.quote(str(folder))}/"$WANDB_RUN_ID"'
    content = {
        "name": folder.name, "project": _read_project(recipe), "program": TYPED[-1], "method": METHODS[sampler],
        "metric": {"name": metric, "goal": f"{mode}imize"},
        "parameters": {parameter.key: _distribution(parameter, sampler) for parameter in space},
        # Via a shell: the agent does not expand environment variables, and each run needs its own folder.
        "command": ["sh", "-c", f'exec {fit} --trainer.default_root_dir {run_folder} "$@"', "sh", "${args}"]}
    return as_yaml(content)


def _read_project(recipe: list[str]) -> str:
    """Return the W&B project that the recipe logs to. Raises UserError: it has no WandbLogger."""
    options, _ = options_of("fit")
    parsed = with_library_classes(parse(["fit", *recipe], options, checked=False))
    for support, init_args in list_loggers({"trainer": parsed.whole()["trainer"]}):
        if support is SUPPORT:
            return str(init_args.get("project") or PROJECT)
    raise UserError("sweep: the recipe does not log to W&B, which could not compare its runs. Add class_path: "
                    "WandbLogger to trainer.logger, or use --backend optuna.")


def _distribution(parameter: Parameter, sampler: str) -> dict[str, Any]:
    """Return a parameter in the format of W&B's sweep files."""
    if parameter.values or parameter.step is not None or sampler == "grid":
        return {"values": list(parameter.grid())}
    bounds = {"min": parameter.low, "max": parameter.high}
    if parameter.log:
        distribution = {"distribution": "q_log_uniform_values", "q": 1} if parameter.is_integer else {
            "distribution": "log_uniform_values"}
        return distribution | bounds
    return {"distribution": "int_uniform" if parameter.is_integer else "uniform"} | bounds
