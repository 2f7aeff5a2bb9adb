"""The start of a training run in its folder. It follows the loading of data, model and checkpoint: a failed start
leaves no trace."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmmods.core.console import say
from lmmods.runs.csv_logger import Logger
from lmmods.runs.folder import RunFolder
from lmmods.runs.identity import RunIdentity
from lmmods.runs.wandb import log_recipe


@dataclass(frozen=True)
class RunStart:
    """What is written and said of a run before its first step, or where it goes on from a checkpoint."""

    folder: RunFolder
    identity: RunIdentity
    recipe: dict[str, Any]
    report: dict[str, Any]
    resumed_from: Path | None
    step: int

    def make_folder_ready(self) -> None:
        """Called by the first process; the others wait for it."""
        self.folder.begin(self.resumed_from)
        self.folder.write_start(self.recipe, self.report)
        if self.resumed_from:
            self.identity.note_resume(self.folder, self.resumed_from, self.step)

    def begin_logging(self, loggers: list[Logger]) -> None:
        """Bring the loggers of this process, if any, to where the run stands; the first is metrics.csv's."""
        if self.resumed_from and loggers:
            loggers[0].rewind(self.step)
        log_recipe(loggers[1:], self.recipe, self.report)

    def say_resumed(self) -> None:
        if self.resumed_from:
            say(f"Resumed at step {self.step} from {self.resumed_from}.")


def say_precision(precision: str, reason: str) -> None:
    """What `trainer.precision: auto` means on this machine, and why."""
    say(f"precision {precision}: {reason}. Another one is set with trainer.precision.")
