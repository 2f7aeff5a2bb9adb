"""Encoding of labelled texts, and of words with tags.

Does not import torch, so that worker processes start fast.
"""

import json
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from tokenizers import Encoding, Tokenizer

from lmmods.core.labels import IGNORED
from lmmods.data.encode.encoder import Encoded, Ragged
from lmmods.data.read.cells import as_text, check_unicode, parse
from lmmods.data.read.conversation import RowProblem

Kind = Literal["single_label", "multi_label", "regression"]
DECIMAL_COMMA = re.compile(r"\s*[+-]?\d*,\d+\s*", re.ASCII)
BITS = {"0": 0, "1": 1, "false": 0, "true": 1}  # by `label_name`

# ---------------------------------------------------------------------------------------------------------------------
# Labels in the cells of a row.


def label_name(value: Any, names: list[str] | None = None) -> str:
    """Return the name of a label, of a tag, or of an item in a list of labels: text, a number, true or false.

    Args:
        names: Names that numbers stand for; None if a number is its own name.

    Raises:
        RowProblem: There is no label, or no name for it.
    """
    if isinstance(value, bool):
        return "true" if value else "false"  # as JSON and YAML write it
    if isinstance(value, int) and names is not None:
        if not 0 <= value < len(names):
            raise RowProblem("a label without a name")  # datasets write -1 where the label is secret
        return names[value]
    # The same number may be written 1 and 1.0.
    is_whole = isinstance(value, float) and value.is_integer()
    name = str(int(value)) if is_whole else as_text(value, "the label")
    check_unicode(name)
    if not name.strip():
        raise RowProblem("the label is empty")
    return name.strip()


def read_number(value: Any) -> float:
    """Return the number in a cell, for regression. Raises RowProblem if it has none."""
    if isinstance(value, str) and DECIMAL_COMMA.fullmatch(value):
        raise RowProblem("the label has a decimal comma instead of a point")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RowProblem("the label is not a number")
    return number


def cell_list(value: Any, name: str) -> list[Any]:
    """Return the list in a cell, parsed from JSON if the cell is a string. Raises RowProblem if it has none."""
    cells = parse(value, name) if isinstance(value, str) else value
    if not isinstance(cells, list):
        raise RowProblem(f"{name} is not a list")
    return cells


def read_bits(items: list[Any]) -> list[int] | None:
    """Return the zeros and ones in a list; None if it contains anything else. Raises RowProblem, see `label_name`."""
    bits = [BITS.get(label_name(item)) for item in items]
    return None if None in bits else bits  # type: ignore[return-value]


@dataclass
class Labels:
    """Labels that rows may have.

    Args:
        names: In the order of the model's outputs.
        class_names: Names that numbers in this source stand for; None if a number is its own name.
    """

    names: list[str]
    class_names: list[str] | None

    def __post_init__(self) -> None:
        self._indices = {name: index for index, name in enumerate(self.names)}
        self._are_words = not any(name.isdecimal() for name in self.names)

    def find_index(self, value: Any) -> int:
        """Return the index of the label in a cell. Raises RowProblem if it is missing or unknown."""
        name = label_name(value, self.class_names)
        if name in self._indices:
            return self._indices[name]
        # If `data.labels` names numbers, a number is an index into it.
        if self._are_words and name.isdecimal() and int(name) < len(self.names):
            return int(name)
        raise RowProblem("a label that is not in data.labels")


# ---------------------------------------------------------------------------------------------------------------------
# Rows of one sequence each, truncated to the maximum length.


