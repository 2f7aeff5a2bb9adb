"""Rows of several sequences, which a model scores one by one, to batches [B, A, T]."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from lmmods.data.batch.collate import Collate
from lmmods.data.store.rows import RowSet

LISTS = ("input_ids", "token_type_ids")  # columns with a value for each token


class SequenceSet(Dataset):
    """Rows with separate `answers`, {input_ids, name, ...} each. Item -1 is None, a padding row.

    Args:
        rows: Rows with concatenated sequences in `LISTS`, their `sizes` in tokens, and the `longest` of these.
        name_of: Names a sequence for `inspect`, from the row and the sequence's index in it.
    """

    def __init__(self, rows: RowSet, name_of: Callable[[dict[str, Any], int], str]) -> None:
        self.rows, self._name_of = rows, name_of
        self.lengths = rows.column("longest")  # to which all sequences of a row are padded
        self.tokens = rows.lengths  # summed over the sequences
        self.counts = rows.column("sizes")  # sequences of each row
        self.num_answers = int(self.counts.max(initial=1))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def truncated(self) -> np.ndarray:
        """Tokens truncated from each row."""
        return self.rows.truncated

    def __getitem__(self, index: int) -> Any:  # a dictionary, unless the index is -1
        row = self.rows[index]
        if row is None:
            return None
        ends = np.cumsum(row["sizes"])
        parts = [slice(end - size, end) for size, end in zip(row["sizes"], ends, strict=True)]
        answers = [{name: row[name][part] for name in LISTS if name in row} for part in parts]
        # Numbers of sequences, which seed their dropout, are places among `num_answers` for each row.
        return {**row, "num_answers": self.num_answers, "answers": [
            {**answer, "place": position, "name": self._name_of(row, position)} for position,
            answer in enumerate(answers)]}


class SingleSequences(Dataset):
    """Each sequence of some rows as a separate item, in the order of the rows."""

    def __init__(self, rows: SequenceSet) -> None:
        self.rows = rows
        self.row_of = np.repeat(np.arange(len(rows)), rows.counts)  # the row of each sequence
        self.place_of = np.arange(len(self.row_of)) - np.repeat(np.cumsum(rows.counts) - rows.counts, rows.counts)
        self.lengths = rows.lengths[self.row_of]  # no sequence is longer

    def __len__(self) -> int:
        return len(self.row_of)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        if index < 0:
            return None
        row = self.rows[int(self.row_of[index])]
        return {**row, "answers": [row["answers"][int(self.place_of[index])]]}


class RowColumn(NamedTuple):
    """A number of each row in a batch.

    Args:
        key: Its name in an item.
        padding: Value in padding rows.
        dtype: Its type in a batch.
    """

    key: str
    padding: float
    dtype: type


@dataclass
class SequenceCollator:
    """Collates items with `answers`: each column of the inner collator becomes [B, A, T], sequence by sequence.

    Rows with fewer sequences are filled up with padding sequences, which attend to one token. The sequences of a row
    get separate dropout seeds. `index` [B] is the number of an item in its set, -1 for padding rows.

    Args:
        collator: Collator of the sequences.
        num_sequences: A; more if a row of the batch has more.
        columns: Further columns [B], by name.
    """

    collator: Collate
    num_sequences: int
    columns: dict[str, RowColumn] = field(default_factory=dict)

    def __call__(self, items: list[dict[str, Any] | None]) -> dict[str, torch.Tensor]:
        width = max([self.num_sequences, *(len(item["answers"]) for item in items if item is not None)])
        rows = [row for item in items for row in self._rows(item, width)]
        # [B * A, T] -> [B, A, T]
        batch = {name: column.unflatten(0, (len(items), width)) for name, column in self.collator(rows).items()}
        batch["index"] = torch.tensor([-1 if item is None else item["row"] for item in items])
        for name, column in self.columns.items():
            values = [column.padding if item is None else item[column.key] for item in items]
            batch[name] = torch.from_numpy(np.array(values, column.dtype))
        return batch

    def _rows(self, item: dict[str, Any] | None, width: int) -> list[dict[str, Any] | None]:
        if item is None:
            return [None] * width
        rows = [{**answer, "draw": item["draw"], "row": item["num_answers"] * item["row"] + answer["place"]}
                for answer in item["answers"]]
        return [*rows, *[None] * (width - len(rows))]
