"""Encode answers that a reward model scores: conversations or texts, two in a row if they are a pair."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmmods.data.encode.encoder import UNUSED, Encoded, Ragged
from lmmods.data.encode.preferences import PreferenceEncoder
from lmmods.data.read.cells import Values, is_blank
from lmmods.data.read.conversation import RowProblem
from lmmods.data.read.preferences import LABELS, holds_pair


@dataclass
class RewardEncoder:
    """Encodes rows as sequences to be scored.

    Args:
        answers: Renders and truncates answers: as pairs, or one by one for predict, where rows may be chats that end
            in an answer as well as pairs.
        margin_column: Column with the margin of a pair.
        pad_id: Id of the padding token.
    """

    answers: PreferenceEncoder
    margin_column: str
    pad_id: int

    def __call__(self, rows: list[dict[str, Any]]) -> Encoded:
        """Return columns with one entry per pair or answer.

        `input_ids` concatenates the sequences, each a prompt with an answer and its end token; `sizes` has their
        lengths and `longest` the maximum; `wanted` is 0 for a separate rejected answer of a pair, else 1; `margin` is 0
        if the row has none; `truncated`.

        Raises:
            RowError: A row is too long under on_overflow: error.
        """
        positions, usable, margins, dropped = [], [], [], []
        counts: Counter = Counter()
        for index, row in enumerate(rows):
            try:
                margin = self._margin(row)
                selected = self._select_answers(row)
            except RowProblem as problem:
                dropped.append((index, str(problem)))
                continue
            counts["rows_with_margin"] += margin is not None
            if not is_blank(row.get("weight")):
                counts[f"{UNUSED}weight"] += 1
            positions.append(index)
            margins.append(margin or 0.0)
            usable.append(selected)
        encoded = self.answers(usable)
        counts.update(encoded.counts)
        for name in ("labelled_tokens", "terminators_labelled", "rows_weighted"):  # nothing is predicted here
            counts.pop(name, None)
        ids, first = encoded.columns["input_ids"], encoded.columns["chosen_length"]
        second = ids.lengths - first  # 0 where the row is a single answer
        is_pair = second > 0
        sizes = np.stack([first, second], axis=1)
        # transformers' decoders find the last token by its id, so in such rows they take another one.
        lasts = ids.values[np.cumsum(sizes[sizes > 0]) - 1]
        counts["ends_in_padding"] += int((lasts == self.pad_id).sum())
        columns: dict[str, Any] = {
            "input_ids": ids,
            "sizes": Ragged(sizes[sizes > 0].astype(np.int32), 1 + is_pair.astype(np.int64)),
            "longest": sizes.max(axis=1),
            "wanted": encoded.columns["desirable"],
            "margin": np.array(margins, np.float32)[encoded.positions],
            "truncated": encoded.columns["truncated"]}
        dropped += [(positions[index], problem) for index, problem in encoded.dropped]
        return Encoded(columns, np.array(positions, np.int64)[encoded.positions], sorted(dropped), counts)

    def _margin(self, row: Values) -> float | None:
        """Return the margin of a pair, None if the row has none. Raises RowProblem."""
        value: Any = row.get(self.margin_column)
        if self.answers.answers != "pair" or is_blank(value):
            return None
        try:
            margin = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            margin = math.nan
        if not abs(margin) <= np.finfo(np.float32).max:
            raise RowProblem(f"{self.margin_column} is not a number")
        return margin

    def _select_answers(self, row: Values) -> Values:
        """Return the row as `PreferenceEncoder` takes it, without the columns that it does not read.

        Raises:
            RowProblem: A single conversation has no answer at its end.
        """
        row = {name: value for name, value in row.items() if name not in ("weight", self.margin_column)}
        if self.answers.answers == "pair" or holds_pair(row):
            return row
        row = {name: value for name, value in row.items() if name not in LABELS}  # an unwanted answer has a score, too
        if self.answers.conversations.conversation(row).messages[-1]["role"] != "assistant":
            raise RowProblem("the conversation does not end in an answer")
        return {**row, LABELS[0]: True}