class TruncatingTokenizer:
    """A fast tokenizer that also returns what it truncates from a row; picklable.

    Args:
        backend: JSON of the tokenizer's backend.
        pad_id: Id of the padding token.
        unknown_id: Id of the unknown token.
        max_length: Maximum row length in tokens, with special ones; of a pair the longer text is truncated first.
        side: Side at which rows are truncated.
    """

    def __init__(self, backend: str, pad_id: int, unknown_id: int | None, max_length: int, side: str) -> None:
        self._state = (backend, pad_id, unknown_id, max_length, side)
        self.pad_id, self.unknown_id, self.max_length = pad_id, unknown_id, max_length
        self._full, self._truncated = Tokenizer.from_str(backend), Tokenizer.from_str(backend)
        # Settings saved in tokenizer.json apply to neither.
        for tokenizer in (self._full, self._truncated):
            tokenizer.no_padding()
            tokenizer.no_truncation()
            tokenizer.encode_special_tokens = True  # names of special tokens in a text stay text
        self._truncated.enable_truncation(max_length, strategy="longest_first", direction=side)

    def __reduce__(self):  # noqa: ANN204 - pickling would drop encode_special_tokens
        return TruncatingTokenizer, self._state

    def encode(self, texts: list[Any], are_words: bool = False) -> list[tuple[Encoding, Encoding]]:
        """Return the encodings of texts, pairs or (`are_words`) lists of words, each before and after truncation."""
        full = self._full.encode_batch(texts, is_pretokenized=are_words)
        long = [index for index, encoding in enumerate(full) if len(encoding) > self.max_length]
        truncated = self._truncated.encode_batch([texts[index] for index in long], is_pretokenized=are_words)
        truncated_by_index = dict(zip(long, truncated, strict=True))
        return [(encoding, truncated_by_index.get(index, encoding)) for index, encoding in enumerate(full)]

    def row(self, full: Encoding, truncated: Encoding, counts: Counter) -> dict[str, Any]:
        """Return the columns of a row, with `truncated`, the number of removed tokens; update the report's counts.

        Raises:
            RowProblem: The row has only special tokens.
        """
        if all(full.special_tokens_mask):
            raise RowProblem("the tokenizer finds no token")
        ids = np.array(truncated.ids, np.int32)
        num_truncated = len(full) - len(truncated)
        counts["tokens"] += len(ids)
        counts["unknown_tokens"] += int((ids == self.unknown_id).sum())
        counts["rows_cut"] += num_truncated > 0
        counts["tokens_cut"] += num_truncated
        # transformers' decoders find the last token by its id, so in such rows they take another one.
        counts["ends_in_padding"] += bool(ids[-1] == self.pad_id)
        return {"input_ids": ids, "token_type_ids": np.array(truncated.type_ids, np.int32), "truncated": num_truncated}


@dataclass
class LabelledEncoder(ABC):
    """Base class of encoders of labelled rows, which encode all texts of a batch at once.

    Args:
        tokenizer: Encodes and truncates the texts.
        prompts_only: Rows need no labels.
    """

    tokenizer: TruncatingTokenizer
    prompts_only: bool

    are_words: ClassVar[bool] = False
    schema: ClassVar[dict[str, type]] = {"input_ids": Ragged, "token_type_ids": Ragged, "truncated": np.int64}

    def __call__(self, rows: list[dict[str, Any]]) -> Encoded:
        """Return the columns of `schema`."""
        texts, labels, positions, dropped = [], [], [], []
        for index, row in enumerate(rows):
            try:
                text, label = self._text(row), self._label(row)
            except RowProblem as problem:
                dropped.append((index, str(problem)))
                continue
            texts.append(text)
            labels.append(label)
            positions.append(index)
        counts: Counter = Counter()
        columns: dict[str, list] = {name: [] for name in self.schema}
        usable = []
        encoded = self.tokenizer.encode(texts, self.are_words)
        for index, label, (full, truncated) in zip(positions, labels, encoded, strict=True):
            try:
                values = self.tokenizer.row(full, truncated, counts) | self._columns(label, full, truncated, counts)
            except RowProblem as problem:
                dropped.append((index, str(problem)))
                continue
            usable.append(index)
            for name, value in values.items():
                columns[name].append(value)
        arrays: dict[str, Any] = {
            name: Ragged.from_lists(column) if column_type is Ragged else np.array(column, column_type)
            for (name, column), column_type in zip(columns.items(), self.schema.values(), strict=True)}
        return Encoded(arrays, np.array(usable, np.int64), sorted(dropped), counts)

    @abstractmethod
    def _text(self, row: dict[str, Any]) -> Any:
        """Return a text, a pair of texts or a list of words. Raises RowProblem."""

    @abstractmethod
    def _label(self, row: dict[str, Any]) -> Any:
        """Return the label or tags in the form that `_columns` takes. Raises RowProblem."""

    @abstractmethod
    def _columns(self, label: Any, full: Encoding, truncated: Encoding, counts: Counter) -> dict[str, Any]:
        """Return the columns of the label, from the encodings before and after truncation."""


