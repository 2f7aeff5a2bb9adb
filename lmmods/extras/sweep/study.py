"""State of a local sweep: an Optuna study in a journal file that several processes may share.

The next trial depends only on the seed, the trial number and the results of other trials, not on process state, so a
sweep that is killed and restarted tries the same settings.
"""

import contextlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lmmods.core.errors import UserError
from lmmods.recipe.files import RecipeLoader, guard, read_recipe
from lmmods.runs.lock import lock_file

# ---------------------------------------------------------------------------------------------------------------------
# Search space: the keys that vary and their values.

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})((?:,(?:log|step={NUMBER}))*)")
FORMS = ("KEY=LOW..HIGH, followed by ,log or ,step=S, or KEY=A,B,C; for example model.optimizer.lr=1e-4..1e-2,log "
         "or data.batch_size=4,8")
MAX_GRID = 10_000  # maximum number of grid combinations
Scalar = str | int | float


@dataclass(frozen=True)
class Parameter:
    """Key that varies in a sweep.

    Args:
        key: Key as on the command line, for example model.optimizer.lr.
        values: Choices, each in command-line form; empty for a range.
        low: Lower end of a range; an int if all values are.
        step: Step of a range; None if it has none.
        log: True if a range is sampled uniformly on a logarithmic scale.
    """

    key: str
    values: tuple[Scalar, ...] = ()
    low: float = 0
    high: float = 0
    step: float | None = None
    log: bool = False

    @property
    def is_integer(self) -> bool:
        """True if a range contains only integers."""
        return all(isinstance(bound, int) for bound in (self.low, self.high, 1 if self.step is None else self.step))

    def extremes(self) -> tuple[Scalar, ...]:
        """Return the values with which a recipe is checked."""
        return self.values or (self.low, self.high)

    def grid(self) -> tuple[Scalar, ...]:
        """Return all values. Raises UserError: a range has no step."""
        if self.values:
            return self.values
        step = self.step or (1 if self.is_integer and not self.log else None)
        if step is None:
            raise UserError(f"{self.key} is a range without step, so it has no grid. List its values "
                            f"({self.key}=A,B,C) or add a step ({self.key}=LOW..HIGH,step=S).")
        count = math.floor((self.high - self.low) / step * (1 + 1e-9)) + 1
        return tuple(self.low + index * step if self.is_integer else float(f"{self.low + index * step:.12g}")
                     for index in range(min(count, MAX_GRID + 1)))


def read_space(texts: list[str], file: str | None) -> list[Parameter]:
    """Parse the parameters from the command line and a YAML file.

    Args:
        texts: Parameters in the form described by `FORMS`.
        file: YAML file that maps keys to a list of values, or to a mapping {low, high, log, step}.

    Raises:
        UserError: A parameter is malformed, a key occurs twice, or there is none.
    """
    parameters = [_parse_word(text) for text in texts]
    parameters += [_parse_entry(key, value, file) for key, value in (read_recipe(file) if file else {}).items()]
    if not parameters:
        raise UserError(f"sweep: no key varies. Write {FORMS}.")
    for first, second in itertools.combinations(parameters, 2):
        if first.key == second.key:
            raise UserError(f"sweep: {first.key} is set twice. Keep one.")
    return parameters


def grid(space: list[Parameter]) -> list[dict[str, Scalar]]:
    """Return all combinations, the last parameter varying fastest. Raises UserError: a range has no step; too many."""
    values = [parameter.grid() for parameter in space]
    if math.prod(map(len, values)) > MAX_GRID:
        raise UserError(f"The grid has more than {MAX_GRID:,} combinations. List fewer values, or use --sampler tpe.")
    keys = [parameter.key for parameter in space]
    return [dict(zip(keys, combination, strict=True)) for combination in itertools.product(*values)]


def as_words(values: dict[str, Scalar]) -> list[str]:
    """Return the options that set keys to these values, in the form that W&B's agents use too."""
    return [f"--{key}={value}" for key, value in values.items()]


