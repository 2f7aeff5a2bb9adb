"""Read run folders of either engine, finished or running, as plain values. Imports neither torch nor jax."""

import csv
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from lmmods.core.errors import UserError
from lmmods.core.redaction import redacted
from lmmods.runs.folder import RunFolder, checkpoint_position
from lmmods.runs.run_files import STEP_FILE

ROLLOUTS = 2  # number of rollouts read of each run, the last ones


@dataclass
class Run:
    """Content of a run folder.

    Args:
        label: Shortest end of its path that is unique among the runs.
        recipe: Content of config.yaml.
        curves: Metric -> (optimiser step, value) of every logged step, non-finite values included.
        final: Content of metrics.json, completed with the last logged values.
        data: Content of data_report.json.
        samples: Rows of samples.jsonl.
        step: Last known optimiser step.
        is_completed: True if training has finished.
        written: Modification time of the newest of these files.
        classes: Content of classes.json.
        rollouts: Optimiser step and answers of the last rollouts, the newest first.
    """

    label: str
    recipe: dict[str, Any]
    curves: dict[str, list[tuple[int, float]]]
    final: dict[str, Any]
    data: dict[str, Any]
    samples: list[dict[str, Any]]
    step: int
    is_completed: bool
    written: datetime
    classes: dict[str, Any] = field(default_factory=dict)
    rollouts: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    not_finite: dict[str, list[int]] = field(init=False)  # metric -> steps

    def __post_init__(self) -> None:
        steps_of = {name: [step for step, value in points if not math.isfinite(value)]
                    for name, points in self.curves.items()}
        self.not_finite = {name: steps for name, steps in steps_of.items() if steps}

    @property
    def engine(self) -> str:
        return str(self.recipe.get("engine", "unknown"))

    @property
    def task(self) -> str:
        return str(_get_block(self.recipe, "model").get("class_path", "unknown")).rsplit(".", 1)[-1]

    @property
    def base(self) -> str:
        return str(_get_block(self.recipe, "model", "init_args").get("pretrained") or "from scratch")

    @property
    def state(self) -> str:
        if self.is_completed:
            return "completed"
        total = _get_block(self.recipe, "trainer").get("max_steps")
        has_total = isinstance(total, int) and total > 0
        return f"step {self.step:,}" + (f" of {total:,}" if has_total else "")


def read_runs(folders: list[str]) -> list[Run]:
    """Read the runs in `folders`, in that order.

    Raises:
        UserError: A folder is missing, is not a run folder or is listed twice, or a file cannot be read.
    """
    folder_of: dict[Path, str] = {}
    for folder in folders:
        path = Path(folder)
        if not path.is_dir():
            raise UserError(f"report: {folder} does not exist. Check the path." if not path.exists() else
                            f"report: {folder} is a file. Use the run folder.")
        if not RunFolder(path).has_run():
            raise UserError(f"report: {folder} is not a run folder: it has no config.yaml, metrics.csv or checkpoints. "
                            "Check the path.")
        if path.resolve() in folder_of:
            raise UserError(f"report: {folder_of[path.resolve()]} and {folder} are the same folder. List each run "
                            "once.")
        folder_of[path.resolve()] = folder
    labels = make_labels(list(folder_of))
    return [_read(RunFolder(folder), label) for folder, label in zip(folders, labels, strict=True)]


def make_labels(paths: list[Path]) -> list[str]:
    """Return the shortest unique ends of different absolute paths."""
    labels = []
    for path in paths:
        parts = path.parts
        ends = ([other.parts[-size:] for other in paths] for size in range(1, len(parts) + 1))
        num_parts = next(size for size, end in enumerate(ends, 1) if end.count(parts[-size:]) == 1)
        labels.append("/".join(parts[-num_parts:]))
    return labels