# ---------------------------------------------------------------------------------------------------------------------
# Texts with a label.


@dataclass
class SequenceEncoder(LabelledEncoder):
    """Encodes texts, or pairs of texts, as the tokenizer's own template has them.

    Args:
        text_columns: One or two columns.
        label_column: Column of the label.
        problem_type: What a label is: the name of one, a list of names, or a number.
        labels: Labels by their names; none for numbers.
        positions: If the lists of labels are zeros and ones, index of the label at each position; None if they are
            names.
    """

    text_columns: list[str]
    label_column: str
    problem_type: Kind
    labels: Labels
    positions: list[int] | None = None

    @property
    def schema(self) -> dict[str, type]:  # type: ignore[override]
        """Return the type of each column.

        `label` is the index of a label (IGNORED if missing), the indices of all labels (IGNORED alone if missing), or a
        number (NaN if missing).
        """
        label = {"single_label": np.int64, "multi_label": Ragged, "regression": np.float64}[self.problem_type]
        return {**LabelledEncoder.schema, "label": label}

    def _text(self, row: dict[str, Any]) -> str | tuple[str, ...]:
        texts = tuple(text_of(row, column) for column in self.text_columns)
        return texts[0] if len(texts) == 1 else texts

    def _label(self, row: dict[str, Any]) -> int | float | np.ndarray:
        try:
            return self._read_label(row)
        except RowProblem:
            if not self.prompts_only:
                raise
        unknown: dict[str, int | float | np.ndarray] = {
            "single_label": IGNORED, "multi_label": np.array([IGNORED], np.int32), "regression": math.nan}
        return unknown[self.problem_type]

    def _read_label(self, row: dict[str, Any]) -> int | float | np.ndarray:
        if self.label_column not in row:
            raise RowProblem(f"{self.label_column} is missing")
        value = row[self.label_column]
        if self.problem_type == "regression":
            return read_number(value)
        if self.problem_type == "single_label":
            return self.labels.find_index(value)
        items = cell_list(value, self.label_column)
        if self.positions is not None:
            bits = read_bits(items)
            if bits is None or len(bits) != len(self.positions):
                raise RowProblem(f"the label is not a list of {len(self.positions)} zeros and ones, as in other rows")
            return np.array(sorted(position for position, bit in zip(self.positions, bits, strict=True) if bit),
                            np.int32)
        indices = [self.labels.find_index(item) for item in items]
        if len(set(indices)) < len(indices):
            raise RowProblem("a label twice in a list of labels")
        return np.array(sorted(indices), np.int32)

    def _columns(self, label: Any, full: Encoding, truncated: Encoding, counts: Counter) -> dict[str, Any]:
        return {"label": label}


def text_of(row: dict[str, Any], column: str) -> str:
    """Return the text in a column. Raises RowProblem if there is none."""
    if column not in row:
        raise RowProblem(f"{column} is missing")
    text = as_text(row[column], column)
    check_unicode(text)
    if not text.strip():
        raise RowProblem(f"empty {column}")
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Words with tags.


