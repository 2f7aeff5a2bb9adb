"""Texts, or pairs of texts, with one label, several labels or a number."""

import math
import re
import reprlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, cast

import numpy as np

from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.batch.collate import Collator, LabelCollator
from lmmods.data.codec import ModelFacts, Predictions, can_score
from lmmods.data.encode.encoder import Encoder, RowCounts
from lmmods.data.encode.labels import DECIMAL_COMMA, Labels, SequenceEncoder, cell_list, label_name, read_bits
from lmmods.data.label_metrics import class_report, multi_label_scores, regression_scores, single_label_scores
from lmmods.data.labels import MOST_LABELS, LabelCodec, LabelData, LabelSettings, find_column, make_truncating_tokenizer
from lmmods.data.read.cells import as_text
from lmmods.data.read.conversation import RowProblem
from lmmods.data.read.formats import format_of
from lmmods.data.read.readers import Row
from lmmods.data.read.source_reader import SourceReader
from lmmods.data.store.rows import RowSet
from lmmods.recipe.tasks.sequence_classification import ProblemType, SequenceClassificationDataFields

TEXTS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence"),
         ("text1", "text2"), ("text",), ("sentence",))
LABEL = ("label", "labels", "class", "category", "target", "score")
NO_TEXTS = ("id", "idx", "label_text")
OTHER_TASKS = ("tokens", "words", "choices", "endings", "ending0")  # columns of tagging and of multiple choice
PROBLEMS = {"single_label": "single_label_classification", "multi_label": "multi_label_classification",
            "regression": "regression"}  # transformers' names
FEW_ROWS, MOST_CLASSES = 20, 0.9  # with more rows, fraction of them that may have a distinct label
FRACTIONS, COMMA = "fractions", "decimal comma"
LabelLists = Literal["positions", "numbers"]
WHOLE = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)
NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)


class LabelSurvey:
    """Survey of the label column of the training rows, to decide what a label is.

    Attributes:
        names: Labels in lists (True) and alone (False).
        row_counts: Rows whose label cannot be read, by reason.
    """

    def __init__(self, column: str) -> None:
        self.names: dict[bool, set[str]] = {False: set(), True: set()}
        self.row_counts = RowCounts()
        self._column = column
        # Rows with a list, a fraction, a decimal comma, an integer or a string.
        self._type_counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}  # first row of each kind, and the first list with a fraction
        self._has_bits_only = True  # in lists
        self._list_lengths: set[int] = set()

    def add(self, row: Row, class_names: list[str] | None) -> None:
        """Add a row; `class_names` are the names that its numbers stand for."""
        self.row_counts.num_rows += 1
        value = _cell(row.values.get(self._column))
        is_list = isinstance(value, list)
        try:
            names = {label_name(item, class_names) for item in (value if is_list else [value])}
        except RowProblem as problem:
            self.row_counts.drop(row, str(problem))
            return
        value_type, location = _value_type(value), f"{row.file}:{row.line}: {reprlib.repr(value)}"
        self._type_counts[value_type] += 1
        self._first.setdefault(value_type, location)
        if len(self.names[is_list]) <= MOST_LABELS:
            self.names[is_list] |= names
        if is_list:
            self._list_lengths.add(len(value))
            self._has_bits_only &= class_names is None and read_bits(value) is not None
            if any(isinstance(item, float) and not item.is_integer() for item in value):
                self._first.setdefault(FRACTIONS, location)

    def problem_type(self, labels: list[str] | None) -> ProblemType:
        """Return the problem type that fits most rows.

        Args:
            labels: `data.labels`.

        Raises:
            UserError: The labels look like numbers with a decimal comma.
        """
        type_counts = self._type_counts
        if 2 * type_counts["list"] > type_counts.total():
            return "multi_label"
        if type_counts["text"] or type_counts["list"]:
            return "single_label"
        if labels is None and type_counts[COMMA]:
            raise UserError(f"{self._first[COMMA]} in the column {self._column!r} looks like a number with a decimal "
                            "comma. Write numbers with a point and several labels of a row as a list; if these are "
                            "names of labels, set data.problem_type to single_label")
        return "regression" if type_counts["fraction"] else "single_label"

    def label_lists(self, labels: list[str] | None) -> LabelLists | None:
        """Return how to read lists of zeros and ones; None if there are other lists, or none.

        They are positions if all have one length (and `data.labels`, if given, too): label numbers would then name the
        same labels in each row, or one label twice. Lists without any label are ignored.

        Args:
            labels: `data.labels`.

        Raises:
            UserError: There are lists of fractions.
        """
        if labels is None and FRACTIONS in self._first:
            raise UserError(f"{self._first[FRACTIONS]} in the column {self._column!r} is a list with fractions, which "
                            "are not labels. Use lists of labels, or a one or zero for each label")
        lengths = self._list_lengths - {0}
        if not lengths or not self._has_bits_only:
            return None
        size = max(lengths)
        is_one_length = len(lengths) == 1 and size > 1 and (labels is None or len(labels) == size)
        return "positions" if is_one_length else "numbers"

    @property
    def positions(self) -> set[str]:
        """Names of the labels that lists of zeros and ones have a position for."""
        return set(map(str, range(max(self._list_lengths))))

    def check_classes(self) -> None:
        """Raise UserError if there is about one label for each row."""
        names, rows = self.names[False], self._type_counts.total() - self._type_counts["list"]
        if rows > FEW_ROWS and len(names) > MOST_CLASSES * rows:
            raise UserError(f"data.source: the column {self._column!r} has {len(names)} different values in {rows} "
                            f"rows ({', '.join(sorted(names)[:3])} ...), so they are probably not labels. Set "
                            "data.label_column to the label column, or data.problem_type: regression for "
                            "numbers, single_label if they are labels")


