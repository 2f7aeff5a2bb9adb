"""Texts, or pairs of texts, with one label, several labels or a number."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.batches.collate import Collator, LabelCollator
from lmmods.data.encode.encoder import Encoder
from lmmods.data.encode.labels import Labels, SequenceEncoder, cell_list, label_name
from lmmods.data.label_metrics import class_report, multi_label_scores, regression_scores, single_label_scores
from lmmods.data.labels import MOST_LABELS, LabelData, find_column
from lmmods.data.scoring import Predictions
from lmmods.data.sources.cells import as_text
from lmmods.data.sources.conversation import RowProblem
from lmmods.data.sources.formats import format_of
from lmmods.data.sources.readers import Row
from lmmods.data.sources.source_reader import SourceReader
from lmmods.data.splits import Role
from lmmods.recipe.source import Source
from lmmods.recipe.tasks.sequence_classification import SequenceClassificationDataFields

TEXTS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence"),
         ("text1", "text2"), ("text",), ("sentence",))
LABEL = ("label", "labels", "class", "category", "target", "score")
NO_TEXTS = ("id", "idx", "label_text")
OTHER_TASKS = ("tokens", "words", "choices", "endings", "ending0")  # columns of tagging and of multiple choice
PROBLEMS = {"single_label": "single_label_classification", "multi_label": "multi_label_classification",
            "regression": "regression"}  # transformers' names
WHOLE = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)
NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)


class SequenceClassificationData(SequenceClassificationDataFields, LabelData):
    """Labelled texts; one row of a batch is a text or a pair, and `index` its number in its set.

    Batches have `labels`: the number of the label, int64 [B] and IGNORED in padding rows; for several labels float32
    [B, K], 1 for those of the row; for numbers float32 [B]. Both are NaN in padding rows.
    """

    found_fields: ClassVar[tuple[str, ...]] = ("labels", "problem_type", "text_columns", "label_column")

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        values = row.values
        label = next((name for name in LABEL[:-1] if name in values), None)
        if label is None or any(name in values for name in OTHER_TASKS) or format_of(values) not in (None, "text"):
            return None
        items = values[label] if isinstance(values[label], list) else [values[label]]
        is_label = all(isinstance(item, str | bool | int | float) for item in items)
        return "the rows are texts with labels" if is_label and text_columns(row, label) else None

    @property
    def network_fields(self) -> dict[str, Any]:
        """`id2label`, `label2id` and `problem_type` of transformers' configuration. Raises UserError."""
        fields = super().network_fields
        return {**fields, "problem_type": PROBLEMS[self.problem_type]}

    # Labels ----------------------------------------------------------------------------------------------------------

    def _facts(self, readers: list[SourceReader]) -> dict[str, Any]:
        first = self._first_row(readers)
        label_column = find_column(first, self.label_column, LABEL, "data.label_column")
        columns = [find_column(first, name, (), "data.text_columns") for name in self.text_columns or ()]
        columns = columns or text_columns(first, label_column)
        if not columns:
            raise UserError(f"{first.file}:{first.line}: no column of text; the columns are {', '.join(first.values)}. "
                            "Name one or two with data.text_columns")
        names: dict[bool, set[str]] = {False: set(), True: set()}
        kinds, class_names = Counter(), [reader.class_names(label_column) for reader in readers]
        if self._given["problem_type"] is None or self._given["labels"] is None:
            for reader, known in zip(readers, class_names, strict=True):
                self._count(reader, known, label_column, names, kinds)
        problem_type = self._given["problem_type"] or _problem_type(kinds)
        labels = [] if problem_type == "regression" else self._known_labels(
            names[problem_type == "multi_label"], class_names, label_column)
        if problem_type == "single_label" and len(labels) < 2:
            raise UserError(f"data.source: all rows have the label {labels[0]!r} in the column {label_column!r}, so "
                            "there is nothing to tell apart. Add rows with other labels")
        return {"labels": labels, "problem_type": problem_type, "text_columns": list(columns),
                "label_column": label_column}

    def _count(self, reader: SourceReader, known: list[str] | None, column: str, names: dict[bool, set[str]],
               kinds: Counter) -> None:
        """Count how many rows of a source have a list, a fraction, a whole number or a text, and collect the labels in
        lists (True) and alone (False).
        """
        for row in self._sampled(reader):
            try:
                value = _cell(row.values.get(column))
                is_list = isinstance(value, list)
                found = {label_name(item, known) for item in (value if is_list else [value])}
            except RowProblem:
                continue  # counted when the rows are encoded
            kinds[_kind(value)] += 1
            if len(names[is_list]) <= MOST_LABELS:
                names[is_list] |= found

    def label_counts(self, role: Role) -> dict[str, int]:
        """Rows of a role with each label; empty for numbers."""
        if not self.labels:
            return {}
        rows = self._rows(role)
        if self.problem_type == "multi_label":
            counts = rows.counts("label", len(self.labels))
        else:
            numbers = rows.column("label")
            counts = np.bincount(numbers[numbers != IGNORED], minlength=len(self.labels))
        return dict(zip(self.labels, counts.tolist(), strict=True))

    def _num_labelled(self, role: Role) -> int:
        return len(self._rows(role))

    # Rows ------------------------------------------------------------------------------------------------------------

    def _texts(self, row: dict[str, Any], info: dict[str, Any]) -> list[str]:
        self.find_labels()
        return [as_text(row.get(name), name) for name in self.text_columns]

    def _encoder(self, source: Source, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        self.find_labels()
        for column in self.text_columns:
            find_column(first, column, (), "data.text_columns")
        if not prompts_only:
            find_column(first, self.label_column, (), "data.label_column")
        is_pair = len(self.text_columns) == 2
        labels = Labels(self.labels, self._class_names(source, self.label_column))
        encoder = SequenceEncoder(self._cutting_tokenizer(is_pair), prompts_only, self.text_columns, self.label_column,
                                  self.problem_type, labels)
        return encoder, {"format": "pair of texts" if is_pair else "text", "notes": self._notes(is_pair)}

    def _notes(self, is_pair: bool) -> list[str]:
        notes = [f"columns: {' and '.join(self.text_columns)}; {self.label_column} ({self.problem_type})"]
        if is_pair and not self.tokenizer.num_special_tokens_to_add(pair=True):
            notes.append("the tokenizer puts nothing between the two texts")
        return notes

    def _batch_keys(self) -> tuple[str, ...]:
        return self._prompt_keys()

    def _batch_collator(self, collator: Collator) -> Callable[[list], dict[str, Any]]:
        return LabelCollator(collator, self.problem_type, len(self.labels))

    def _scored(self, item: dict[str, Any], source: dict[str, Any]) -> str:
        label = item["label"]
        if self.problem_type == "regression":
            return f"{self.label_column} {label:g}"
        numbers = np.atleast_1d(label)
        return f"{self.label_column} {', '.join(self.labels[number] for number in numbers) or '(none)'}"

    # Outputs ---------------------------------------------------------------------------------------------------------

    def answer(self, role: Role, outputs: dict[int, np.ndarray]) -> Predictions:
        """Labels, scores and files of an evaluation or of predict.

        Args:
            outputs: Logits [K] by `index`.

        Returns:
            Rows with `prediction`, a name, a list of names or a number, and `probabilities` by name. Scores, and
            classes.json for labels, if all rows have labels.
        """
        if not outputs:
            return Predictions([], {}, {})
        indices = sorted(outputs)
        logits = np.stack([outputs[index] for index in indices]).astype(np.float64)  # [N, K]
        rows = [{**self._example(role, index), **self._predicted(row)}
                for index, row in zip(indices, logits, strict=True)]
        known = self._rows(role)
        scores, files = self._scores(logits, [known[index]["label"] for index in indices])
        return Predictions(rows, scores, files)

    def _predicted(self, logits: np.ndarray) -> dict[str, Any]:
        if self.problem_type == "regression":
            return {"prediction": float(logits[0])}
        if self.problem_type == "multi_label":
            shares = 1 / (1 + np.exp(-np.clip(logits, -700, 700)))
            chosen: Any = [name for name, share in zip(self.labels, shares, strict=True) if share > 0.5]
        else:
            shares = np.exp(logits - np.logaddexp.reduce(logits))
            chosen = self.labels[int(logits.argmax())]
        return {"prediction": chosen, "probabilities": dict(zip(self.labels, shares.tolist(), strict=True))}

    def _scores(self, logits: np.ndarray, labels: list[Any]) -> tuple[dict[str, float], dict[str, Any]]:
        if self.problem_type == "regression":
            values = np.array(labels)
            return (regression_scores(logits[:, 0], values), {}) if np.isfinite(values).all() else ({}, {})
        if self.problem_type == "single_label":
            numbers = np.array(labels)
            if (numbers == IGNORED).any():
                return {}, {}
            report = class_report(logits.argmax(1), numbers, self.labels)
            return single_label_scores(logits, numbers), {"classes.json": report}
        if any(IGNORED in row for row in labels):
            return {}, {}
        present = np.zeros(logits.shape, bool)
        for place, row in enumerate(labels):
            present[place, row] = True
        return multi_label_scores(logits, present), {"classes.json": class_report(logits > 0, present, self.labels)}


def text_columns(row: Row, label_column: str) -> list[str]:
    """The usual columns of a text or a pair in a row, else its first two columns of text; empty if it has none."""
    usual = next((list(names) for names in TEXTS if all(name in row.values for name in names)), None)
    return usual or [name for name, value in row.values.items()
                     if isinstance(value, str) and name not in (label_column, *NO_TEXTS)][:2]


def _cell(value: Any) -> Any:
    """The list that a cell of text holds as JSON; any other value unchanged."""
    is_list = isinstance(value, str) and value.lstrip().startswith("[")
    try:
        return cell_list(value, "the label") if is_list else value
    except RowProblem:
        return value


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "list"
    if isinstance(value, bool):
        return "text"
    if isinstance(value, int) or isinstance(value, str) and WHOLE.fullmatch(value):
        return "whole number"
    return "fraction" if isinstance(value, float) or NUMBER.fullmatch(str(value)) else "text"


def _problem_type(kinds: Counter) -> str:
    if 2 * kinds["list"] > kinds.total():
        return "multi_label"
    return "regression" if kinds["fraction"] and not kinds["text"] and not kinds["list"] else "single_label"
