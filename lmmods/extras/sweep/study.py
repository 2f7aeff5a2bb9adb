"""The memory of a sweep on this machine: an Optuna study in a journal, which several processes may share.

What is tried next depends on the seed, the number of the trial and what the others have measured, and on nothing that
ends with a process: a sweep that is killed and started again tries the same.
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
from lmmods.core.recipes import RecipeLoader, guarded, read_recipe
from lmmods.runs.lock import lock_file

# ---------------------------------------------------------------------------------------------------------------------
# The search space of a sweep: which keys vary, and over what.

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})((?:,(?:log|step={NUMBER}))*)")
FORMS = ("KEY=LOW..HIGH, with ,log or ,step=S behind it, or KEY=A,B,C; for example model.optimizer.lr=1e-4..1e-2,log "
         "or data.batch_size=4,8")
MOST = 10_000  # combinations of a grid
Scalar = str | int | float


@dataclass(frozen=True)
class Parameter:
    """A key that varies.

    Args:
        key: As on the command line, for example model.optimizer.lr.
        values: What it may be, each as the command line takes it; empty where it is a range.
        low: Least value of a range, a whole number where all values are.
        step: Distance of the values of a range; None where it has none.
        log: Whether a range is drawn from evenly by the logarithm.
    """

    key: str
    values: tuple[Scalar, ...] = ()
    low: float = 0
    high: float = 0
    step: float | None = None
    log: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether a range holds whole numbers alone."""
        return all(isinstance(each, int) for each in (self.low, self.high, 1 if self.step is None else self.step))

    def extremes(self) -> tuple[Scalar, ...]:
        """The values by which a recipe is checked."""
        return self.values or (self.low, self.high)

    def grid(self) -> tuple[Scalar, ...]:
        """All values. Raises UserError: a range has no step."""
        if self.values:
            return self.values
        step = self.step or (1 if self.is_whole and not self.log else None)
        if step is None:
            raise UserError(f"{self.key} is a range without step, of which no grid can be made: give its values "
                            f"({self.key}=A,B,C) or a step ({self.key}=LOW..HIGH,step=S).")
        count = math.floor((self.high - self.low) / step * (1 + 1e-9)) + 1
        return tuple(self.low + number * step if self.is_whole else float(f"{self.low + number * step:.12g}")
                     for number in range(min(count, MOST + 1)))


def read_space(texts: list[str], file: str | None) -> list[Parameter]:
    """The parameters that a command line and a YAML file name.

    Args:
        texts: Each of the form that `FORMS` says.
        file: Of keys to a list of values, or to a mapping {low, high, log, step}.

    Raises:
        UserError: One has another form, a key stands twice, or there is none.
    """
    found = [_from_text(text) for text in texts]
    found += [_from_file(key, value, file) for key, value in (read_recipe(file) if file else {}).items()]
    if not found:
        raise UserError(f"sweep: nothing varies. Name what does as {FORMS}.")
    for one, other in itertools.combinations(found, 2):
        if one.key == other.key:
            raise UserError(f"sweep: {one.key} is given twice; keep one.")
    return found


def grid(space: list[Parameter]) -> list[dict[str, Scalar]]:
    """Every combination, the last parameter changing first. Raises UserError: a range has no step, or too many."""
    values = [parameter.grid() for parameter in space]
    if math.prod(map(len, values)) > MOST:
        raise UserError(f"The grid has more than {MOST:,} combinations. Give fewer values, or take --sampler tpe.")
    return [dict(zip((parameter.key for parameter in space), each, strict=True)) for each in itertools.product(*values)]


def as_words(values: dict[str, Scalar]) -> list[str]:
    """The options that set keys to these values, as W&B's agents write them too."""
    return [f"--{key}={value}" for key, value in values.items()]


def _from_text(text: str) -> Parameter:
    key, equals, spec = text.partition("=")
    if not (equals and spec and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key)):
        raise UserError(f"sweep: {text} names no parameter. Write {FORMS}.")
    if match := RANGE.fullmatch(spec):
        words = [word.partition("=") for word in match[3].split(",") if word]
        options = {name: _number(value) if value else True for name, _, value in words}
        return _range(key, _number(match[1]), _number(match[2]), **options)
    if re.fullmatch(r".*[\d.]\.\.[\d.].*", spec):
        raise UserError(f"sweep: {text} is no range. Write {FORMS}.")
    return Parameter(key, _texts(key, _load(f"[{spec}]", text)))


def _from_file(key: str, value: Any, file: str | None) -> Parameter:
    if isinstance(value, list) and value:
        return Parameter(key, _texts(key, value))
    numbers = isinstance(value, dict) and all(
        isinstance(each, bool) if name == "log" else isinstance(each, int | float) and not isinstance(each, bool)
        for name, each in value.items())
    if not numbers or not {"low", "high"} <= value.keys() <= {"low", "high", "log", "step"}:
        raise UserError(f"{file}: {key} must be a list of values, or a mapping of low, high and, if wanted, "
                        "log: true or step.")
    return _range(key, **value)


def _range(key: str, low: float, high: float, log: bool = False, step: float | None = None) -> Parameter:
    if not -math.inf < low < high < math.inf:
        raise UserError(f"sweep: {key} goes from {low:g} to {high:g}: the first must be the smaller one.")
    if log and low <= 0 or log and step is not None:
        raise UserError(f"sweep: {key} has log, which is for ranges above 0 without step.")
    if step is not None and not 0 < step <= high - low:
        raise UserError(f"sweep: {key} has a step of {step:g}, but must have one above 0 and within its range.")
    return Parameter(key, (), low, high, step, log)


