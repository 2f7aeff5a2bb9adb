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


def label_number(value: Any) -> float:
    """Return the number of a cell, for regression. Raises RowProblem: it is none."""
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
    """Return the list of a cell, or of its JSON in a file whose cells are all text. Raises RowProblem: it is none."""
    cells = parse(value, name) if isinstance(value, str) else value
    if not isinstance(cells, list):
        raise RowProblem(f"{name} is not a list")
    return cells


def read_bits(items: list[Any]) -> list[int] | None:
    """Return the zeros and ones of a list; None if it has anything else. Raises RowProblem as `label_name`."""
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
        self._numbers = {name: index for index, name in enumerate(self.names)}
        self._are_words = not any(name.isdecimal() for name in self.names)

    def number(self, value: Any) -> int:
        """Return the number of the label in a cell. Raises RowProblem: there is none, or it is unknown."""
        name = label_name(value, self.class_names)
        if name in self._numbers:
            return self._numbers[name]
        # Where `data.labels` gives names to numbers, these are places in it.
        if self._are_words and name.isdecimal() and int(name) < len(self.names):
            return int(name)
        raise RowProblem("a label that is not in data.labels")


# ---------------------------------------------------------------------------------------------------------------------
# Rows of one sequence each, truncated to the maximum length.


class CuttingTokenizer:
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
        self._whole, self._cut = Tokenizer.from_str(backend), Tokenizer.from_str(backend)
        # Settings saved in tokenizer.json apply to neither.
        for tokenizer in (self._whole, self._cut):
            tokenizer.no_padding()
            tokenizer.no_truncation()
            tokenizer.encode_special_tokens = True  # names of special tokens in a text stay text
        self._cut.enable_truncation(max_length, strategy="longest_first", direction=side)

    def __reduce__(self):  # noqa: ANN204 - pickling would drop encode_special_tokens
        return CuttingTokenizer, self._state

    def encode(self, texts: list[Any], are_words: bool = False) -> list[tuple[Encoding, Encoding]]:
        """Encodings of texts, pairs of texts or (`are_words`) lists of words, each before and after it is truncated."""
        whole = self._whole.encode_batch(texts, is_pretokenized=are_words)
        long = [index for index, encoding in enumerate(whole) if len(encoding) > self.max_length]
        cut = self._cut.encode_batch([texts[index] for index in long], is_pretokenized=are_words)
        shorter = dict(zip(long, cut, strict=True))
        return [(encoding, shorter.get(index, encoding)) for index, encoding in enumerate(whole)]

    def row(self, whole: Encoding, cut: Encoding, counts: Counter) -> dict[str, Any]:
        """Return the columns of a row with `truncated`, the number of tokens cut, and what the report counts.

        Raises:
            RowProblem: The row has no token but special ones.
        """
        if all(whole.special_tokens_mask):
            raise RowProblem("the tokenizer finds no token")
        ids = np.array(cut.ids, np.int32)
        truncated = len(whole) - len(cut)
        counts["tokens"] += len(ids)
        counts["unknown_tokens"] += int((ids == self.unknown_id).sum())
        counts["rows_cut"] += truncated > 0
        counts["tokens_cut"] += truncated
        # transformers' decoders take the last token that is not padding by its id, which is another one in such rows.
        counts["ends_in_padding"] += bool(ids[-1] == self.pad_id)
        return {"input_ids": ids, "token_type_ids": np.array(cut.type_ids, np.int32), "truncated": truncated}


@dataclass
class LabelledEncoder(ABC):
    """Encodes labelled rows, all texts of a batch at once. Abstract.

    Args:
        tokenizer: Encodes and truncates the texts.
        prompts_only: Rows need no labels; those without a usable one get none.
    """

    tokenizer: CuttingTokenizer
    prompts_only: bool

    are_words: ClassVar[bool] = False
    schema: ClassVar[dict[str, type]] = {"input_ids": Ragged, "token_type_ids": Ragged, "truncated": np.int64}

    def __call__(self, rows: list[dict[str, Any]]) -> Encoded:
        """The columns of `schema`."""
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
        kept = []
        encoded = self.tokenizer.encode(texts, self.are_words)
        for index, label, (whole, cut) in zip(positions, labels, encoded, strict=True):
            try:
                values = self.tokenizer.row(whole, cut, counts) | self._columns(label, whole, cut, counts)
            except RowProblem as problem:
                dropped.append((index, str(problem)))
                continue
            kept.append(index)
            for name, value in values.items():
                columns[name].append(value)
        arrays: dict[str, Any] = {
            name: Ragged.from_lists(column) if kind is Ragged else np.array(column, kind)
            for (name, column), kind in zip(columns.items(), self.schema.values(), strict=True)}
        return Encoded(arrays, np.array(kept, np.int64), sorted(dropped), counts)

    @abstractmethod
    def _text(self, row: dict[str, Any]) -> Any:
        """Text, pair of texts or list of words. Raises RowProblem."""

    @abstractmethod
    def _label(self, row: dict[str, Any]) -> Any:
        """What `_columns` makes of the label or the tags. Raises RowProblem."""

    @abstractmethod
    def _columns(self, label: Any, whole: Encoding, cut: Encoding, counts: Counter) -> dict[str, Any]:
        """Return the columns of the label, from the encodings before and after the row is truncated."""


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
        positions: If the lists of labels are zeros and ones, number of the label at each position; None if they are
            names.
    """

    text_columns: list[str]
    label_column: str
    problem_type: Kind
    labels: Labels
    positions: list[int] | None = None

    @property
    def schema(self) -> dict[str, type]:  # type: ignore[override]
        """Type of each column. `label` is the number of the label, IGNORED without one; the numbers of all labels of
        the row, or IGNORED alone; or a number, NaN without one.
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
            return label_number(value)
        if self.problem_type == "single_label":
            return self.labels.number(value)
        items = cell_list(value, self.label_column)
        if self.positions is not None:
            bits = read_bits(items)
            if bits is None or len(bits) != len(self.positions):
                raise RowProblem(f"the label is not a list of {len(self.positions)} zeros and ones, as in other rows")
            return np.array(sorted(position for position, bit in zip(self.positions, bits, strict=True) if bit),
                            np.int32)
        numbers = [self.labels.number(item) for item in items]
        if len(set(numbers)) < len(numbers):
            raise RowProblem("a label twice in a list of labels")
        return np.array(sorted(numbers), np.int32)

    def _columns(self, label: Any, whole: Encoding, cut: Encoding, counts: Counter) -> dict[str, Any]:
        return {"label": label}


