"""The logger that writes metrics.csv, and support of Lightning's CSVLogger."""

import csv
import io
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lmmods.runs.loggers import VersionedFolder
from lmmods.runs.repair import repair_table
from lmmods.runs.run_files import open_to_append, write_text


class MetricsCSV(Logger):
    """One row per logged step, written as soon as it is logged.

    Lightning's CSVLogger deletes the file of a resumed run; this one continues it from the checkpoint's step.

    Args:
        path: The file; created with the first row.
    """

    name = "csv"
    version = ""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self._rows: list[dict[str, str]] = []
        self._columns = ["step"]

    def rewind(self, step: int) -> None:
        """Read the file and drop the rows after `step`, which the resumed run will log again."""
        if self.path.exists():
            table = repair_table(self.path)
            self._columns = table.columns
            self._rows = [row for row in table.rows if int(row["step"]) <= step]
            self._rewrite()

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {"step": str(step), **{name: repr(float(value)) for name, value in metrics.items()}}
        new_columns = [name for name in row if name not in self._columns]
        self._columns += new_columns
        is_same_step = bool(self._rows) and self._rows[-1]["step"] == row["step"]
        if is_same_step:
            self._rows[-1] |= row
        else:
            self._rows.append(row)
        if is_same_step or new_columns or not self.path.exists():
            self._rewrite()
        else:
            with open_to_append(self.path) as file:
                self._writer(file).writerow(row)

    def _writer(self, file: TextIO) -> csv.DictWriter:
        return csv.DictWriter(file, self._columns, lineterminator="\n")

    def _rewrite(self) -> None:
        text = io.StringIO()
        writer = self._writer(text)
        writer.writeheader()
        writer.writerows(self._rows)
        write_text(self.path, text.getvalue())

    def log_hyperparams(self, params: object, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the recipe is in config.yaml."""


SUPPORT = VersionedFolder("metrics.csv", "hparams.yaml")  # of Lightning's logger
