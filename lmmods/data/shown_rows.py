"""Single training rows as the model sees them: the first, the worst, or selected ones."""

from typing import Any, Literal

import numpy as np

from lmmods.core.errors import UserError
from lmmods.data.codec import Codec
from lmmods.data.store.rows import RowSet

Which = Literal["first", "longest", "most_cut", "most_unknown"]


def show_rows(items: Any, rows: RowSet, num_rows: int, which: Which | list[int], unknown_id: int | None,
              codec: Codec) -> list[dict[str, Any]]:
    """Return training rows as the model sees them, as plain lists: {index, input_ids, location}.

    Rows that have them also get the `labels` and `weights` of their tokens, `prompt_length`, and the targets in
    words. A row of several answers comes as one row for each, by `name`.

    Args:
        items: Items of batches, a dataset with `lengths` and `truncated`.
        rows: The rows that the items are built from.
        which: `first`, `longest`, `most_cut` (tokens removed), `most_unknown` (tokens not in the vocabulary), or row
            numbers.
        codec: Describes the targets.

    Raises:
        UserError: A row number does not exist.
    """
    selected = [items[index] for index in _select(items, num_rows, which, unknown_id)]
    return [_show(row, rows, codec) for item in selected for row in _answers(item)]


def _answers(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sequences of an item: one, or one for each answer."""
    return [{**item, **answer} for answer in item["answers"]] if "answers" in item else [item]


def _select(items: Any, num_rows: int, which: Which | list[int], unknown_id: int | None) -> list[int]:
    if isinstance(which, list):
        wrong = [index for index in which if not 0 <= index < len(items)]
        if wrong:
            raise UserError(f"row {wrong[0]} does not exist. Use one of rows 0 to {len(items) - 1}")
        return which
    if which == "first":
        return list(range(min(num_rows, len(items))))
    if which == "most_unknown":
        measure = np.array([(items[index]["input_ids"] == unknown_id).sum() for index in range(len(items))])
    else:
        measure = items.lengths if which == "longest" else items.truncated
    return np.argsort(-measure, kind="stable")[:num_rows].tolist()


def _show(row: dict[str, Any], rows: RowSet, codec: Codec) -> dict[str, Any]:
    # If `index` counts the items themselves, `source` is the index of the row as read.
    ids, index = row["input_ids"].tolist(), int(row.get("source", row["index"]))
    labels = {"labels": row["labels"].tolist()} if "labels" in row else {}
    prompt = {"prompt_length": int(row["prompt_length"])} if "prompt_length" in row else {}
    weights = {"weights": np.unique(row["weight"]).tolist()} if "weight" in row else {}
    name = {"name": row["name"]} if "name" in row else {}
    words = codec.describe_scored(row, rows.source_row(index), rows.info(index))
    return {"index": index, "input_ids": ids, "location": rows.location(index), **labels, **prompt, **weights, **name,
            **({"scored": words} if words else {})}
