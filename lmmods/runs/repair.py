"""Reading a run's own files. Unreadable lines are skipped with a warning, and the damaged file is copied."""

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
    """Content of metrics.csv: `rows` have the non-empty cells by column, `damaged` the numbers of skipped lines."""

    columns: list[str] = field(default_factory=lambda: ["step"])
    rows: list[dict[str, str]] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)


def read_table(path: Path) -> Table:
    """Return the readable rows of metrics.csv; an empty table if there is no file."""
    lines, damaged = _read_lines(path)
    if not lines:
        return Table(damaged=damaged)
    columns = _split_cells(lines[0])
    if "step" not in columns or len(set(columns)) != len(columns) or "" in columns:
        return Table(damaged=list(range(1, len(lines) + 1)) + damaged)
    table = Table(columns, damaged=damaged)
    for line_number, line in enumerate(lines[1:], 2):
        cells = _split_cells(line)
        row = {name: cell for name, cell in zip(columns, cells) if cell}
        if len(cells) == len(columns) and re.fullmatch("[0-9]{1,18}", row.get("step", "")) and _are_numbers(row):
            table.rows.append(row)
        else:
            table.damaged.append(line_number)
    return table


def repair_table(path: Path) -> Table:
    """Like `read_table`, with a warning about unreadable lines and a copy of the damaged file."""
    table = read_table(path)
    _warn_about_lines(path, table.damaged)
    return table


def repair_samples(path: Path) -> list[dict[str, Any]]:
    """Return the rows of samples.jsonl, with a warning about unreadable lines and a copy of the damaged file."""
    lines, damaged = _read_lines(path)
    rows = []
    for line_number, line in enumerate(lines, 1):
        row = _parse_json(line)
        if isinstance(row, dict) and type(row.get("step")) is int and all(
                isinstance(row.get(name), str) for name in ("prompt", "output")):
            rows.append(row)
        elif line:
            damaged.append(line_number)
    _warn_about_lines(path, sorted(damaged))
    return rows


def repair_numbers(path: Path) -> dict[str, Any]:
    """Return metrics.json; if it is not a JSON object, {} with a warning and a copy of the damaged file."""
    if not path.is_file():
        return {}
    content = _parse_json(read_text(path, errors="replace"))
    if isinstance(content, dict):
        return content
    _warn(path, "is not a JSON object and is ignored")
    return {}


def _read_lines(path: Path) -> tuple[list[str], list[int]]:
    """Return the complete lines of a file, and the number of the last line if it is incomplete."""
    if not path.is_file():
        return [], []
    *lines, unfinished = read_text(path, MAX_TABLE_BYTES, errors="replace").split("\n")
    return lines, [len(lines) + 1] if unfinished else []


def _split_cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return []


def _are_numbers(row: dict[str, str]) -> bool:
    try:
        return bool([float(cell) for cell in row.values()])
    except ValueError:
        return False


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _warn_about_lines(path: Path, damaged: list[int]) -> None:
    if damaged:
        lines = f"line {damaged[0]} is" if len(damaged) == 1 else f"{len(damaged)} lines from line {damaged[0]} on are"
        _warn(path, f"is damaged: {lines} skipped")


def _warn(path: Path, problem: str) -> None:
    from lmmods.core.console import warn  # imported late, as `report` reads run folders without its libraries

    copy = path.with_name(f"{path.name}.damaged")
    copy_file(path, copy)
    warn(f"{path} {problem}. The damaged file is kept as {copy.name}.")
