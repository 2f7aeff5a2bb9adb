"""`sweep`: train a recipe with many settings."""

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

from lmmods.commands.programs import TYPED, last_error, started
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
from lmmods.runs.loggers import loggers_of
from lmmods.runs.run_files import write_text
from lmmods.runs.wandb import PROJECT, SUPPORT

OF_THE_SWEEP = ("--trainer.default_root_dir", "--ckpt_path", "--overwrite")
TRIALS = 20
MOST_DRAWN = 30  # maximum number of runs with curves in the report; its table lists all trials


def sweep(recipe: list[str], parameters: list[str] = [], space: str | None = None,  # noqa: B006
          backend: Literal["optuna", "wandb"] = "optuna", folder: str | None = None, trials: int | None = None,
          sampler: Literal["tpe", "random", "grid"] = "tpe", pruner: Literal["median", "none"] | None = None,
          seed: int = 0, metric: str | None = None, mode: Literal["min", "max"] | None = None) -> None:
    """Train a recipe with many settings, each in a run folder of its own, and compare them on one page.

    All other options are those of fit: `--config`, `--engine`, `--trainer.max_steps` and so on.

    Args:
        recipe: Arguments of fit.
        parameters: What varies: KEY=LOW..HIGH, followed by ,log or ,step=S, or KEY=A,B,C.
        space: The same in a YAML file: keys with a list of values, or with low, high and log: true or step.
        backend: `optuna` runs the trials here; `wandb` writes the file for W&B, whose agents run them.
        folder: Of the sweep; null is sweeps/ and the name of the recipe. A sweep that is there goes on.
        trials: How many; null is 20, or the whole grid.
        sampler: `tpe` learns from the trials before (W&B: bayes), `random` does not, `grid` takes every combination.
        pruner: `median` stops a trial whose metric is worse than that of half the others at this step; `none` stops
            none. Null is median on this machine; W&B has no such rule.
        seed: Of what is tried.
        metric: By which trials are compared; null is val/loss, in reinforcement learning val/reward.
        mode: Whether the smaller or the larger value is better; null is the one that goes with this metric, else min.

    Raises:
        UserError: The recipe with these settings is wrong, the folder holds another sweep, or Optuna is missing.
    """
    found = read_space(parameters, space)
    require(trials is None or trials >= 1, "--trials", trials, "1 or more")
    require(seed >= 0, "--seed", seed, "0 or more")
    if sampler == "grid":
        grid(found)
    ranked_by = check(recipe, found)
    metric = metric or ranked_by[0]
    mode = mode or (ranked_by[1] if metric == ranked_by[0] else "min")
    place = Path(folder or Path("sweeps") / _name(recipe))
    if backend == "wandb":
        if pruner or trials:
            raise UserError(f"{'--pruner' if pruner else '--trials'} is for --backend optuna: W&B counts and stops "
                            "runs itself (wandb agent --count N, and early_terminate in the file that this writes).")
        path = place / "sweep.yaml"
        text = sweep_file(place, recipe, found, sampler, metric, mode)
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise UserError(f"{path} is there and differs. Delete it, or choose another --folder.")
        write_text(path, text)
        print(f"Wrote {path}. Register it with: wandb sweep {path}\n"
              "and start the agent that it names where train.py is, on as many machines as you like.")
        return
    asked = {"space": [{name: value for name, value in vars(each).items()} for each in found], "sampler": sampler,
             "pruner": pruner or "median", "seed": seed, "metric": metric, "mode": mode,
             "recipe": redact(" ".join(recipe)), "files": _digest(recipe)}
    check_study(place, asked)
    study = Study(place, found, sampler, pruner or "median", seed, mode)
    try:
        Worker(study, place, recipe, metric).work(trials or (None if sampler == "grid" else TRIALS))
    finally:
        ended = conclude(place, study, [each.key for each in found], metric, mode)
    if problem := next((trial.user_attrs["problem"] for trial in ended if "problem" in trial.user_attrs), None):
        if all(trial.state.name == "FAIL" for trial in ended):
            raise UserError(f"sweep: every trial has failed, the first with: {problem}")