def _parse_word(text: str) -> Parameter:
    key, equals, spec = text.partition("=")
    if not (equals and spec and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key)):
        raise UserError(f"sweep: {text} is not a parameter. Write {FORMS}.")
    if match := RANGE.fullmatch(spec):
        words = [word.partition("=") for word in match[3].split(",") if word]
        options = {name: _to_number(value) if value else True for name, _, value in words}
        return _make_range(key, _to_number(match[1]), _to_number(match[2]), **options)
    if re.fullmatch(r".*[\d.]\.\.[\d.].*", spec):
        raise UserError(f"sweep: {text} is not a range. Write {FORMS}.")
    return Parameter(key, _format_values(key, _load_values(f"[{spec}]", text)))


def _parse_entry(key: str, value: Any, file: str | None) -> Parameter:
    if isinstance(value, list) and value:
        return Parameter(key, _format_values(key, value))
    is_numeric = isinstance(value, dict) and all(
        isinstance(item, bool) if name == "log" else isinstance(item, int | float) and not isinstance(item, bool)
        for name, item in value.items())
    if not is_numeric or not {"low", "high"} <= value.keys() <= {"low", "high", "log", "step"}:
        raise UserError(f"{file}: {key} must be a list of values, or a mapping of low, high and, "
                        "optionally, log: true or step.")
    return _make_range(key, **value)


def _make_range(key: str, low: float, high: float, log: bool = False, step: float | None = None) -> Parameter:
    if not -math.inf < low < high < math.inf:
        raise UserError(f"sweep: {key} goes from {low:g} to {high:g}, but the first must be smaller.")
    if log and low <= 0 or log and step is not None:
        raise UserError(f"sweep: {key} has log, which needs a range above 0 without step.")
    if step is not None and not 0 < step <= high - low:
        raise UserError(f"sweep: {key} has a step of {step:g}, but it must be above 0 and within the range.")
    return Parameter(key, (), low, high, step, log)


def _to_number(text: str) -> float:
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)


def _load_values(values: str, text: str) -> list[Any]:
    try:
        return guard(lambda checked: yaml.load(checked, Loader=RecipeLoader))(values)
    except yaml.YAMLError as error:
        raise UserError(f"sweep: {text} cannot be parsed. Write {FORMS}.") from error


def _format_values(key: str, values: list[Any]) -> tuple[Scalar, ...]:
    """Format values for the command line: numbers and words unchanged, others as JSON."""
    # YAML 1.1 reads 1e-3 as a string.
    values = [float(value) if isinstance(value, str) and re.fullmatch(NUMBER, value) and "e" in value.lower() else value
              for value in values]
    texts = tuple(value if isinstance(value, str | int | float) and not isinstance(value, bool) else json.dumps(value)
                  for value in values)
    if len(set(map(str, texts))) < len(texts):
        raise UserError(f"sweep: {key} has a value twice. Keep one.")
    return texts


NAME = "sweep"


