"""Tables that compare runs: metrics, settings, data, samples, rollouts and MMLU."""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmmods.extras.report.numbers import format_percent, format_value
from lmmods.extras.report.reading import Run
from lmmods.recipe.trainer_fields import TrainerFields

LOWER_IS_BETTER = ("loss", "perplexity", "mse", "calibration_error")
HIGHER_IS_BETTER = ("accuracy", "exact_match", "f1", "f1_macro", "f1_micro", "precision", "precision_macro", "recall",
                    "recall_macro", "matthews", "roc_auc", "pearson", "spearman", "tokens_per_second", "mfu", "reward")
ABSENT = "–"
NAMES_THE_RUN = re.compile(r"trainer\.(default_root_dir|logger(\.\d+)?\.init_args\.(id|name|save_dir|version))")


@dataclass
class Cell:
    """Table cell; `note` is printed small below the text."""

    text: str
    is_best: bool = False
    note: str = ""


@dataclass
class Row:
    """Table row: a name and one cell per run."""

    name: str
    cells: list[Cell]


def build_metrics_table(runs: Sequence[Run]) -> list[Row]:
    """Return the final metrics, with the best marked if runs of one task differ. MMLU subjects are in the bars."""
    names = dict.fromkeys(name for run in runs for name in run.final if not _is_subject(name))
    return [_metric_row(name, runs) for name in names]


def build_settings_tables(runs: Sequence[Run]) -> tuple[list[Row], list[Row]]:
    """Return the settings that differ between the runs, and those shared by all (one cell each).

    Omits paths and names of runs. A trainer key missing from a recipe has its default, as each engine writes only its
    own keys.
    """
    flat = [flatten(run.recipe) for run in runs]
    differing, same = [], []
    for name in dict.fromkeys(name for settings in flat for name in settings if not NAMES_THE_RUN.fullmatch(name)):
        texts = [settings.get(name, DEFAULTS.get(name, ABSENT)) for settings in flat]
        if len(set(texts)) > 1:
            differing.append(Row(name, [Cell(text) for text in texts]))
        else:
            same.append(Row(name, [Cell(texts[0])]))
    return differing, same


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Flatten to dotted key -> text. A list of plain values is one text; other lists are indexed from 0."""
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value:
        parts = (flatten(item, f"{prefix}.{key}" if prefix else str(key)) for key, item in value.items())
        return {name: text for part in parts for name, text in part.items()}
    return {prefix: _as_yaml(value)} if prefix else {}


def build_split_rows(runs: Sequence[Run]) -> list[Row]:
    """Return rows, tokens, lengths and padding of each split."""
    splits = [_as_dict(run.data.get("splits")) for run in runs]
    rows = []
    for split in dict.fromkeys(name for parts in splits for name in parts):
        flat = [_split_cells(_as_dict(parts.get(split))) for parts in splits]
        for measure in dict.fromkeys(name for cells in flat for name in cells):
            rows.append(Row(f"{split} · {measure}", [Cell(cells.get(measure, ABSENT)) for cells in flat]))
    return rows


def build_source_rows(runs: Sequence[Run]
                      ) -> tuple[list[tuple[str, bool]], list[tuple[int, str, list[str], list[str]]]]:
    """Return the columns (name, is numeric), and for each source of each run (run, path, cells, remarks)."""
    sources = [(index, path, _as_dict(source)) for index, run in enumerate(runs)
               for path, source in _as_dict(run.data.get("sources")).items()]
    columns = list(dict.fromkeys(key for _, _, source in sources for key, value in source.items()
                                 if not isinstance(value, dict | list)))
    return [(column.replace("_", " "), not any(isinstance(source.get(column), str) for _, _, source in sources))
            for column in columns], [
        (index, str(path),
         [_format_source_cell(column, source[column]) if column in source else ABSENT for column in columns],
         _list_remarks(source)) for index, path, source in sources]


@dataclass
class Answer:
    """Answers of one run to a prompt, newest first; `base` is the answer before training."""

    run: int
    step: int
    output: str
    base: str | None
    older: list[tuple[int, str]]


def group_samples(runs: Sequence[Run]) -> list[tuple[str, str | None, list[Answer]]]:
    """Return for each prompt: the prompt, the base model's answer if it is the same for all runs, the runs' answers."""
    prompts: dict[str, list[Answer]] = {}
    for index, run in enumerate(runs):
        by_prompt: dict[str, list[dict[str, Any]]] = {}
        for row in run.samples:
            by_prompt.setdefault(_as_yaml(row["prompt"]), []).append(row)
        for prompt, rows in by_prompt.items():
            newest, *older = sorted(rows, key=lambda row: -row["step"])
            base = newest.get("base")
            prompts.setdefault(prompt, []).append(Answer(
                index, newest["step"], _as_yaml(newest.get("output", "")),
                None if base is None else _as_yaml(base),
                [(row["step"], _as_yaml(row.get("output", ""))) for row in older]))
    groups = []
    for prompt, answers in prompts.items():
        bases = {answer.base for answer in answers}
        groups.append((prompt, bases.pop() if len(bases) == 1 else None, answers))
    return groups


NUM_PROMPTS = 4  # per rollout


@dataclass
class Outcome:
    """Answers of a rollout to a prompt.

    Args:
        step: Optimiser steps before the rollout.
        answers: Label, facts and text of each answer shown.
    """

    run: int
    step: int
    prompt: str
    answers: list[tuple[str, str, str]]


def select_outcomes(runs: Sequence[Run]) -> list[Outcome]:
    """Return the best and the worst answer to the first prompts of the last rollouts of each run."""
    outcomes = []
    for index, run in enumerate(runs):
        for step, rows in run.rollouts:
            groups: dict[str, list[dict[str, Any]]] = {}
            for row in rows:
                groups.setdefault(_as_yaml(row["prompt"]), []).append(row)
            outcomes += [Outcome(index, step, _as_yaml(group[0]["asked"]),
                                 [(label, _describe_answer(row), _as_yaml(row["answer"]))
                                  for label, row in _best_and_worst(group)])
                         for group in list(groups.values())[:NUM_PROMPTS]]
    return outcomes


def _best_and_worst(group: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the best and the worst answer of a group, labelled; only one if all rewards are equal."""
    scored = sorted((row for row in group if _is_number(row.get("reward"))), key=lambda row: -row["reward"])
    if not scored:
        return [(f"one of {len(group)}, without rewards", group[0])]
    if scored[0]["reward"] == scored[-1]["reward"]:
        return [(f"one of {len(scored)} with this reward", scored[0])]
    return [(f"best of {len(scored)}", scored[0]), (f"worst of {len(scored)}", scored[-1])]


