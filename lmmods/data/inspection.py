"""Single training rows as the model sees them: the first, the worst, or chosen ones."""

from typing import Any, Literal

import numpy as np

from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.store.rows import RowSet

Which = Literal["first", "longest", "most_cut", "most_unknown"]


def shown_rows(items: Any, rows: RowSet, num_rows: int, which: Which | list[int], unknown_id: int | None
               ) -> list[dict[str, Any]]:
    """Training rows as the model sees them: {index, input_ids, labels, location}, as plain lists, and `prompt_length`
    and the `weights` of its tokens where a row has them. A row of several answers comes as one for each, by `name`.

    Args:
        items: Rows of batches, a data set with `lengths` and `truncated`.
        rows: The rows that these are made of.
        which: `first`, `longest`, `most_cut` (tokens removed), `most_unknown` (tokens the vocabulary lacks), or places.

    Raises:
        UserError: A place does not exist.
    """
    shown = [items[place] for place in _places(items, num_rows, which, unknown_id)]
    return [_shown_row(row, rows) for item in shown for row in _answers(item)]


def _answers(item: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that an item of a batch is."""
    return [{**item, **answer} for answer in item["answers"]] if "answers" in item else [item]


def _places(items: Any, num_rows: int, which: Which | list[int], unknown_id: int | None) -> list[int]:
    if isinstance(which, list):
        wrong = [place for place in which if not 0 <= place < len(items)]
        if wrong:
            raise UserError(f"row {wrong[0]} does not exist; the training set has rows 0 to {len(items) - 1}")
        return which
    if which == "first":
        return list(range(min(num_rows, len(items))))
    if which == "most_unknown":
        measure = np.array([(items[place]["input_ids"] == unknown_id).sum() for place in range(len(items))])
    else:
        measure = items.lengths if which == "longest" else items.truncated
    return np.argsort(-measure, kind="stable")[:num_rows].tolist()


def _shown_row(row: dict[str, Any], rows: RowSet) -> dict[str, Any]:
    ids, index = row["input_ids"].tolist(), int(row["index"])
    labels = row["labels"].tolist() if "labels" in row else [IGNORED] * len(ids)
    prompt = {"prompt_length": int(row["prompt_length"])} if "prompt_length" in row else {}
    weights = {"weights": np.unique(row["weight"]).tolist()} if "weight" in row else {}
    name = {"name": row["name"]} if "name" in row else {}
    return {"index": index, "input_ids": ids, "labels": labels, "location": rows.location(index), **prompt, **weights,
            **name}
