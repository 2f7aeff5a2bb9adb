"""Trackio: its logger and its support. Runs stay on this machine unless the recipe names a Space."""

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.redaction import redacted
from lmmods.runs.loggers import LoggerSupport


class TrackioLogger(Logger):
    """Logger of the metrics in metrics.csv, with recipe and data report as the configuration.

    Args:
        project: Trackio project; runs of one project are shown together.
        run_name: Name of the run. Default: the name of the run folder.
        space_id: Hugging Face Space to log to, `user/name`; null keeps the run on this machine.
        goes_on: Continue the latest run of this name. The program overwrites the recipe's value.
    """

    def __init__(self, project: str = "lmmods", run_name: str | None = None, space_id: str | None = None,
                 goes_on: bool = False):
        super().__init__()
        self._project, self._run_name, self._space_id, self._goes_on = project, run_name, space_id, goes_on
        self._config: dict[str, Any] = {}
        self._run: Any = None

    @property
    def name(self) -> str:
        """Trackio's project."""
        return self._project

    @property
    def version(self) -> str | None:
        """Name of the run."""
        return self._run_name

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Trackio's run. Raises UserError: trackio is missing, or rejects the project or the Space."""
        if self._run is None:
            try:
                import trackio
            except ImportError as error:
                raise UserError(f"trainer.logger: TrackioLogger needs trackio ({error}). Install it: pip install -e "
                                "'.[trackio]'") from error
            try:
                with redirect_stdout(sys.stderr):
                    self._run = trackio.init(self._project, self._run_name, space_id=self._space_id,
                                             config=self._config, resume="allow" if self._goes_on else "never",
                                             embed=False, auto_log_gpu=False, auto_log_cpu=False)
            except (ValueError, OSError) as error:
                raise UserError(f"trainer.logger: trackio cannot start a run ({error}). Fix its options, or remove "
                                "TrackioLogger.") from error
        return self._run

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Store the configuration, which is sent when the run starts."""
        self._config |= json.loads(json.dumps(dict(params), default=str))

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.experiment.log({name: float(value) for name, value in metrics.items()}, step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._run is not None:
            import trackio

            with redirect_stdout(sys.stderr):
                trackio.finish()  # after the run's own method, trackio would finish it again at exit
            self._run = None


class TrackioSupport(LoggerSupport):
    """Trackio continues its latest run of a name when a run resumes."""

    def configure(self, options: dict[str, Any], root: Path, goes_on: bool) -> None:
        """Set the run's name, and whether to continue it. Names are redacted."""
        options["project"] = redacted(options["project"])
        options["run_name"] = redacted(options.get("run_name") or root.name)
        options["goes_on"] = goes_on
        if options.get("space_id") is None:
            say(f"Trackio: the run is kept on this machine. Show it with: trackio show --project {options['project']}")


SUPPORT = TrackioSupport()