def _describe_answer(row: dict[str, Any]) -> str:
    rewards = _as_dict(row.get("rewards"))
    by_name = ", ".join(f"{name} {'missing' if value is None else format_value(value)}"
                        for name, value in rewards.items())
    facts = [f"reward {format_value(row['reward'])}" if _is_number(row.get("reward")) else "no reward",
             *([by_name] if len(rewards) > 1 else []),
             *(f"{name}: {reason}" for name, reason in _as_dict(row.get("missing")).items()),
             *([f"advantage {format_value(row['advantage'])}"] if _is_number(row.get("advantage")) else []),
             *([f"{format_value(row['tokens'])} tokens"] if _is_number(row.get("tokens")) else []),
             *(["truncated"] if row.get("ended") is False else [])]
    return "; ".join(facts)


@dataclass
class Bars:
    """MMLU split: for each subject, (run, accuracy) of the runs that have it."""

    split: str
    subjects: list[tuple[str, list[tuple[int, float]]]]


def build_mmlu_bars(runs: Sequence[Run]) -> list[Bars]:
    """Return the mean first, then the subjects by name; values outside 0 to 1 have no bar."""
    splits: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for index, run in enumerate(runs):
        for name, value in run.final.items():
            if name.startswith("mmlu/") and name.count("/") == 2 and _is_number(value) and 0 <= value <= 1:
                _, split, subject = name.split("/")
                splits.setdefault(split, {}).setdefault(subject, []).append((index, value))
    return [Bars(split, sorted(((name.replace("_", " "), scores) for name, scores in subjects.items()),
                               key=lambda pair: (pair[0] != "accuracy", pair[0])))
            for split, subjects in splits.items()]


MAX_CLASS_ROWS = 100  # maximum number of rows of a table by class
MAX_CONFUSION = 30  # maximum number of rows and columns of a confusion matrix
MEASURES = ("precision", "recall", "f1", "support")


@dataclass
class Classes:
    """Scores by class of a run's last evaluation.

    Args:
        tables: Kind (class or entity), number of names, and (name, MEASURES as text) of each name shown.
        confusion: For each class its name, and for each predicted class (count, fraction of the class's rows).
        names: Names of the confusion matrix; empty if there is none, or it is too large to show.
    """

    run: int
    tables: list[tuple[str, int, list[tuple[str, list[str]]]]]
    names: list[str]
    confusion: list[tuple[str, list[tuple[int, float]]]]


def build_class_tables(runs: Sequence[Run]) -> list[Classes]:
    """Return the scores by class of the runs that have them. Of many classes, only the largest by support are shown."""
    classes = []
    for index, run in enumerate(runs):
        tables = []
        for kind, key in (("class", "classes"), ("entity", "entities")):
            scores = {str(name): _as_dict(row) for name, row in _as_dict(run.classes.get(key)).items()}
            rows = list(scores.items())
            if len(rows) > MAX_CLASS_ROWS:
                rows = sorted(rows, key=lambda pair: -_as_count(pair[1].get("support")))[:MAX_CLASS_ROWS]
            if rows:
                tables.append((kind, len(scores), [
                    (name, [format_value(row.get(measure, ABSENT)) for measure in MEASURES]) for name, row in rows]))
        if tables:
            classes.append(Classes(index, tables, *_confusion(run.classes)))
    return classes