class FileLock:
    """File lock for Optuna's journal; the OS releases it when the process ends, even if killed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def acquire(self) -> bool:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        lock_file(self._file, wait=True)
        return True

    def release(self) -> None:
        os.close(self._file)


class Study:
    """Optuna study in which each trial is locked by one process at a time.

    Args:
        folder: Folder of the sweep.
        mode: `min` to minimise the metric, `max` to maximise it.

    Raises:
        UserError: Optuna is not installed.
    """

    def __init__(self, folder: Path, space: list[Parameter], sampler: str, pruner: str, seed: int, mode: str) -> None:
        try:
            import optuna
        except ImportError as error:
            raise UserError(f"sweep: {error}. Install Optuna: pip install -e '.[tune]'") from error
        self._optuna, self._folder, self._sampler, self._seed = optuna, folder, sampler, seed
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._distributions = {parameter.key: self._make_distribution(parameter) for parameter in space}
        pruners = {"median": optuna.pruners.MedianPruner, "none": optuna.pruners.NopPruner}
        (folder / ".locks").mkdir(parents=True, exist_ok=True)
        journal, lock = folder / "study.journal", FileLock(folder / ".locks" / "journal")
        with self._lock_study():
            _remove_partial_line(journal, lock)
            self._storage = optuna.storages.JournalStorage(
                optuna.storages.journal.JournalFileBackend(str(journal), lock_obj=lock))
            self._study = optuna.create_study(study_name=NAME, storage=self._storage, pruner=pruners[pruner](),
                                              direction=f"{mode}imize", load_if_exists=True)
            if sampler == "grid" and not self._study.get_trials(deepcopy=False):
                for values in grid(space):
                    self._study.enqueue_trial(values)

    def ask(self, max_trials: int | None) -> tuple[Any, int] | None:
        """Return a trial for this process: one whose process has died, or a new one.

        Args:
            max_trials: Maximum number of trials in the study; None runs the whole grid.

        Returns:
            Optuna's trial and the open file that locks it; None if nothing is left to do.
        """
        states = self._optuna.trial.TrialState
        with self._lock_study():
            trials = self._study.get_trials(deepcopy=False)
            for frozen in trials:
                if frozen.state is states.RUNNING and (lock := self._lock_trial(frozen.number)) is not None:
                    return self._optuna.trial.Trial(self._study, self._find_id(frozen)), lock
            num_waiting = sum(frozen.state is states.WAITING for frozen in trials)
            num_started = len(trials) - num_waiting
            if self._sampler == "grid" and not num_waiting or max_trials is not None and num_started >= max_trials:
                return None
            self._study.sampler = self._make_sampler(num_started)
            trial = self._study.ask(self._distributions)
            return trial, self._lock_trial(trial.number)

    def should_prune(self, trial: Any, points: list[tuple[int, float]]) -> bool:
        """Record a trial's measurements, (optimiser step, value), and return whether to prune it."""
        recorded = self._study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for step, value in points:
            if step not in recorded and value == value:
                trial.report(value, step)
                if trial.should_prune():
                    return True
        return False

    def finish(self, trial: Any, state: str, value: float | None = None, problem: str = "") -> None:
        """Finish a trial as `complete`, `pruned` or `fail`."""
        if problem:
            trial.set_user_attr("problem", problem)
        self._study.tell(trial, value, getattr(self._optuna.trial.TrialState, state.upper()))

    def trials(self) -> list[Any]:
        """Return Optuna's frozen trials that have started, in order."""
        return [frozen for frozen in self._study.get_trials(deepcopy=False)
                if frozen.state is not self._optuna.trial.TrialState.WAITING]

    def _make_sampler(self, num_started: int) -> Any:
        seed = (self._seed * 1_000_003 + num_started) % 2**32
        samplers = self._optuna.samplers
        return samplers.TPESampler(seed=seed) if self._sampler == "tpe" else samplers.RandomSampler(seed=seed)

    def _make_distribution(self, parameter: Parameter) -> Any:
        distributions = self._optuna.distributions
        if parameter.values or self._sampler == "grid":
            return distributions.CategoricalDistribution(parameter.grid())
        options = {} if parameter.step is None else {"step": parameter.step}
        cls = distributions.IntDistribution if parameter.is_integer else distributions.FloatDistribution
        return cls(parameter.low, parameter.high, log=parameter.log, **options)

    def _find_id(self, frozen: Any) -> int:
        study = self._storage.get_study_id_from_name(NAME)
        return self._storage.get_trial_id_from_study_id_trial_number(study, frozen.number)

    # Locks: a trial's lock is released when the last process holding the file open, at the latest its run, ends -------

    @contextlib.contextmanager
    def _lock_study(self) -> Iterator[None]:
        lock = FileLock(self._folder / ".locks" / "study")
        lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _lock_trial(self, number: int) -> int | None:
        file = os.open(self._folder / ".locks" / f"trial-{number}", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            lock_file(file)
        except BlockingIOError:
            os.close(file)
            return None
        return file


def _remove_partial_line(journal: Path, lock: FileLock) -> None:
    """Remove the incomplete last line left by a process that was killed while writing."""
    lock.acquire()
    try:
        if journal.exists() and not (content := journal.read_bytes()).endswith(b"\n"):
            os.truncate(journal, content.rfind(b"\n") + 1)
    finally:
        lock.release()
