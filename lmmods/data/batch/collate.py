"""Collators: rows of ids to padded batches of int64 tensors [B, T]."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lmmods.core.dropout import token_seeds
from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.store.rows import RowSet

SEEDS = "token_seeds"
PLACES = "teacher_places"  # indices of target tokens, see `number_targets`
DRAWN = "drawn"  # 1 for rows whose answer the model in training has sampled, see `SampledSet`

Collate = Callable[[list], dict[str, torch.Tensor]]


@dataclass
class Collator:
    """Pads to the longest row, rounded up to a multiple.

    A padding row (None) attends to one token, because a softmax over no tokens is NaN, and has no label.

    Args:
        keys: Columns of a batch besides `attention_mask`. `token_seeds` are those of `core.dropout`, for rows of a
            `NumberedSet`; 0 in padding.
        multiple: Lengths are rounded up to a multiple of this, but not above `max_length`.
        side: Side of the padding.
    """

    keys: tuple[str, ...]
    pad_id: int
    multiple: int
    max_length: int
    side: str = "right"
    seed: int = 0  # of `token_seeds`

    def __call__(self, rows: list[dict[str, Any] | None]) -> dict[str, torch.Tensor]:
        """Collate rows with `input_ids`, any of `labels`, `position_ids`, `segment_ids` [T], and numbers per row.

        `loss_weights` [B, T] float32 come from a row's `weight`, a number or [T].
        """
        length = self.pad_length(max((len(row["input_ids"]) for row in rows if row is not None), default=1))
        return {key: torch.from_numpy(self._column(key, rows, length)) for key in (*self.keys, "attention_mask")}

    def pad_length(self, length: int) -> int:
        """Return the padded length of a batch from the length of its longest row."""
        # Rounding stops at `max_length`, but never truncates a row.
        return max(length, min(-(-length // self.multiple) * self.multiple, self.max_length))

    def _column(self, key: str, rows: list[dict[str, Any] | None], length: int) -> np.ndarray:
        if key == SEEDS:
            return self._token_seeds(rows, length)
        if key == "index":
            return np.array([-1 if row is None else row[key] for row in rows], np.int64)
        if key == DRAWN:
            return np.array([0 if row is None else row[key] for row in rows], np.float32)
        if key in ("start_positions", "end_positions"):
            return np.array([IGNORED if row is None else self._move_ends(row, key, length) for row in rows], np.int64)
        # [B, T], filled with padding; rows are written over it.
        fill = {"input_ids": self.pad_id, "labels": IGNORED}.get(key, 0)
        column = np.full((len(rows), length), fill, np.float32 if key == "loss_weights" else np.int64)
        for index, row in enumerate(rows):
            # The one token that a padding row attends to, in its own segment.
            if key == "attention_mask" or row is None and key == "segment_ids":
                value: Any = np.ones(1 if row is None else len(row["input_ids"]), np.int64)
            elif row is None or key == PLACES and key not in row:  # not numbered yet
                continue
            elif key == "loss_weights":
                value = np.broadcast_to(row["weight"], len(row["input_ids"]))
            else:
                value = row[key]
            column[index, slice(len(value)) if self.side == "right" else slice(length - len(value), None)] = value
        return column

    def _token_seeds(self, rows: list[dict[str, Any] | None], length: int) -> np.ndarray:
        """Return token seeds [B, T]; packed rows contain several data rows each."""
        draws, sizes = (np.array([[0 if row is None else get(row)] for row in rows], np.int64)  # [B, 1] each
                        for get in (lambda row: row["draw"], lambda row: len(row["input_ids"])))
        # [T] or, padded on the left, [B, T]: 0 at a row's first token, negative in the padding before it.
        positions = np.arange(length) - (0 if self.side == "right" else length - sizes)
        real = (positions >= 0) & (positions < sizes)
        if any(row is not None and "segment_ids" in row for row in rows):
            # [B, T]: the row and position of each token in its data row, so that packing does not change its mask.
            row_indices, positions = (self._column(key, rows, length) for key in ("row", "position_ids"))
        else:
            row_indices = np.array([[0 if row is None else row["row"]] for row in rows], np.int64)  # [B, 1]
        return np.where(real, token_seeds(self.seed, draws, row_indices, positions), 0).astype(np.int64)

    def _move_ends(self, row: dict[str, Any], key: str, length: int) -> int:
        """Shift a position of the row to the padded row."""
        position = int(row[key])
        return position if self.side == "right" or position == IGNORED else position + length - len(row["input_ids"])


# ---------------------------------------------------------------------------------------------------------------------
# Rows of several answers to batches [B, A, T], so that splitting a batch along B never separates the answers of a row.

class AnswerSet(Dataset):
    """Rows with separate `answers`, {input_ids, labels, name} each. Item -1 is None, a padding row.

    Args:
        rows: Rows with concatenated answers in `input_ids` and `labels`, the first of `chosen_length` tokens.
        num_answers: Answers of each row.
    """

    def __init__(self, rows: RowSet, num_answers: int) -> None:
        self.rows, self.num_answers = rows, num_answers
        first = rows.column("chosen_length")
        self.tokens = rows.lengths  # summed over the answers
        self.lengths = np.maximum(first, self.tokens - first)  # of the longer answer, to which both are padded

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def truncated(self) -> np.ndarray:
        """Tokens truncated from each row."""
        return self.rows.truncated

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        row = self.rows[index]
        if row is None:
            return None
        first = int(row["chosen_length"])
        if first == len(row["input_ids"]):
            parts = {"wanted" if row["desirable"] else "not wanted": slice(None)}
        else:
            parts = {"chosen": slice(first), "rejected": slice(first, None)}
        return {**row, "answers": [
            {"input_ids": row["input_ids"][part], "labels": row["labels"][part], "name": name}
            for name, part in parts.items()]}


class MismatchedSet(AnswerSet):
    """Rows of one answer, with another row's answer to the same prompt as the second, also a target.

    The assignment is drawn once from the seed: the rows form a random cycle, so that each answer is used once. Tokens
    beyond `max_length` are truncated at the end. Raises UserError: there is only one row.
    """

    def __init__(self, rows: RowSet, seed: int, max_length: int) -> None:
        super().__init__(rows, 2)
        if len(rows) < 2:
            raise UserError("model.loss kto compares each answer with another row's, but there is only one row. Add "
                            "rows, or use the loss apo_zero_unpaired")
        # Each row borrows from the next one of the cycle, hence never from itself.
        circle = np.random.default_rng([seed, len(rows)]).permutation(len(rows))
        self._lender = np.empty(len(rows), np.int64)
        self._lender[circle] = np.roll(circle, -1)
        self._max_length = max_length
        prompts = rows.column("prompt_length")
        # The second answer has the row's own prompt and the lender's answer.
        self.tokens = self.tokens + np.minimum(prompts + (rows.lengths - prompts)[self._lender], max_length)
        self.lengths = np.maximum(rows.lengths, self.tokens - rows.lengths)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        item = super().__getitem__(index)
        if item is None:
            return None
        lender, prompt = self.rows[int(self._lender[index])], int(item["prompt_length"])
        columns = {name: np.concatenate([item[name][:prompt], lender[name][lender["prompt_length"]:]])
                   for name in ("input_ids", "labels")}
        answer = {name: values[: self._max_length] for name, values in columns.items()}
        return {**item, "answers": [*item["answers"], {**answer, "name": "answer of another row"}]}


@dataclass
class AnswerCollator:
    """Collates items with `answers`: each column of the inner collator becomes [B, A, T], answer by answer.

    The answers of a row get separate dropout seeds. Batches of single answers contain `desirable` [B], 1 or 0. Unknown
    `reference_logps` [B, A] float32 are NaN, so that they cannot be used by mistake.

    Args:
        collator: Collator of the answers.
        num_answers: A.
        is_paired: True if the answers of a row are a pair.
        keys: Columns of a batch besides those of the answers: `reference_logps`, and `index`, the index of an item (-1
            for padding rows).
    """

    collator: Collate
    num_answers: int
    is_paired: bool
    keys: tuple[str, ...] = ()

    def __call__(self, items: list[dict[str, Any] | None]) -> dict[str, torch.Tensor]:
        rows = [row for item in items for row in self._rows(item)]
        shape = (len(items), self.num_answers)
        # [B * A, ...] -> [B, A, ...]
        batch = {name: column.unflatten(0, shape) for name, column in self.collator(rows).items()}
        if not self.is_paired:
            batch["desirable"] = torch.tensor([0 if item is None else int(item["desirable"]) for item in items])
        if "index" in self.keys:
            batch["index"] = torch.tensor([-1 if item is None else item["row"] for item in items])
        if "reference_logps" in self.keys:
            batch["reference_logps"] = torch.from_numpy(np.stack([self._references(item) for item in items]))
        return batch

    def _references(self, item: dict[str, Any] | None) -> np.ndarray:
        if item is None:
            return np.zeros(self.num_answers, np.float32)
        return item.get("reference_logps", np.full(self.num_answers, np.nan, np.float32))

    def _rows(self, item: dict[str, Any] | None) -> list[dict[str, Any] | None]:
        if item is None:
            return [None] * self.num_answers
        # `row` seeds dropout: distinct numbers for up to two answers per row.
        return [{"weight": item["weight"], "draw": item["draw"], "row": 2 * item["row"] + index, **answer}
                for index, answer in enumerate(item["answers"])]


@dataclass
class LabelCollator:
    """Adds `labels` of whole rows to the batches of a collator.

    Args:
        collator: Collator of the other columns.
        problem_type: What `label` of a row is: a number of a label (int64 [B], IGNORED in padding rows), the numbers of
            several (float32 [B, K], 1 for those) or a value (float32 [B]); the last two are NaN in padding rows.
        num_labels: K.
    """

    collator: Collate
    problem_type: str
    num_labels: int

    def __call__(self, items: list[dict[str, Any] | None]) -> dict[str, torch.Tensor]:
        return {**self.collator(items), "labels": torch.from_numpy(self._labels(items))}

    def _labels(self, items: list[dict[str, Any] | None]) -> np.ndarray:
        if self.problem_type == "single_label":
            return np.array([IGNORED if item is None else item["label"] for item in items], np.int64)
        if self.problem_type == "regression":
            return np.array([np.nan if item is None else item["label"] for item in items], np.float32)
        labels = np.zeros((len(items), self.num_labels), np.float32)
        for index, item in enumerate(items):
            labels[index, slice(None) if item is None else item["label"]] = np.nan if item is None else 1
        return labels
