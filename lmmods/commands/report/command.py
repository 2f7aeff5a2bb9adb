"""`report`: one HTML page over runs."""

from datetime import datetime
from pathlib import Path

from lmmods.commands.report.page import GENERATOR, render
from lmmods.commands.report.reading import read_runs
from lmmods.core.errors import UserError
from lmmods.runs.folder import write_text


def report(runs: list[str], out: str = "report.html", overwrite: bool = False) -> None:
    """Write one self-contained HTML page with the curves and tables of runs.

    Args:
        runs: Run folders, finished or running, of either engine.
        out: File to write; an older report there is replaced.
        overwrite: Replace also a file that is not a report.
    """
    path = Path(out)
    page = render(read_runs(runs), datetime.now().astimezone())
    try:
        _check_replaceable(path, overwrite)
        write_text(path, page)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}). Choose another file.") from error
    print(f"Wrote {out} ({len(page.encode()) / 1024:,.0f} KiB, {len(runs)} run{'s' if len(runs) > 1 else ''}).")


def _check_replaceable(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        raise UserError(f"--out {path} is a folder. Name the file to write.")
    if path.exists() and not overwrite:
        with open(path, "rb") as file:
            head = file.read(1024)
        if f'content="{GENERATOR}"'.encode() not in head:
            raise UserError(f"--out {path} is there and is no report. Choose another file, or add --overwrite true.")