def _number(text: str) -> float:
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)


def _load(values: str, text: str) -> list[Any]:
    try:
        return guarded(lambda checked: yaml.load(checked, Loader=RecipeLoader))(values)
    except yaml.YAMLError as error:
        raise UserError(f"sweep: {text} cannot be read as values. Write {FORMS}.") from error


def _texts(key: str, values: list[Any]) -> tuple[Scalar, ...]:
    """Values as the command line takes them: numbers and words as they are, others as JSON."""
    # To YAML 1.1, 1e-3 is a text.
    values = [float(value) if isinstance(value, str) and re.fullmatch(NUMBER, value) and "e" in value.lower() else value
              for value in values]
    texts = tuple(value if isinstance(value, str | int | float) and not isinstance(value, bool) else json.dumps(value)
                  for value in values)
    if len(set(map(str, texts))) < len(texts):
        raise UserError(f"sweep: {key} has a value twice; keep one.")
    return texts


NAME = "sweep"


class FileLock:
    """A lock on a file, of the kind that Optuna's journal takes: it ends with its process, be that killed."""

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
    """Trials, each held by one process at a time.

    Args:
        folder: Of the sweep.
        mode: `min` or `max` of the metric.

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
        self._distributions = {parameter.key: self._distribution(parameter) for parameter in space}
        pruners = {"median": optuna.pruners.MedianPruner, "none": optuna.pruners.NopPruner}
        (folder / ".locks").mkdir(parents=True, exist_ok=True)
        journal, lock = folder / "study.journal", FileLock(folder / ".locks" / "journal")
        with self._locked():
            _cut_half_line(journal, lock)
            self._storage = optuna.storages.JournalStorage(
                optuna.storages.journal.JournalFileBackend(str(journal), lock_obj=lock))
            self._study = optuna.create_study(study_name=NAME, storage=self._storage, pruner=pruners[pruner](),
                                              direction=f"{mode}imize", load_if_exists=True)
            if sampler == "grid" and not self._study.get_trials(deepcopy=False):
                for values in grid(space):
                    self._study.enqueue_trial(values)

    def ask(self, most: int | None) -> tuple[Any, int] | None:
        """A trial for this process: one whose process has died, or else a new one.

        Args:
            most: Trials of the study; None is as many as a grid has.

        Returns:
            Optuna's trial and an open file by whose lock it is held; None where nothing is left to do.
        """
        states = self._optuna.trial.TrialState
        with self._locked():
            trials = self._study.get_trials(deepcopy=False)
            for frozen in trials:
                if frozen.state is states.RUNNING and (held := self._hold(frozen.number)) is not None:
                    return self._optuna.trial.Trial(self._study, self._id_of(frozen)), held
            waiting = sum(frozen.state is states.WAITING for frozen in trials)
            if self._sampler == "grid" and not waiting or most is not None and len(trials) - waiting >= most:
                return None
            self._study.sampler = self._new_sampler(len(trials) - waiting)
            trial = self._study.ask(self._distributions)
            return trial, self._hold(trial.number)

    def judge(self, trial: Any, points: list[tuple[int, float]]) -> bool:
        """Note what a trial has measured, (optimiser step, value), and say whether it is to be stopped."""
        known = self._study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for step, value in points:
            if step not in known and value == value:
                trial.report(value, step)
                if trial.should_prune():
                    return True
        return False

    def finish(self, trial: Any, state: str, value: float | None = None, problem: str = "") -> None:
        """End a trial as `complete`, `pruned` or `fail`."""
        if problem:
            trial.set_user_attr("problem", problem)
        self._study.tell(trial, value, getattr(self._optuna.trial.TrialState, state.upper()))

    def trials(self) -> list[Any]:
        """All that have begun, in their order: Optuna's frozen trials."""
        return [frozen for frozen in self._study.get_trials(deepcopy=False)
                if frozen.state is not self._optuna.trial.TrialState.WAITING]

    def _new_sampler(self, number: int) -> Any:
        seed = (self._seed * 1_000_003 + number) % 2**32
        samplers = self._optuna.samplers
        return samplers.TPESampler(seed=seed) if self._sampler == "tpe" else samplers.RandomSampler(seed=seed)

    def _distribution(self, parameter: Parameter) -> Any:
        kinds = self._optuna.distributions
        if parameter.values or self._sampler == "grid":
            return kinds.CategoricalDistribution(parameter.grid())
        options = {} if parameter.step is None else {"step": parameter.step}
        kind = kinds.IntDistribution if parameter.is_whole else kinds.FloatDistribution
        return kind(parameter.low, parameter.high, log=parameter.log, **options)

    def _id_of(self, frozen: Any) -> int:
        study = self._storage.get_study_id_from_name(NAME)
        return self._storage.get_trial_id_from_study_id_trial_number(study, frozen.number)

    # Locks: that of a trial ends with the last process that has the file open, so with the run at the latest ----------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self._folder / ".locks" / "study")
        lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _hold(self, number: int) -> int | None:
        file = os.open(self._folder / ".locks" / f"trial-{number}", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            lock_file(file)
        except BlockingIOError:
            os.close(file)
            return None
        return file


def _cut_half_line(journal: Path, lock: FileLock) -> None:
    """Remove what a process that was killed while it wrote has left at the end."""
    lock.acquire()
    try:
        if journal.exists() and not (content := journal.read_bytes()).endswith(b"\n"):
            os.truncate(journal, content.rfind(b"\n") + 1)
    finally:
        lock.release()
