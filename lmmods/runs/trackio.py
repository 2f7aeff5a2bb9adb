"""Trackio: the logger, and the name under which it keeps a run. On this machine unless a Space is named."""

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
    """Logs the numbers of metrics.csv, and recipe and data report as the configuration.

    Args:
        project: Trackio's project; runs of one project are shown together.
        run_name: Name of the run in it; by default that of the run folder.
        space_id: Hugging Face Space to log to, `user/name`; null keeps the run on this machine.
        goes_on: Continue the latest run of this name. The program sets it, whatever the recipe says.
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
        """Trackio's run. Raises UserError: trackio is missing, or refuses the project or the Space."""
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
                raise UserError(f"trainer.logger: trackio does not begin a run: {error}") from error
        return self._run

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Take what the run is configured by; it is sent when the run begins."""
        self._config |= json.loads(json.dumps(dict(params), default=str))

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.experiment.log({name: float(value) for name, value in metrics.items()}, step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._run is not None:
            import trackio

            with redirect_stdout(sys.stderr):
                trackio.finish()  # not the run's own method, after which trackio would end it again at exit
            self._run = None


class TrackioSupport(LoggerSupport):
    """A resumed run continues Trackio's latest run of its name."""

    def configure(self, options: dict[str, Any], root: Path, goes_on: bool) -> None:
        """Set the run's name, and whether to continue it. Names are redacted."""
        options["project"] = redacted(options["project"])
        options["run_name"] = redacted(options.get("run_name") or root.name)
        options["goes_on"] = goes_on
        if options.get("space_id") is None:
            say(f"Trackio: the run is kept on this machine. Show it with: trackio show --project {options['project']}")


SUPPORT = TrackioSupport()