def _read(folder: RunFolder, label: str) -> Run:
    curves = read_curves(folder.metrics_csv)
    last = {name: points[-1][1] for name, points in curves.items()}
    logged = max((points[-1][0] for points in curves.values()), default=0)
    saved = max((checkpoint_position(name)[0] for name in folder.names()), default=0)
    files = (folder.config, folder.metrics_csv, folder.metrics_json, folder.data_report)
    times = [file.stat().st_mtime for file in files if file.is_file()] or [folder.root.stat().st_mtime]
    return Run(label=label, recipe=redacted(_read_mapping(folder.config)), curves=curves,
               final={**last, **_read_mapping(folder.metrics_json)}, data=redacted(_read_mapping(folder.data_report)),
               samples=read_samples(folder.samples), step=max(logged, saved), is_completed=folder.completed.exists(),
               written=datetime.fromtimestamp(max(times)).astimezone(), classes=_read_mapping(folder.classes),
               rollouts=read_rollouts(folder.rollouts))


def read_curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Read metrics.csv by column, without an incomplete last line that is still being written.

    Raises:
        UserError: The file is not such a table.
    """
    lines = _complete_lines(path)
    if not lines:
        return {}
    curves: dict[str, list[tuple[int, float]]] = {}
    try:
        reader = csv.DictReader(lines, strict=True)
        if "step" not in (reader.fieldnames or []):
            raise UserError(f"{path} has no column step, so it is not a run's metrics.csv.")
        for row in reader:
            if None in row:
                raise UserError(f"{path}, line {reader.line_num}: more values than columns.")
            step = int(row.pop("step"))
            for name, value in row.items():
                if value:
                    curves.setdefault(name, []).append((step, float(value)))
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}. Fix or remove that line.") from error
    return curves


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Read the rows of samples.jsonl, without an incomplete last line that is still being written.

    Raises:
        UserError: A line is not an object with `step` and `prompt`.
    """
    return _read_rows(path, lambda row: isinstance(row.get("step"), int) and "prompt" in row, "step and prompt")


def read_rollouts(folder: Path) -> list[tuple[int, list[dict[str, Any]]]]:
    """Read the answers of the last `ROLLOUTS` rollouts with any, the newest first.

    Raises:
        UserError: A line is not an object with `prompt`, `asked` and `answer`.
    """
    steps = sorted((int(match[1]) for path in folder.glob("step=*.jsonl") if (match := STEP_FILE.fullmatch(path.name))),
                   reverse=True)
    keys = {"prompt", "asked", "answer"}
    rollouts = ((step, _read_rows(folder / f"step={step}.jsonl", keys.issubset, "prompt, asked and answer"))
                for step in steps)
    return list(itertools.islice(((step, rows) for step, rows in rollouts if rows), ROLLOUTS))


def _read_rows(path: Path, is_row: Callable[[dict[str, Any]], bool], keys: str) -> list[dict[str, Any]]:
    """Read an object from each complete line. Raises UserError: `is_row` is False for one, which lacks `keys`."""
    rows = []
    for line_number, line in enumerate(_complete_lines(path), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {line_number}: {error}. Fix or remove that line.") from error
        if not (isinstance(row, dict) and is_row(row)):
            raise UserError(f"{path}, line {line_number}: not an object with {keys}. Fix or remove that line.")
        rows.append(row)
    return rows


def _complete_lines(path: Path) -> list[str]:
    return _read_text(path).split("\n")[:-1]  # text after the last line break is an incomplete line, or empty


def _read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file; {} if it does not exist."""
    text = _read_text(path)
    try:
        content = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text or "{}")
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}.") from error
    if content is not None and not isinstance(content, dict):
        raise UserError(f"{path} should contain keys and values, but is a {type(content).__name__}.")
    return content or {}


def _read_text(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise UserError(f"{path} cannot be read: it is not a regular file.")
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error


def _get_block(recipe: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return the mapping under `keys`, or {} if a recipe has none."""
    for key in keys:
        recipe = recipe.get(key) if isinstance(recipe.get(key), dict) else {}
    return recipe