def check(recipe: list[str], space: list[Parameter]) -> tuple[str, Literal["min", "max"]]:
    """Reject what fit would reject, for the ends of every range and every value of a list.

    Returns:
        The metric that the task's checkpoints are ranked by, and whether the smaller or the larger is better.

    Raises:
        UserError: A key is set by the sweep itself, or given twice.
        SystemExit: The parser printed help or an error.
    """
    given = {word.partition("=")[0] for word in recipe}
    for key in [*OF_THE_SWEEP, *(f"--{parameter.key}" for parameter in space)]:
        if key in given:
            raise UserError(f"sweep: {key} is set by the sweep, for each trial anew. Take it out.")
        if key in OF_THE_SWEEP and key[2:] in {parameter.key for parameter in space}:
            raise UserError(f"sweep: {key[2:]} cannot vary: each trial has a folder of its own.")
    options, _ = options_of("fit")
    first = {parameter.key: parameter.extremes()[0] for parameter in space}
    task = parse(["fit", *recipe, *as_words(first)], options).kind("model")
    for parameter in space:
        for value in parameter.extremes()[1:]:
            parse(["fit", *recipe, *as_words(first | {parameter.key: value})], options)
    return getattr(task, "ranked_by", TaskFields.ranked_by)


def check_study(folder: Path, asked: dict[str, Any]) -> None:
    """Save the settings of a new sweep, or check that they match the sweep in the folder.

    Raises:
        UserError: The folder holds another sweep, or something else.
    """
    path, asked = folder / "study.yaml", yaml.safe_load(as_yaml(_plain(asked)))
    if path.exists():
        known = read_recipe(path)
        if changed := [key for key in asked if known.get(key) != asked[key]]:
            shown = "; ".join(f"{key} was {known.get(key)}, is {asked[key]}" for key in changed)
            raise UserError(f"{folder} holds a sweep that differs: {shown}. Restore that, or choose another --folder.")
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} is there and holds no sweep of this kind. Choose another --folder.")
    write_text(path, as_yaml(asked))


def conclude(folder: Path, study: Study, keys: list[str], metric: str, mode: str) -> list[Any]:
    """Print the trials, best first, write them with the curves of the best to report.html, and return them."""
    trials = study.trials()
    if not trials:
        return []
    sign, states = (1 if mode == "min" else -1), ("COMPLETE", "PRUNED", "RUNNING", "FAIL")

    def rank(trial: Any) -> tuple[int, float, int]:
        value = value_of(trial)
        return states.index(trial.state.name), sign * value if value is not None else 0.0, trial.number

    ranked = sorted(trials, key=rank)
    table = TrialTable(keys, metric, [TrialRow(
        trial.number, trial.state.name.lower(), value_of(trial), [trial.params.get(key) for key in keys],
        trial.user_attrs.get("problem", "")) for trial in ranked])
    print("\n" + table.as_text(), flush=True)
    drawn = [str(place) for trial in ranked if trial.state.name != "FAIL"
             for place in [trial_folder(folder, trial.number)] if RunFolder(place).holds_run()][:MOST_DRAWN]
    if drawn:
        write_text(folder / "report.html", render(read_runs(drawn), datetime.now().astimezone(), table))
        best = trial_folder(folder, ranked[0].number) if ranked[0].state.name == "COMPLETE" else "none is complete yet"
        print(f"Wrote {folder / 'report.html'}. Best: {best}", flush=True)
    return ranked


def value_of(trial: Any) -> float | None:
    """Return the last measured value of a trial."""
    if trial.state.name == "COMPLETE":
        return trial.value
    return trial.intermediate_values[max(trial.intermediate_values)] if trial.intermediate_values else None


def _name(recipe: list[str]) -> str:
    """Return the name of the first recipe file."""
    paths = [Path(value) for value in option_values(recipe, *CONFIG_OPTIONS) if value.endswith((".yaml", ".yml"))]
    return paths[0].stem if paths else "sweep"


