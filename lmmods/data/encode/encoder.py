"""Encoders: batches of rows to token ids."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from tokenizers import AddedToken, Tokenizer

from lmmods.core.errors import UserError
from lmmods.data.encode.tokenizer import content_tags
from lmmods.data.read.cells import as_text, check_unicode
from lmmods.data.read.conversation import RowProblem
from lmmods.data.read.readers import Row

EXAMPLES_PER_REASON = 3
UNUSED = "unused:"  # prefix of counts; the rest names a key that rows fill but nothing uses
SPELLED = "spelled:"  # prefix of counts; the rest names a special token spelled in a target text


class Ragged(NamedTuple):
    """A column of lists: all values concatenated, and the length of each list."""

    values: np.ndarray
    lengths: np.ndarray

    @classmethod
    def from_lists(cls, lists: list[np.ndarray]) -> "Ragged":
        """Build the column from int32 arrays."""
        values = np.concatenate(lists) if lists else np.empty(0, np.int32)
        return cls(values.astype(np.int32, copy=False), np.array([len(item) for item in lists], np.int64))


class Encoded(NamedTuple):
    """The result of encoding a batch of rows.

    Args:
        columns: `input_ids` (Ragged) and others (Ragged or an array), one entry per kept row.
        positions: Position in the batch of each kept row.
        dropped: (position in the batch, reason) of each other row.
        counts: Counts by name, for the report.
    """

    columns: dict[str, Any]
    positions: np.ndarray
    dropped: list[tuple[int, str]]
    counts: Counter


class RowError(Exception):
    """A row that must stop the run: RowError(position in the batch, message)."""


class Encoder(Protocol):
    """Converts rows to token ids; picklable. Raises RowError."""

    def __call__(self, rows: list[dict[str, Any]]) -> Encoded: ...


class RowCounts:
    """Sums up what encoders counted and dropped."""

    def __init__(self) -> None:
        self.num_rows = self.num_kept = 0
        self._counts: Counter = Counter()
        self._dropped: dict[str, dict[str, Any]] = {}

    def add(self, batch: list[Row], encoded: Encoded) -> None:
        """Count one batch."""
        self.num_rows += len(batch)
        self.num_kept += len(encoded.positions)
        for index, reason in encoded.dropped:
            self.drop(batch[index], reason)
        self._counts.update(encoded.counts)

    def drop(self, row: Row, reason: str) -> None:
        """Note why a row is not used."""
        entry = self._dropped.setdefault(reason, {"rows": 0, "first": []})
        entry["rows"] += 1
        if len(entry["first"]) < EXAMPLES_PER_REASON:
            entry["first"].append(f"{row.file}:{row.line}")

    def summary(self) -> dict[str, Any]:
        """Counts, and for each reason the number of dropped rows and their first locations; plain JSON."""
        return {"rows_read": self.num_rows, "rows_kept": self.num_kept, "dropped": self._dropped,
                "counts": dict(self._counts)}


def describe_dropped(info: dict[str, Any]) -> str:
    """Describe the number of rows read and the reasons for dropping rows, the most frequent first, from
    `RowCounts.summary`.
    """
    entries = sorted(info["dropped"].items(), key=lambda item: -item[1]["rows"])
    reasons = "; ".join(f"{reason} ({entry['rows']} rows, first {entry['first'][0]})" for reason, entry in entries)
    return f"{info['rows_read']} read: {reasons}"


def first_usable_row(rows: Iterable[Row], path: str) -> Row:
    """Return the first row of a source that was not skipped during reading.

    Raises:
        UserError: There is none; the message has the reasons and the first place of each.
    """
    row_counts = RowCounts()
    for row in rows:
        if row.problem is None:
            return row
        row_counts.num_rows += 1
        row_counts.drop(row, row.problem)
    if not row_counts.num_rows:
        raise UserError(f"{path}: the dataset is empty")
    raise UserError(f"{path}: no usable row among {describe_dropped(row_counts.summary())}")


def arrow_column(column: Ragged | np.ndarray) -> pa.Array:
    if not isinstance(column, Ragged):
        return pa.array(column)
    # Arrow's lists: element i is values[offsets[i]:offsets[i + 1]].
    offsets = np.concatenate([[0], np.cumsum(column.lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(column.values))


# ---------------------------------------------------------------------------------------------------------------------
# Text and control tokens to ids, in batches.
#
# Special tokens come only from templates: text is encoded without recognising them, so that user input stays text.
# Content tags such as <think> are recognised everywhere, like added tokens that are not special.
# A response is encoded separately from its prompt, so the prompt at inference is an exact prefix of the training row.
# Tokenizers that prepend a space to every text (Llama's) must not do so within a row; there a text is encoded after a
# line break, whose ids are then removed.

CONTEXTS = ("\n", ".", "?")  # tried in turn: the tokenizer must not merge it with what follows


class Run(NamedTuple):
    """A text or a control token.

    `content` is the text or the token's id; `response` is -1 in prompts, else the number of the response.
    """

    content: str | int
    response: int


class TextEncoder:
    """Encodes runs with a tokenizer's fast backend; picklable, and independent of the tokenizer it is built from."""

    def __init__(self, tokenizer) -> None:
        self.eos_id: int | None = tokenizer.eos_token_id
        self.bos_id: int | None = tokenizer.bos_token_id
        unknown = tokenizer.unk_token_id
        # GPT-2's unknown token is its end token: ends of documents would be counted as unknown.
        self.unk_id: int | None = None if unknown in (self.eos_id, self.bos_id) else unknown
        tags = content_tags(tokenizer)
        self.control: dict[str, int] = {name: token_id for token_id, token in tokenizer.added_tokens_decoder.items()
                                        if token.special and (name := str(token)) not in tags}
        # A copy: the settings below must not change the tokenizer of others.
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        if tags:
            backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in tags])
            backend = Tokenizer.from_str(backend.to_str())  # otherwise they stay special for text
        # Some tokenizers (GPT-2) name their end token as the begin token, but start no text with it.
        first = backend.encode("a").ids[:1]
        self.uses_bos = self.bos_id is not None and (first == [self.bos_id] or self.bos_id != self.eos_id)
        # Settings saved in tokenizer.json would pad or cut rows.
        backend.no_padding()
        backend.no_truncation()
        self._set_backend(backend)
        # The first token shows whether the tokenizer prepends a space, as part of the word or as its own token.
        self._adds_space = backend.encode("a", add_special_tokens=False).tokens[:1] in (["▁a"], ["Ġa"], ["▁"], ["Ġ"])
        self._adds_space_after_control = self._adds_space and self._space_follows_control(backend)
        self._split: dict[str, list[str | int]] = {}
        self.control_names = {token_id: name for name, token_id in self.control.items()}
        # Longest first, so that a token which starts with another is found; "(?!)" matches nothing.
        names = sorted(self.control, key=len, reverse=True)
        self.control_pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")

    def _set_backend(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._backend.encode_special_tokens = True  # names of special tokens in a text stay text

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_backend": self._backend.to_str()}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._set_backend(Tokenizer.from_str(state["_backend"]))  # pickling drops encode_special_tokens

    def _space_follows_control(self, backend: Tokenizer) -> bool:
        if not self.control:
            return True
        backend.encode_special_tokens = False
        # Some tokenizers prepend a space to each text between control tokens, others at the start of a row only.
        joint = backend.encode(next(iter(self.control)) + "a", add_special_tokens=False).ids
        backend.encode_special_tokens = True
        return joint[1:] == self._ids(["a"])[0]

    def split_control(self, text: str) -> list[str | int]:
        """Split template text at its control tokens: non-empty texts and ids, in order."""
        if text not in self._split:
            # Texts of named templates repeat; those of Jinja templates contain the conversation, hence the limit.
            if len(self._split) > 10_000:
                self._split.clear()
            self._split[text] = self._split_control(text)
        return self._split[text]

    def _split_control(self, text: str) -> list[str | int]:
        parts: list[str | int] = []
        position = 0
        for match in self.control_pattern.finditer(text):
            parts += [text[position : match.start()], self.control[match.group()]]
            position = match.end()
        return [part for part in [*parts, text[position:]] if part != ""]

    def runs(self, segments: Iterable[tuple[str, bool, int]]) -> list[Run]:
        """Convert segments (text, True if control tokens are recognised in it, response number) to runs.

        Adjacent texts of one response number become one run, so that they are encoded jointly.
        """
        runs: list[Run] = []
        texts: list[str] = []  # texts of the current run
        run_response = -1
        for text, template, response in segments:
            for part in self.split_control(text) if template else (text,):
                # A control token or another response ends the run: tokens never merge across its border.
                if texts and (response != run_response or isinstance(part, int)):
                    runs.append(Run("".join(texts), run_response))
                    texts = []
                if isinstance(part, int):
                    runs.append(Run(part, response))
                elif part:
                    texts.append(part)
                    run_response = response
        return [*runs, Run("".join(texts), run_response)] if texts else runs

    def count_spelled(self, rows: list[list[Run]]) -> Counter:
        """Count the rows that spell a special token in a response, by `SPELLED` and its name. There it stays text."""
        names = ({match.group() for run in runs if run.response >= 0 and isinstance(run.content, str)
                  for match in self.control_pattern.finditer(run.content)} for runs in rows)
        return Counter(f"{SPELLED}{name}" for spelled in names for name in spelled)

    def encode_rows(self, rows: list[list[Run]], separate_responses: bool = False
                    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids and response numbers (int32, one pair per row) of rows of runs.

        Args:
            separate_responses: Encode each response as a separate text, with the tokenizer's own leading space.
        """
        texts: list[str] = []
        continues: list[bool] = []
        # Collect the texts of all rows for one call of the tokenizer, which encodes them in parallel.
        for runs in rows:
            before: Run | None = None
            for run in runs:
                if isinstance(run.content, str):
                    texts.append(run.content)
                    # The first run of a response.
                    is_first = before is not None and run.response not in (-1, before.response)
                    continues.append(not (separate_responses and is_first) and self._continues(before))
                before = run
        encoded = iter(self._encode(texts, continues))
        return [self._join(runs, encoded) for runs in rows]

    def _continues(self, before: Run | None) -> bool:
        """Return True if a run after `before` must not get the tokenizer's own leading space."""
        if not self._adds_space or before is None:
            return False
        # After text the space would be an extra one; after a control token it depends on the tokenizer.
        return isinstance(before.content, str) or not self._adds_space_after_control

    def _join(self, runs: list[Run], encoded: Iterator[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        # `encoded` contains the texts of all rows in order, so each row takes as many as it has.
        parts = [next(encoded) if isinstance(run.content, str) else (run.content,) for run in runs]
        lengths = [len(part) for part in parts]
        ids = np.fromiter(chain.from_iterable(parts), np.int32, sum(lengths))
        return ids, np.repeat(np.array([run.response for run in runs], np.int32), lengths)

    def _encode(self, texts: list[str], continues: list[bool]) -> list[list[int]]:
        if not any(continues):
            return self._ids(texts)
        context = CONTEXTS[0]
        encoded = self._ids([context + text if flag else text for text, flag in zip(texts, continues, strict=True)])
        # Remove the context's ids. If it was merged with the text, they are not a prefix: try another context.
        removed = self._ids([context])[0]
        for index, (ids, flag) in enumerate(zip(encoded, continues, strict=True)):
            if flag:
                clean = ids[: len(removed)] == removed
                encoded[index] = ids[len(removed) :] if clean else self._continuation(texts[index])
        return encoded

    def _continuation(self, text: str) -> list[int]:
        for context in CONTEXTS[1:]:
            removed, ids = self._ids([context, context + text])
            if ids[: len(removed)] == removed:
                return ids[len(removed) :]
        # Every context merges: accept the leading space.
        return self._ids([text])[0]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return [item.ids for item in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_texts(self, texts: list[str], continues: list[bool]) -> list[list[int]]:
        """Return ids of plain texts. `continues` marks texts that continue another one."""
        return self._encode(texts, [flag and self._adds_space for flag in continues])


# ---------------------------------------------------------------------------------------------------------------------
# Encoding rows of plain text. Does not import torch, so that worker processes start fast.

def ends_of(row: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether a row starts and ends its document.

    Only parts of text files do not. Other rows may have columns of the same names, so the types are checked.
    """
    starts, ends = row.get("starts"), row.get("ends")
    if len(row) == 3 and isinstance(starts, bool) and isinstance(ends, bool):
        return starts, ends
    return True, True


def check_text_column(first: Row, column: str) -> None:
    """Raise UserError if the first row of a source lacks the text column."""
    if column not in first.values:
        raise UserError(f"{first.file}:{first.line}: no column {column!r}; the columns are {', '.join(first.values)}. "
                        "Set data.text_column to one of them")


@dataclass
class TextRowEncoder:
    """Encodes rows of text: `begin`, the text, `end`. A part of a document gets these only at the document's ends.

    Args:
        column: Column of the text.
        text: Text encoder.
        begin: Ids before each document.
        end: Ids after each document.
        max_length: Maximum row length in tokens, truncated on the left; None is no limit.
        gap: Control token that is recognised in the text; None is none.
    """

    column: str
    text: TextEncoder
    begin: list[int]
    end: list[int]
    max_length: int | None = None
    gap: str | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> Encoded:
        """Column `input_ids`."""
        positions, texts, dropped = [], [], []
        for index, row in enumerate(rows):
            try:
                texts.append(self._text(row))
                positions.append(index)
            except RowProblem as problem:
                dropped.append((index, str(problem)))
        usable_rows = [rows[index] for index in positions]
        counts: Counter = Counter()
        encoded = self._encode(texts, usable_rows)
        lists = [self._finish(ids, row, counts) for ids, row in zip(encoded, usable_rows, strict=True)]
        columns = {"input_ids": Ragged.from_lists(lists)}
        counts["tokens"] += len(columns["input_ids"].values)
        counts["unknown_tokens"] += int((columns["input_ids"].values == self.text.unk_id).sum())
        counts["labelled_tokens"] = counts["tokens"]  # all are targets
        counts.update(self.text.count_spelled([[Run(text, 0)] for text in texts]))
        return Encoded(columns, np.array(positions, np.int64), dropped, counts)

    def _text(self, row: dict[str, Any]) -> str:
        if self.column not in row:
            raise RowProblem(f"{self.column} is missing")
        text = as_text(row[self.column], self.column)
        if not text.strip():
            raise RowProblem("empty text")
        check_unicode(text)
        return text

    def _encode(self, texts: list[str], rows: list[dict[str, Any]]) -> list[list[int]]:
        if self.gap is None:
            return self.text.encode_texts(texts, [not ends_of(row)[0] for row in rows])
        gap = Run(self.text.control[self.gap], -1)
        # A gap after every part but the last; parts may be empty.
        parted = [[run for part in text.split(self.gap) for run in (Run(part, -1), gap)][:-1] for text in texts]
        runs = [[run for run in row if run.content != ""] for row in parted]
        return [ids.tolist() for ids, _ in self.text.encode_rows(runs)]

    def _finish(self, ids: list[int], row: dict[str, Any], counts: Counter) -> np.ndarray:
        starts, ends = ends_of(row)
        begin = self.begin if starts else []
        end = self.end if ends else []
        num_truncated = 0 if self.max_length is None else max(0, len(begin) + len(ids) + len(end) - self.max_length)
        counts["rows_cut"] += bool(num_truncated)
        counts["tokens_cut"] += num_truncated
        # The left end is truncated, but `begin` stays.
        return np.array([*begin, *ids[num_truncated:], *end], np.int32)
