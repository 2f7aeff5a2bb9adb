"""metrics.csv of the run folder, and checkpoints as artifacts of W&B."""

import csv
import io
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lmmods.core.redaction import redact
from lmmods.runs.folder import write_text
from lmmods.runs.repair import mended_table


class MetricsCSV(Logger):
    """One row a logged step, on disk as soon as it is logged.

    Lightning's CSVLogger deletes the file of the run that it continues; this one goes on where the checkpoint stands.

    Args:
        path: The file; made with the first row.
    """

    name = "csv"
    version = ""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self._rows: list[dict[str, str]] = []
        self._columns = ["step"]

    def rewind(self, step: int) -> None:
        """Read the file back and drop the rows after `step`, which the resumed run will log again."""
        if self.path.exists():
            table = mended_table(self.path)
            self._columns = table.columns
            self._rows = [row for row in table.rows if int(row["step"]) <= step]
            self._rewrite()

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {"step": str(step), **{name: repr(float(value)) for name, value in metrics.items()}}
        new_columns = [name for name in row if name not in self._columns]
        self._columns += new_columns
        same_step = bool(self._rows) and self._rows[-1]["step"] == row["step"]
        if same_step:
            self._rows[-1] |= row
        else:
            self._rows.append(row)
        if same_step or new_columns or not self.path.exists():
            self._rewrite()
        else:
            with open(self.path, "a", newline="", encoding="utf-8") as file:
                self._writer(file).writerow(row)

    def _writer(self, file: TextIO) -> csv.DictWriter:
        return csv.DictWriter(file, self._columns, lineterminator="\n")

    def _rewrite(self) -> None:
        text = io.StringIO()
        writer = self._writer(text)
        writer.writeheader()
        writer.writerows(self._rows)
        write_text(self.path, text.getvalue())

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The recipe is in config.yaml."""


def log_recipe(loggers: Iterable[Logger], recipe: dict[str, Any], report: dict[str, Any]) -> None:
    """Tell what a run is made of: recipe and data report."""
    with hidden_arguments():
        for logger in loggers:
            logger.log_hyperparams({"recipe": recipe, "data_report": report})


@contextmanager
def hidden_arguments() -> Iterator[None]:
    """While a logger opens its run: W&B keeps the command line, whose passwords and tokens it is not to see."""
    arguments, sys.argv = sys.argv, [redact(argument) for argument in sys.argv]
    try:
        yield
    finally:
        sys.argv = arguments


def log_checkpoint(loggers: Iterable[Logger], checkpoint: Path | None, ends: bool = False) -> None:
    """Keep a checkpoint as an artifact where a WandbLogger asks for it: `log_model: all`, or true for the last.

    Args:
        checkpoint: Its folder, complete; None where the run writes none.
        ends: Whether the run is finished.
    """
    for logger in loggers:
        wanted = getattr(logger, "_log_model", False)
        if checkpoint is not None and (wanted == "all" and not ends or wanted is True and ends):
            import wandb

            artifact = wandb.Artifact(f"model-{logger.experiment.id}", type="model",
                                      metadata={"checkpoint": checkpoint.name})
            artifact.add_dir(str(checkpoint))
            logger.experiment.log_artifact(artifact, aliases=["latest", checkpoint.name.replace("=", "-")])