def _confusion(classes: dict[str, Any]) -> tuple[list[str], list[tuple[str, list[tuple[int, float]]]]]:
    names, matrix = [str(name) for name in _as_list(classes.get("names"))], _as_list(classes.get("confusion"))
    size = len(names)
    if size > MAX_CONFUSION or [len(_as_list(row)) for row in matrix] != [size] * size:
        return [], []
    counts = [[_as_count(count) for count in row] for row in matrix]
    return names, [(name, [(count, count / (sum(row) or 1)) for count in row])
                   for name, row in zip(names, counts, strict=True)]


def _as_count(value: Any) -> int:
    return int(value) if _is_number(value) and value > 0 else 0


@dataclass
class TrialRow:
    """Trial of a sweep.

    Args:
        value: Last measured value; None if there is none.
        settings: Values of the varied keys, in table order.
        problem: Reason for failure; empty if there is none.
    """

    number: int
    state: str
    value: float | None
    settings: list[Any]
    problem: str = ""


@dataclass
class TrialTable:
    """Trials of a sweep over `keys`, best first."""

    keys: list[str]
    metric: str
    rows: list[TrialRow]

    def cells(self, row: TrialRow) -> list[str]:
        """Return a row's texts: trial, state, metric, then the varied keys."""
        value = ABSENT if row.value is None else format_value(row.value)
        return [str(row.number), row.state, value, *(f"{setting:.4g}" if isinstance(setting, float) else str(setting)
                                                     for setting in row.settings)]

    def as_text(self) -> str:
        """Format the table for a console."""
        rows = [["trial", "state", self.metric, *self.keys], *map(self.cells, self.rows)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
                         for row in rows)


def ranking_sign(metric: str) -> int:
    """Return -1 if lower is better, 1 if higher is better, 0 if neither."""
    name = metric.rsplit("/", 1)[-1]
    if name.endswith("_threshold"):
        return 0
    if any(name == key or name.endswith(f"_{key}") for key in LOWER_IS_BETTER):
        return -1
    return int(name.startswith("pass@") or any(name == key or name.endswith(f"_{key}") for key in HIGHER_IS_BETTER))


def _metric_row(name: str, runs: Sequence[Run]) -> Row:
    sign = ranking_sign(name)
    values = [run.final.get(name) for run in runs]
    numbers = [value for value in values if _is_number(value)]
    tasks = {run.task for run, value in zip(runs, values, strict=True) if _is_number(value)}
    is_ranked = sign and len(tasks) == 1 and len(set(numbers)) > 1
    best = max(numbers, key=lambda value: sign * value) if is_ranked else None
    return Row(name, [_metric_cell(run, name, value, is_ranked and value == best)
                      for run, value in zip(runs, values, strict=True)])


def _metric_cell(run: Run, name: str, value: Any, is_best: bool) -> Cell:
    if name not in run.final:
        return Cell(ABSENT)
    steps = run.not_finite.get(name, [])
    note = f"NaN or inf at {len(steps)} of {len(run.curves[name])} steps, first {steps[0]}" if steps else ""
    return Cell(format_value(value), bool(is_best), note)


def _is_subject(name: str) -> bool:
    return name.startswith("mmlu/") and not name.endswith("/accuracy")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _as_dict(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


def _as_yaml(value: Any) -> str:
    """Format a value as YAML does."""
    if isinstance(value, list):
        return f"[{', '.join(map(_as_yaml, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _split_cells(split: dict) -> dict[str, str]:
    padding = {f"padding, {name.replace('_', ' ')}": format_percent(fraction)
               for name, fraction in _as_dict(split.get("padding_share")).items() if _is_number(fraction)}
    lengths = {f"length, {name}": format_value(value) for name, value in _as_dict(split.get("length")).items()}
    counts = {name: format_value(value) for name, value in split.items() if not isinstance(value, dict | list)}
    return counts | lengths | padding


def _format_source_cell(column: str, value: Any) -> str:
    return format_percent(value) if column.endswith("_share") and _is_number(value) else format_value(value)


def _list_remarks(source: dict) -> list[str]:
    dropped = [f"dropped {format_value(entry.get('rows'))}: {reason}" + (f" (first {first[0]})" if first else "")
               for reason, entry in _as_dict(source.get("dropped")).items() if isinstance(entry, dict)
               for first in [_as_list(entry.get("first"))]]
    unused = [f"{label}: {name} ({format_value(rows)} rows)"
              for key, label in (("not_used", "not used"), ("for_rewards", "used only for rewards"))
              for name, rows in _as_dict(source.get(key)).items()]
    return [*dropped, *unused, *map(str, _as_list(source.get("notes")))]


def _as_list(value: Any) -> list:
    return value if isinstance(value, list) else []


DEFAULTS = {f"trainer.{field.name}": _as_yaml(field.default) for field in dataclasses.fields(TrainerFields)}
