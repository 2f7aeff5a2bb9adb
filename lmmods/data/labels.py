"""What the tasks that learn labels share: finding the labels of the training rows, their order, counts and weights."""

import itertools
import json
import os
import tempfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from lmmods.core.errors import UserError
from lmmods.core.files import read_text
from lmmods.core.hardware import cache_folder
from lmmods.data.base import DataModule
from lmmods.data.codec import Codec, NumbersCodec, Settings
from lmmods.data.encode.encoder import RowCounts, describe_dropped, first_usable_row
from lmmods.data.encode.labels import TruncatingTokenizer
from lmmods.data.encode.tokenizer import distinguishes_texts
from lmmods.data.read.readers import Row
from lmmods.data.read.source_reader import SourceReader, did_you_mean
from lmmods.data.splits import FIRST_BUFFER
from lmmods.data.store.cache import fingerprint, reporting_writes
from lmmods.data.store.rows import IndexedRows, RowSet
from lmmods.recipe.tasks.base import LabelDataFields

LABELS = "labels"  # in a checkpoint: the fields that the training rows decided
MOST_LABELS = 10_000  # with more, a column contains something else


def make_truncating_tokenizer(tokenizer: Any, max_length: int, is_pair: bool = False) -> TruncatingTokenizer:
    """Return the tokenizer that cuts rows to `max_length`. Raises UserError: nothing but special tokens fits."""
    specials = tokenizer.num_special_tokens_to_add(pair=is_pair)
    if max_length <= specials:
        raise UserError(f"data.max_length is {max_length}, but the tokenizer adds {specials} special tokens to a row; "
                        "raise it")
    return TruncatingTokenizer(tokenizer.backend_tokenizer.to_str(), tokenizer.pad_token_id, tokenizer.unk_token_id,
                               max_length, tokenizer.truncation_side)


class LabelSettings(LabelDataFields, Settings):
    """See `Settings`."""

    labels: list[str]


class LabelCodec(NumbersCodec):
    """Rows with labels; `index` of a batch is the number of a row in its set. Abstract: a task defines the labels.

    The labels, and the columns that contain them, are those of the settings, which `LabelData` has filled in.
    """

    settings: LabelSettings
    found_fields: ClassVar[tuple[str, ...]] = ("labels",)

    def encoding_settings(self) -> dict[str, Any]:
        return {"max_length": self.settings.max_length, "truncation_side": self.tokenizer.truncation_side,
                **{name: getattr(self.settings, name) for name in self.found_fields}}

    def make_items(self, rows: RowSet, by_source: bool) -> IndexedRows:
        return IndexedRows(rows)

    def make_prompts(self, rows: RowSet) -> IndexedRows:
        return IndexedRows(rows)

    @property
    def prompt_columns(self) -> tuple[str, ...]:
        """Columns of a predict batch besides `attention_mask`."""
        types = ("token_type_ids",) if self.model.token_types and distinguishes_texts(self.tokenizer) else ()
        return ("input_ids", *types, "index")

    @property
    def prompt_side(self) -> str:
        """Padding side in predict."""
        return "right"

    def count_labelled(self, rows: RowSet) -> int:
        """Return how many rows, or words, have labels."""
        return sum(self.count_labels(rows).values())

    def example(self, rows: RowSet, index: int) -> dict[str, Any]:
        """Return the record behind `index` of a batch."""
        return rows.source_row(rows[index]["index"])


