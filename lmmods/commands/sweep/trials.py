"""Trials of a sweep on this machine: each is a run of fit in a process and a folder of its own."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmmods.commands.programs import last_error, started
from lmmods.commands.report.reading import read_curves
from lmmods.commands.sweep.space import as_words
from lmmods.commands.sweep.study import Study
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.signals import Interrupted
from lmmods.runs.folder import RunFolder

POLL_SECONDS = 0.2
INTERRUPTED = 130


@dataclass(frozen=True)
class Worker:
    """One process that works on a sweep.

    Args:
        folder: Of the sweep.
        recipe: Arguments of fit that all trials share.
        metric: What fit logs and the study compares, taken as it is at the end of a run.
    """

    study: Study
    folder: Path
    recipe: list[str]
    metric: str

    def work(self, most: int | None) -> None:
        """Run trials until the study has so many, or its whole grid.

        Raises:
            UserError: Runs end without having logged the metric.
            Interrupted: Ctrl+C or SIGTERM; the trial under way has saved what it needs to go on.
        """
        while (asked := self.study.ask(most)) is not None:
            trial, held = asked
            try:
                self._run(trial, held)
            except Interrupted as stop:
                raise Interrupted(f"Interrupted in trial {trial.number}. The same command goes on with it.") from stop
            finally:
                os.close(held)

    def _run(self, trial: Any, held: int) -> None:
        run, log = RunFolder(trial_folder(self.folder, trial.number)), self.folder / "logs" / f"{trial.number}.txt"
        log.parent.mkdir(exist_ok=True)
        words = [*self.recipe, *as_words(trial.params), "--trainer.default_root_dir", str(run.root)]
        say(f"trial {trial.number}{' goes on' if run.holds_run() else ''}: "
            + "  ".join(f"{key} {_shown(value)}" for key, value in trial.params.items()))
        pruned = False
        with started(["fit", *words, "--ckpt_path", "auto"], log, keeps=(held,)) as process:
            while process.poll() is None and not pruned:
                time.sleep(POLL_SECONDS)
                pruned = self.study.judge(trial, self._points(run))
        # However fast it was: whether a trial is pruned depends on what it measured alone.
        if pruned or self.study.judge(trial, self._points(run)):
            self.study.finish(trial, "pruned")
            say(f"trial {trial.number}: stopped early, {self.metric} {_shown(self._points(run)[-1][1])}")
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
                                         f"{self.metric} {_shown(value)}"))
        if status == 0 and value is None:
            raise UserError(f"--metric {self.metric} is none that the runs log ({', '.join(sorted(final))}). Name one "
                            "of these, and another --folder; val/loss wants data.val_source or data.val_size.")

    def _points(self, run: RunFolder) -> list[tuple[int, float]]:
        """What the run has logged of the metric: (optimiser step, value)."""
        return read_curves(run.metrics_csv).get(self.metric, [])


def trial_folder(folder: Path, number: int) -> Path:
    """The run folder of a trial."""
    return folder / f"trial={number}"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