def _digest(recipe: list[str]) -> str:
    """Return a digest of the recipe files' contents: trials of one sweep may differ only in its parameters."""
    contents = [config_argument(value) for value in option_values(recipe, *CONFIG_OPTIONS)]
    return hashlib.sha256(repr(contents).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Convert tuples to lists, for YAML."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


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

    def work(self, most: int | None) -> None:
        """Run trials until the study has `most` of them, or its whole grid.

        Raises:
            UserError: Runs end without having logged the metric.
            Interrupted: Ctrl+C or SIGTERM; the current trial has saved what it needs to resume.
        """
        while (asked := self.study.ask(most)) is not None:
            trial, held = asked
            try:
                self._run(trial, held)
            except Interrupted as stop:
                raise Interrupted(f"Interrupted in trial {trial.number}. The same command continues it.") from stop
            finally:
                os.close(held)

    def _run(self, trial: Any, held: int) -> None:
        run, log = RunFolder(trial_folder(self.folder, trial.number)), self.folder / "logs" / f"{trial.number}.txt"
        log.parent.mkdir(exist_ok=True)
        words = [*self.recipe, *as_words(trial.params), "--trainer.default_root_dir", str(run.root)]
        say(f"trial {trial.number}{' goes on' if run.holds_run() else ''}: "
            + "  ".join(f"{key} {_format(value)}" for key, value in trial.params.items()))
        pruned = False
        with started(["fit", *words, "--ckpt_path", "auto"], log, keeps=(held,)) as process:
            while process.poll() is None and not pruned:
                time.sleep(POLL_SECONDS)
                pruned = self.study.should_prune(trial, self._points(run))
        # Judge finished trials too: pruning must depend only on measurements, not on the run's speed.
        if pruned or self.study.should_prune(trial, self._points(run)):
            self.study.finish(trial, "pruned")
            say(f"trial {trial.number}: stopped early, {self.metric} {_format(self._points(run)[-1][1])}")
        elif process.returncode == INTERRUPTED:
            raise Interrupted("")
        else:
            self._end(trial, run, process.returncode, log)

    def _end(self, trial: Any, run: RunFolder, status: int, log: Path) -> None:
        final = json.loads(run.metrics_json.read_text()) if status == 0 else {}
        value = final.get(self.metric)
        if status:
            problem = last_error(log) if status > 0 else f"killed by signal {-status}"
        elif value is None:
            problem = f"logged no {self.metric}"
        else:
            problem = "" if value == value else f"{self.metric} is not a number"
        self.study.finish(trial, "fail" if problem else "complete", None if problem else value, problem)
        say(f"trial {trial.number}: " + (f"failed: {problem} (more in {log})" if problem else
                                         f"{self.metric} {_format(value)}"))
        if status == 0 and value is None:
            raise UserError(f"--metric {self.metric} is none that the runs log ({', '.join(sorted(final))}). Name one "
                            "of these, and another --folder; val/loss wants data.val_source or data.val_size.")

    def _points(self, run: RunFolder) -> list[tuple[int, float]]:
        """Return the run's logged values of the metric as (optimiser step, value)."""
        return read_curves(run.metrics_csv).get(self.metric, [])


def trial_folder(folder: Path, number: int) -> Path:
    """Return the run folder of a trial."""
    return folder / f"trial={number}"


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------------------------------------------------------------
# W&B sweeps: the file that `wandb sweep` reads and from which `wandb agent` starts runs.

METHODS = {"tpe": "bayes", "random": "random", "grid": "grid"}


def sweep_file(folder: Path, recipe: list[str], space: list[Parameter], sampler: str, metric: str, mode: str) -> str:
    """Return the text of the sweep file.

    Args:
        folder: Parent of the run folders, which are named after the run ids.
        recipe: Arguments of fit.

    Raises:
        UserError: The recipe does not log to W&B, or the command holds a password, which W&B would see.
    """
    fit = shlex.join([*TYPED, "fit", *recipe])
    if redact(fit) != fit:
        raise UserError("sweep: the command line holds a password or token, which W&B would get to see. Put it into "
                        "the recipe's file or the environment.")
    place = f'{shlex.quote(str(folder))}/"$WANDB_RUN_ID"'
    content = {
        "name": folder.name, "project": _project(recipe), "program": TYPED[-1], "method": METHODS[sampler],
        "metric": {"name": metric, "goal": f"{mode}imize"},
        "parameters": {parameter.key: _distribution(parameter, sampler) for parameter in space},
        # Via a shell: the agent does not expand environment variables, and each run needs its own folder.
        "command": ["sh", "-c", f'exec {fit} --trainer.default_root_dir {place} "$@"', "sh", "${args}"]}
    return as_yaml(content)


def _project(recipe: list[str]) -> str:
    """Return the W&B project that the recipe logs to. Raises UserError: it has no WandbLogger."""
    options, _ = options_of("fit")
    parsed = with_library_classes(parse(["fit", *recipe], options, checked=False))
    for support, given in loggers_of({"trainer": parsed.whole()["trainer"]}):
        if support is SUPPORT:
            return str(given.get("project") or PROJECT)
    raise UserError("sweep: the recipe logs nothing to W&B, which so would learn nothing. Add class_path: WandbLogger "
                    "to trainer.logger, or sweep on this machine with --backend optuna.")


def _distribution(parameter: Parameter, sampler: str) -> dict[str, Any]:
    """Return a parameter in the format of W&B's sweep files."""
    if parameter.values or parameter.step is not None or sampler == "grid":
        return {"values": list(parameter.grid())}
    ends = {"min": parameter.low, "max": parameter.high}
    if parameter.log:
        whole = {"distribution": "q_log_uniform_values", "q": 1} if parameter.is_whole else {
            "distribution": "log_uniform_values"}
        return whole | ends
    return {"distribution": "int_uniform" if parameter.is_whole else "uniform"} | ends
