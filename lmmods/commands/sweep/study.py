"""The memory of a sweep on this machine: an Optuna study in a journal, which several processes may share.

What is tried next depends on the seed, the number of the trial and what the others have measured, and on nothing that
ends with a process: a sweep that is killed and started again tries the same.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmmods.commands.sweep.space import Parameter, grid
from lmmods.core.errors import UserError
from lmmods.runs.lock import lock_file

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
