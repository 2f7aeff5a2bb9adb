"""Items that know which of the epoch's they are, and which epoch's: by this their dropout is drawn."""

from typing import Any

import numpy as np
from torch.utils.data import Dataset


class NumberedSet(Dataset):
    """Items with `row`, their number, and `draw`. Item -1 is None, a padding row.

    Item number + draw * len(self) is item `number` of that draw: an epoch, or a buffer of a stream.

    Args:
        items: Data set of {input_ids, ...} with `lengths` and `truncated`.
        redrawn: Whether the items themselves differ from draw to draw, and take such numbers.
    """

    def __init__(self, items: Any, redrawn: bool) -> None:
        self.items, self.redrawn = items, redrawn

    def __len__(self) -> int:
        return len(self.items)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each item."""
        return self.items.lengths

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of each item in all its answers."""
        return getattr(self.items, "tokens", self.items.lengths)

    @property
    def num_answers(self) -> int:
        """Sequences of a batch that an item is, none longer than its `lengths`."""
        return getattr(self.items, "num_answers", 1)

    @property
    def truncated(self) -> np.ndarray:
        """Tokens lost from each item."""
        return self.items.truncated

    def __getitem__(self, number: int) -> dict[str, Any] | None:
        if number < 0:
            return None
        draw, place = divmod(number, len(self))
        return {**self.items[number if self.redrawn else place], "row": place, "draw": draw}
