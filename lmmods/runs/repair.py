"""Reading a run's own files back: unreadable lines are skipped with a warning, the damaged file is kept aside."""

import csv
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmmods.core.files import MAX_TABLE_BYTES, read_text
from lmmods.runs.run_files import copy_file


@dataclass
class Table:
    """Content of metrics.csv: `rows` hold the non-empty cells by column, `damaged` the numbers of skipped lines."""

    columns: list[str] = field(default_factory=lambda: ["step"])
    rows: list[dict[str, str]] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)


def read_table(path: Path) -> Table:
    """Return the readable rows of metrics.csv; an empty table if there is no file."""
    lines, torn = _lines(path)
    if not lines:
        return Table(damaged=torn)
    columns = _cells(lines[0])
    if "step" not in columns or len(set(columns)) != len(columns) or "" in columns:
        return Table(damaged=list(range(1, len(lines) + 1)) + torn)
    table = Table(columns, damaged=torn)
    for number, line in enumerate(lines[1:], 2):
        cells = _cells(line)
        row = {name: cell for name, cell in zip(columns, cells) if cell}
        if len(cells) == len(columns) and re.fullmatch("[0-9]{1,18}", row.get("step", "")) and _are_numbers(row):
            table.rows.append(row)
        else:
            table.damaged.append(number)
    return table


def repair_table(path: Path) -> Table:
    """Like `read_table`, with a warning about unreadable lines and a copy of the damaged file."""
    table = read_table(path)
    _tell(path, table.damaged)
    return table


def repair_samples(path: Path) -> list[dict[str, Any]]:
    """Return the rows of samples.jsonl, with a warning about unreadable lines and a copy of the damaged file."""
    lines, damaged = _lines(path)
    rows = []
    for number, line in enumerate(lines, 1):
        row = _from_json(line)
        if isinstance(row, dict) and type(row.get("step")) is int and all(
                isinstance(row.get(name), str) for name in ("prompt", "output")):
            rows.append(row)
        elif line:
            damaged.append(number)
    _tell(path, sorted(damaged))
    return rows


def repair_numbers(path: Path) -> dict[str, Any]:
    """Return metrics.json; if it is no JSON object, {} with a warning and a copy of the damaged file."""
    if not path.is_file():
        return {}
    content = _from_json(read_text(path, errors="replace"))
    if isinstance(content, dict):
        return content
    _warn(path, "holds no numbers by name any more")
    return {}


def _lines(path: Path) -> tuple[list[str], list[int]]:
    """Return the complete lines of a file, and the number of the last line if it lacks its line end."""
    if not path.is_file():
        return [], []
    *lines, rest = read_text(path, MAX_TABLE_BYTES, errors="replace").split("\n")
    return lines, [len(lines) + 1] if rest else []


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return []


def _are_numbers(row: dict[str, str]) -> bool:
    try:
        return bool([float(cell) for cell in row.values()])
    except ValueError:
        return False


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _tell(path: Path, damaged: list[int]) -> None:
    if damaged:
        which = f"line {damaged[0]}" if len(damaged) == 1 else f"{len(damaged)} lines, the first of them {damaged[0]}"
        _warn(path, f"cannot be read in {which}, left out here")


def _warn(path: Path, what: str) -> None:
    from lmmods.core.console import warn  # `report` reads run folders without the libraries behind it

    kept = path.with_name(f"{path.name}.damaged")
    copy_file(path, kept)
    warn(f"{path} {what}. The file as it was is {kept.name}.")