class LabelData(LabelDataFields, DataModule):
    """Base class for data with labels. A subclass defines where a row's labels are.

    Before encoding, fields in `found_fields` that the recipe leaves null are filled from the training rows:
    `prepare_data` finds the values and stores them in the cache; a checkpoint has its own.
    """

    codec: LabelCodec
    found_fields: ClassVar[tuple[str, ...]] = ("labels",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._explicit = {name: getattr(self, name) for name in self.found_fields}
        self._are_found = False

    # Labels ----------------------------------------------------------------------------------------------------------

    def make_codec(self) -> Codec:
        self.find_labels()
        return super().make_codec()

    def find_labels(self) -> None:
        """Fill in `found_fields`, once. Raises UserError if the training rows have no labels that can be learned."""
        if self._are_found:
            return
        readers = self.sources.training_readers()
        facts = self._facts(readers) if self.streaming else self._cached_facts(readers)
        if self._explicit["labels"] is None and self._model.label_names is not None:
            facts["labels"] = align_names(self._model.label_names, facts["labels"])
        self._adopt(facts)

    def _adopt(self, facts: dict[str, Any]) -> None:
        for name in self.found_fields:
            if name in facts:  # checkpoints of earlier versions lack some
                setattr(self, name, facts[name])
        self._are_found = True

    def _cached_facts(self, readers: list[SourceReader]) -> dict[str, Any]:
        """Return `_facts` of these sources, read from the cache if possible."""
        key = fingerprint({"task": type(self).__name__, "given": self._explicit,
                           "sources": [reader.fingerprint() for reader in readers]})
        path = cache_folder(self.cache_dir) / f"{LABELS}-{key}.json"
        if not self.rebuild_cache and (facts := _read_facts(path, self.found_fields)) is not None:
            return facts
        facts = self._facts(readers)
        _write_facts(path, facts)
        return facts

    @abstractmethod
    def _facts(self, readers: list[SourceReader]) -> dict[str, Any]:
        """Return the values of `found_fields`, plain JSON, from the rows of the training sources. Raises UserError."""

    def _first_row(self, readers: list[SourceReader]) -> Row:
        """First usable training row. Raises UserError: there is none."""
        return first_usable_row(readers[0], readers[0].source.path)

    def _sampled(self, reader: SourceReader) -> Iterator[Row]:
        """Usable rows of a training source; of a stream the first ones."""
        rows = itertools.islice(reader, FIRST_BUFFER) if self.streaming else reader
        return (row for row in rows if row.problem is None)

    def _known_labels(self, names: Iterable[str], class_names: list[list[str] | None], column: str,
                      row_counts: RowCounts) -> list[str]:
        """Return the labels of `data.labels`, else those found, in the order of the dataset's own names or sorted.

        Args:
            names: Those that the training rows have.
            class_names: What each source calls its numbers.
            row_counts: Training rows whose labels cannot be read, by reason.

        Raises:
            UserError: There are none, too many, or they are those of a part of a stream.
        """
        if self._explicit["labels"] is not None:
            return self._explicit["labels"]
        if self.streaming:
            raise UserError("data.streaming reads rows during training, but their labels must be known before. List "
                            "them in data.labels, in the order of the model's outputs")
        first = class_names[0]
        labels = first if first and all(names == first for names in class_names) else sort_names(set(names))
        if not labels:
            summary = row_counts.summary()
            why = f", {describe_dropped(summary)}" if summary["dropped"] else ""
            raise UserError(f"data.source: no row has a label in the column {column!r}{why}")
        if len(labels) > MOST_LABELS:
            raise UserError(f"data.source: the column {column!r} has more than {MOST_LABELS:,} different values, which "
                            "are not labels. Name the label column, or list the labels in data.labels")
        return list(labels)

    @property
    def network_fields(self) -> dict[str, Any]:
        """`id2label` and `label2id` of transformers' configuration. Raises UserError as `find_labels` does."""
        self.find_labels()
        names = self.labels or ["LABEL_0"]  # as transformers calls a number
        return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}

    def class_weights(self, setting: dict[str, float] | Literal["balanced"] | None) -> np.ndarray | None:
        """Weight of each label in the loss, float32 [K]; None if all weigh the same.

        Args:
            setting: As `model.class_weights`. `balanced` is N / (K n_k), with N training rows (or words), n_k of them
                with label k, and K labels that occur; a label that does not weighs 1.

        Raises:
            UserError: A name is not a label, or the rows are a stream, whose labels cannot be counted.
        """
        if setting is None:
            return None
        self.find_labels()
        if not self.labels:
            raise UserError("model.class_weights applies to labels, but these rows have numbers. Set it to null")
        if isinstance(setting, dict):
            if unknown := [name for name in setting if name not in self.labels]:
                raise UserError(f"model.class_weights: {unknown[0]!r} is not a label; the labels are "
                                f"{', '.join(self.labels)}{did_you_mean(unknown[0], self.labels)}")
            return np.array([setting.get(name, 1) for name in self.labels], np.float32)
        if self.streaming:
            raise UserError("model.class_weights is balanced, but the labels of a stream are not counted before "
                            "training. Set a weight for each label, or set data.streaming to false")
        rows = self.rows("train")
        counts = np.array(list(self.codec.count_labels(rows).values()))
        total, occurs = self.codec.count_labelled(rows), counts > 0
        return np.where(occurs, total / (occurs.sum() * np.maximum(counts, 1)), 1).astype(np.float32)

    # State -----------------------------------------------------------------------------------------------------------

    def state_at(self, position: dict[str, Any]) -> dict[str, Any]:
        """As in `DataModule`, with the fields that the training rows decided."""
        self.find_labels()
        return {**super().state_at(position), LABELS: {name: getattr(self, name) for name in self.found_fields}}

    def resume_from(self, checkpoint: dict[str, Any]) -> None:
        """As in `DataModule`; the labels are those of the checkpoint."""
        super().resume_from(checkpoint)
        facts = checkpoint.get(type(self).__qualname__, {}).get(LABELS)
        if facts is not None:
            self._adopt(facts)


# ---------------------------------------------------------------------------------------------------------------------
# Names of labels and of columns.


def sort_names(names: set[str]) -> list[str]:
    """Sort names as strings; if all of them are integers, by their value."""
    try:
        return sorted(names, key=int)
    except ValueError:
        return sorted(names)


def align_names(model_names: list[str], names: list[str]) -> list[str]:
    """Return names in the order of a model's, if they are the same except for case; otherwise unchanged.

    As in transformers' run_glue, so that a model with these labels continues with its own outputs.
    """
    by_key = {name.casefold(): name for name in names}
    keys = [name.casefold() for name in model_names]
    is_same = len(keys) == len(by_key) == len(names) and set(keys) == set(by_key)
    return [by_key[key] for key in keys] if is_same else names


def find_column(first: Row, requested: str | None, usual: tuple[str, ...], key: str) -> str:
    """Return the requested column of a source, or the first usual one if none is requested.

    Args:
        key: Recipe key that names the column.

    Raises:
        UserError: The column does not exist.
    """
    columns = list(first.values)
    candidates = (requested,) if requested else usual
    column = next((name for name in candidates if name in columns), None)
    if column is None:
        problem = f"no column {requested!r}" if requested else f"none of the usual columns ({', '.join(usual)})"
        hint = did_you_mean(requested, columns) if requested else ""
        raise UserError(f"{first.file}:{first.line}: {problem}; the columns are {', '.join(columns)}{hint}. Set {key} "
                        "to one of them")
    return column


# ---------------------------------------------------------------------------------------------------------------------
# Facts about the training rows in the cache.


def _read_facts(path: Path, names: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the content of a file of the cache; None if it is missing or damaged."""
    try:
        facts = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) and facts.keys() == set(names) else None


def _write_facts(path: Path, facts: dict[str, Any]) -> None:
    """Write a file of the cache, so that no process sees half of it. Raises UserError if it cannot be written."""
    with reporting_writes(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}.tmp-", dir=path.parent)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(facts, file)
        os.replace(temporary, path)