FOUND = ("labels", "problem_type", "text_columns", "label_column", "label_lists")


class SequenceClassificationSettings(SequenceClassificationDataFields, LabelSettings):
    """See `Settings`."""

    text_columns: list[str]
    label_column: str
    problem_type: ProblemType


class SequenceClassificationCodec(LabelCodec):
    """Labelled texts; one row of a batch is a text or a pair.

    Batches have `labels`: the number of the label, int64 [B] and IGNORED in padding rows; for several labels float32
    [B, K], 1 for those of the row; for numbers float32 [B]. Both are NaN in padding rows.

    Args:
        label_lists: As `LabelSurvey.label_lists` returns it.
    """

    settings: SequenceClassificationSettings
    found_fields: ClassVar[tuple[str, ...]] = FOUND

    def __init__(self, settings: SequenceClassificationSettings, tokenizer: Any, model: ModelFacts,
                 label_lists: LabelLists | None) -> None:
        super().__init__(settings, tokenizer, model)
        self.labels, self.label_lists = settings.labels, label_lists

    # From records to rows

    def make_encoder(self, reader: SourceReader, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        texts, label_column = self.settings.text_columns, self.settings.label_column
        for column in texts:
            find_column(first, column, (), "data.text_columns")
        if not prompts_only:
            find_column(first, label_column, (), "data.label_column")
        is_pair = len(texts) == 2
        labels = Labels(self.labels, reader.class_names(label_column))
        positions = self._positions() if self.label_lists == "positions" else None
        cutting = make_truncating_tokenizer(self.tokenizer, self.settings.max_length, is_pair)
        encoder = SequenceEncoder(cutting, prompts_only, texts, label_column, self.settings.problem_type, labels,
                                  positions)
        return encoder, {"format": "pair of texts" if is_pair else "text", "notes": self._notes(is_pair)}

    def _positions(self) -> list[int]:
        """Number of the label at each position of lists of zeros and ones: that of its name, if names are positions."""
        names = list(map(str, range(len(self.labels))))
        return list(map(self.labels.index, names)) if set(names) == set(self.labels) else list(range(len(names)))

    def _notes(self, is_pair: bool) -> list[str]:
        column = self.settings.label_column
        notes = [f"columns: {' and '.join(self.settings.text_columns)}; {column} ({self.settings.problem_type})"]
        if self.label_lists == "positions":
            notes.append(f"lists of {len(self.labels)} zeros and ones in {column}: a one marks the label at its "
                         "position")
        elif self.label_lists == "numbers":
            notes.append(f"lists of zeros and ones in {column}, not one for each label: they are label indices")
        if is_pair and not self.tokenizer.num_special_tokens_to_add(pair=True):
            notes.append("the tokenizer puts nothing between the two texts")
        return notes

    def list_texts(self, record: dict[str, Any], info: dict[str, Any]) -> list[str]:
        return [as_text(record.get(name), name) for name in self.settings.text_columns]

    # From rows to batches

    def batch_columns(self, sets: Sequence[RowSet]) -> tuple[str, ...]:
        return self.prompt_columns

    def make_collator(self, collator: Collator, sets: Sequence[RowSet], added: Sequence[str] = ()) -> LabelCollator:
        return LabelCollator(super().make_collator(collator, sets, added), self.settings.problem_type,
                             len(self.labels))

    def count_labels(self, rows: RowSet) -> dict[str, int]:
        """Return how many rows have each label; empty for numbers."""
        if not self.labels:
            return {}
        if self.settings.problem_type == "multi_label":
            counts = rows.counts("label", len(self.labels))
        else:
            labels = rows.column("label")
            counts = np.bincount(labels[labels != IGNORED], minlength=len(self.labels))
        return dict(zip(self.labels, counts.tolist(), strict=True))

    def count_labelled(self, rows: RowSet) -> int:
        return len(rows)

    def describe_scored(self, item: dict[str, Any], record: dict[str, Any], info: dict[str, Any]) -> str:
        label, column = item["label"], self.settings.label_column
        if self.settings.problem_type == "regression":
            return f"{column} {label:g}"
        return f"{column} {', '.join(self.labels[index] for index in np.atleast_1d(label)) or '(none)'}"

    # From outputs to predictions

    def evaluate(self, role: str, rows: RowSet, outputs: dict[int, np.ndarray]) -> Predictions:
        """Return labels, scores and files of an evaluation or of predict.

        Args:
            outputs: Logits [K] by `index`.

        Returns:
            Records with `prediction`, a name, a list of names or a number, and `probabilities` by name. Scores, and
            classes.json for labels, if all records have labels.
        """
        if not outputs:
            return Predictions([], {}, {})
        indices = sorted(outputs)
        logits = np.stack([outputs[index] for index in indices]).astype(np.float64)  # [N, K]
        records = [{**self.example(rows, index), **self._to_prediction(values)}
                   for index, values in zip(indices, logits, strict=True)]
        labels = [rows[index]["label"] for index in indices]
        is_regression = self.settings.problem_type == "regression"
        is_scored, warnings = can_score(role, [math.isfinite(label) if is_regression else
                                               IGNORED not in np.atleast_1d(label) for label in labels])
        return Predictions(records, *(self._scores(logits, labels) if is_scored else ({}, {})), warnings)

    def _to_prediction(self, logits: np.ndarray) -> dict[str, Any]:
        if self.settings.problem_type == "regression":
            return {"prediction": float(logits[0])}
        if self.settings.problem_type == "multi_label":
            probabilities = 1 / (1 + np.exp(-np.clip(logits, -700, 700)))
            prediction: Any = [name for name, probability in zip(self.labels, probabilities, strict=True)
                               if probability > 0.5]
        else:
            probabilities = np.exp(logits - np.logaddexp.reduce(logits))
            prediction = self.labels[int(logits.argmax())]
        return {"prediction": prediction, "probabilities": dict(zip(self.labels, probabilities.tolist(), strict=True))}

    def _scores(self, logits: np.ndarray, labels: list[Any]) -> tuple[dict[str, float], dict[str, Any]]:
        if self.settings.problem_type == "regression":
            return regression_scores(logits[:, 0], np.array(labels)), {}
        if self.settings.problem_type == "single_label":
            classes = np.array(labels)
            report = class_report(logits.argmax(1), classes, self.labels)
            return single_label_scores(logits, classes), {"classes.json": report}
        present = np.zeros(logits.shape, bool)
        for index, row in enumerate(labels):
            present[index, row] = True
        return multi_label_scores(logits, present), {"classes.json": class_report(logits > 0, present, self.labels)}


class SequenceClassificationData(SequenceClassificationDataFields, LabelData):
    """Labelled texts: one text or a pair."""

    found_fields: ClassVar[tuple[str, ...]] = FOUND
    label_lists: LabelLists | None = None  # as `LabelSurvey.label_lists` returns it

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
        return {**fields, "problem_type": PROBLEMS[cast(ProblemType, self.problem_type)]}  # found with the labels

    # Labels ----------------------------------------------------------------------------------------------------------

    def _facts(self, readers: list[SourceReader]) -> dict[str, Any]:
        first = self._first_row(readers)
        label_column = find_column(first, self.label_column, LABEL, "data.label_column")
        columns = [find_column(first, name, (), "data.text_columns") for name in self.text_columns or ()]
        columns = columns or text_columns(first, label_column)
        if not columns:
            raise UserError(f"{first.file}:{first.line}: no text column; the columns are {', '.join(first.values)}. "
                            "Set data.text_columns to one or two of them")
        class_names = [reader.class_names(label_column) for reader in readers]
        survey, explicit_labels = LabelSurvey(label_column), self._explicit["labels"]
        if explicit_labels is None or self._explicit["problem_type"] in (None, "multi_label"):
            for reader, names_of_classes in zip(readers, class_names, strict=True):
                for row in self._sampled(reader):
                    survey.add(row, names_of_classes)
        problem_type = self._explicit["problem_type"] or survey.problem_type(explicit_labels)
        label_lists = survey.label_lists(explicit_labels) if problem_type == "multi_label" else None
        names = survey.names[problem_type == "multi_label"] if label_lists != "positions" else survey.positions
        labels = [] if problem_type == "regression" else self._known_labels(
            names, class_names, label_column, survey.row_counts)
        if problem_type == "single_label" and len(labels) < 2:
            raise UserError(f"data.source: all rows have the label {labels[0]!r} in the column {label_column!r}, so "
                            "there is nothing to learn. Add rows with other labels")
        is_explicit = explicit_labels or self._explicit["problem_type"] or any(class_names)
        if problem_type == "single_label" and not is_explicit:
            survey.check_classes()
        return {"labels": labels, "problem_type": problem_type, "text_columns": list(columns),
                "label_column": label_column, "label_lists": label_lists}

    def make_codec(self) -> SequenceClassificationCodec:
        self.find_labels()
        return SequenceClassificationCodec(cast(SequenceClassificationSettings, self), self.tokenizer, self._model,
                                           self.label_lists)


def text_columns(row: Row, label_column: str) -> list[str]:
    """Return the usual columns of a text or pair in a row, or else its first two text columns; empty if it has none."""
    usual = next((list(names) for names in TEXTS if all(name in row.values for name in names)), None)
    return usual or [name for name, value in row.values.items()
                     if isinstance(value, str) and name not in (label_column, *NO_TEXTS)][:2]


def _cell(value: Any) -> Any:
    """Return the list that a cell of text contains as JSON; any other value unchanged."""
    is_list = isinstance(value, str) and value.lstrip().startswith("[")
    try:
        return cell_list(value, "the label") if is_list else value
    except RowProblem:
        return value


def _value_type(value: Any) -> str:
    if isinstance(value, list):
        return "list"
    if isinstance(value, bool):
        return "text"
    if isinstance(value, int) or isinstance(value, str) and WHOLE.fullmatch(value):
        return "whole number"
    if isinstance(value, float) or NUMBER.fullmatch(value):
        return "fraction"
    return COMMA if DECIMAL_COMMA.fullmatch(value) else "text"
