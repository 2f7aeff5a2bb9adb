"""Items with their number within the epoch and the epoch's number, which seed their dropout."""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lmmods.data.batch.loader import Outline


class NumberedSet(Dataset):
    """Items with `row`, their number, and `draw`. Item -1 is None, a padding row.

    Item number + draw * len(self) is item `number` of that draw: an epoch, or a buffer of a stream.

    Args:
        items: Dataset of {input_ids, ...} with `lengths` and `truncated`.
        redrawn: True if the items themselves differ between draws and are indexed by such numbers.

    Attributes:
        columns: Makes further columns of an item, by name, from its number and the item.
    """

    def __init__(self, items: Any, redrawn: bool) -> None:
        self.items, self.redrawn = items, redrawn
        self.columns: dict[str, Callable[[int, dict[str, Any]], np.ndarray]] = {}

    def __len__(self) -> int:
        return len(self.items)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each item."""
        return self.items.lengths

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of each item, summed over its answers."""
        return getattr(self.items, "tokens", self.items.lengths)

    @property
    def num_answers(self) -> int:
        """Sequences in a batch per item, none longer than its `lengths`."""
        return getattr(self.items, "num_answers", 1)

    @property
    def truncated(self) -> np.ndarray:
        """Tokens truncated from each item."""
        return self.items.truncated

    @property
    def outline(self) -> Outline | None:
        """`outline` of the items; see `Widths`."""
        return getattr(self.items, "outline", None)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        if index < 0:
            return None
        # `row` and `draw` seed dropout, so they depend neither on the order nor on the batch.
        draw, row = divmod(index, len(self))
        item = self.items[index if self.redrawn else row]
        added = {name: make(row, item) for name, make in self.columns.items()}
        return {**item, **added, "row": row, "draw": draw}