def text_of(row: dict[str, Any], column: str) -> str:
    """Text in a column. Raises RowProblem: there is none."""
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
    """Encodes lists of words, each with a tag that its first token bears.

    Args:
        tokens_column: Column of the words.
        tags_column: Column of their tags.
        labels: Tags by their names.
        label_all_tokens: The other tokens of a word bear its tag, too: I- where that is B- and the tag exists, as
            transformers' run_ner has it.
        prefix: Put before each word: a space for tokenizers of bytes, in which a word inside of a text has one.
    """

    tokens_column: str
    tags_column: str
    labels: Labels
    label_all_tokens: bool
    prefix: str

    are_words: ClassVar[bool] = True
    schema: ClassVar[dict[str, type]] = {**LabelledEncoder.schema, "labels": Ragged, "words": Ragged, "tags": Ragged}

    def __post_init__(self) -> None:
        numbers = {name: index for index, name in enumerate(self.labels.names)}
        # [K]: tag of a word's other tokens.
        self._inner = np.array([numbers.get(f"I-{name.removeprefix('B-')}", index) if name.startswith("B-") else index
                                for name, index in numbers.items()], np.int32)

    def _text(self, row: dict[str, Any]) -> list[str]:
        if self.tokens_column not in row:
            raise RowProblem(f"{self.tokens_column} is missing")
        words = [as_text(word, "a word") for word in cell_list(row[self.tokens_column], self.tokens_column)]
        check_unicode(words)
        if not any(word.strip() for word in words):
            raise RowProblem(f"empty {self.tokens_column}")
        return [self.prefix + word if word and word[0] != self.prefix else word for word in words]

    def _label(self, row: dict[str, Any]) -> np.ndarray:
        """Return the number of each word's tag."""
        num_words = len(cell_list(row[self.tokens_column], self.tokens_column))
        try:
            if self.tags_column not in row:
                raise RowProblem(f"{self.tags_column} is missing")
            numbers = [self.labels.number(tag) for tag in cell_list(row[self.tags_column], self.tags_column)]
            if len(numbers) != num_words:
                raise RowProblem("the numbers of words and tags differ")
            return np.array(numbers, np.int32)
        except RowProblem:
            if not self.prompts_only:
                raise
            return np.full(num_words, IGNORED, np.int32)

    def _columns(self, label: np.ndarray, whole: Encoding, cut: Encoding, counts: Counter) -> dict[str, Any]:
        """`labels`: the tag that each token bears; `words`: the number of its word, -1 for special tokens. Both [T].
        `tags`: the tag of each word, [W], also of those that no token is of.
        """
        words = word_numbers(cut)
        firsts, inside = first_tokens(words), words >= 0
        labels = np.full(len(words), IGNORED, np.int32)
        tags = label[words[inside]]
        if self.label_all_tokens:
            labels[inside] = np.where(tags == IGNORED, IGNORED, self._inner[np.maximum(tags, 0)])
        labels[firsts] = label[words[firsts]]
        num_found = len(first_tokens(word_numbers(whole)))
        counts["words"] += len(label)
        counts["words_cut"] += num_found - len(firsts)
        counts["words_without_token"] += len(label) - num_found
        return {"labels": labels, "words": words, "tags": label}


def word_numbers(encoding: Encoding) -> np.ndarray:
    """Return the number of the word of each token [T], -1 for special tokens."""
    return np.array([-1 if word is None else word for word in encoding.word_ids], np.int32)


def first_tokens(words: np.ndarray) -> np.ndarray:
    """Places of the first token of each word, from the numbers of the words of all tokens [T]."""
    return np.flatnonzero((words >= 0) & (words != np.concatenate([[-1], words[:-1]])))


def word_prefix(backend: str) -> str:
    """Return what a tokenizer must see before a word for the token that the word has inside of a text.

    Tokenizers of bytes part words at spaces, which belong to the word behind them. transformers asks for
    `add_prefix_space`, whose setting reaches neither the pre-tokenizers inside of a sequence nor text that a pattern
    has split before; a space does the same for all of them.

    Args:
        backend: JSON of the tokenizer's backend.
    """
    pre_tokenizer = json.loads(backend)["pre_tokenizer"] or {}
    return " " if any(part.get("type") == "ByteLevel" for part in pre_tokenizer.get("pretokenizers",
                                                                                    [pre_tokenizer])) else ""