@dataclass
class TokenEncoder(LabelledEncoder):
    """Encodes lists of words, each with a tag, which labels its first token.

    Args:
        tokens_column: Column of the words.
        tags_column: Column of their tags.
        labels: Tags by their names.
        label_all_tokens: Label all tokens of a word: for a B- tag, later ones get its I- tag if that exists, as in
            transformers' run_ner.
        prefix: Prefix of each word: a space for byte tokenizers, in which a word inside a text has one.
    """

    tokens_column: str
    tags_column: str
    labels: Labels
    label_all_tokens: bool
    prefix: str

    are_words: ClassVar[bool] = True
    schema: ClassVar[dict[str, type]] = {**LabelledEncoder.schema, "labels": Ragged, "words": Ragged, "tags": Ragged}

    def __post_init__(self) -> None:
        indices = {name: index for index, name in enumerate(self.labels.names)}
        # [K]: tag of a word's other tokens.
        self._inner = np.array([indices.get(f"I-{name.removeprefix('B-')}", index) if name.startswith("B-") else index
                                for name, index in indices.items()], np.int32)

    def _text(self, row: dict[str, Any]) -> list[str]:
        if self.tokens_column not in row:
            raise RowProblem(f"{self.tokens_column} is missing")
        words = [as_text(word, "a word") for word in cell_list(row[self.tokens_column], self.tokens_column)]
        check_unicode(words)
        if not any(word.strip() for word in words):
            raise RowProblem(f"empty {self.tokens_column}")
        return [self.prefix + word if word and word[0] != self.prefix else word for word in words]

    def _label(self, row: dict[str, Any]) -> np.ndarray:
        """Return the index of each word's tag."""
        num_words = len(cell_list(row[self.tokens_column], self.tokens_column))
        try:
            if self.tags_column not in row:
                raise RowProblem(f"{self.tags_column} is missing")
            indices = [self.labels.find_index(tag) for tag in cell_list(row[self.tags_column], self.tags_column)]
            if len(indices) != num_words:
                raise RowProblem("the numbers of words and tags differ")
            return np.array(indices, np.int32)
        except RowProblem:
            if not self.prompts_only:
                raise
            return np.full(num_words, IGNORED, np.int32)

    def _columns(self, label: np.ndarray, full: Encoding, truncated: Encoding, counts: Counter) -> dict[str, Any]:
        """Return `labels` [T], the tag of each token; `words` [T], the index of its word, -1 for special tokens; and
        `tags` [W], the tag of each word, including words without tokens.
        """
        words = word_indices(truncated)
        firsts, inside = first_token_positions(words), words >= 0
        labels = np.full(len(words), IGNORED, np.int32)
        tags = label[words[inside]]
        if self.label_all_tokens:
            labels[inside] = np.where(tags == IGNORED, IGNORED, self._inner[np.maximum(tags, 0)])
        labels[firsts] = label[words[firsts]]
        num_found = len(first_token_positions(word_indices(full)))
        counts["words"] += len(label)
        counts["words_cut"] += num_found - len(firsts)
        counts["words_without_token"] += len(label) - num_found
        return {"labels": labels, "words": words, "tags": label}


def word_indices(encoding: Encoding) -> np.ndarray:
    """Return the index of each token's word [T], -1 for special tokens."""
    return np.array([-1 if word is None else word for word in encoding.word_ids], np.int32)


def first_token_positions(words: np.ndarray) -> np.ndarray:
    """Return the position of each word's first token, from the word indices of all tokens [T]."""
    return np.flatnonzero((words >= 0) & (words != np.concatenate([[-1], words[:-1]])))


def word_prefix(backend: str) -> str:
    """Return the prefix with which a word gets the same tokens as inside a text.

    Byte tokenizers split words at spaces, which belong to the next word. transformers' `add_prefix_space` affects
    neither pre-tokenizers inside a sequence nor text that a pattern has split; a space works for all.

    Args:
        backend: JSON of the tokenizer's backend.
    """
    pre_tokenizer = json.loads(backend)["pre_tokenizer"] or {}
    return " " if any(part.get("type") == "ByteLevel" for part in pre_tokenizer.get("pretokenizers",
                                                                                    [pre_tokenizer])) else ""
