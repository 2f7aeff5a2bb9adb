"""The order of training items whose sources have shares.

Each source is an endless series of passes over its items, in an order drawn for each pass. An epoch takes the next few
of each source, as many as its share says, and spreads them evenly. So the order is a pure function of seed and epoch,
and over a run the items of a source are used equally often, give or take once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lmmods.core.errors import UserError
from lmmods.data.order.sampler import shuffle_rows
from lmmods.recipe.mixing import Mixing

MOST_ITEMS = 2**31 - 1  # of an epoch, whose order is held in memory


class Mixture:
    """Shares of sources in the course of an epoch.

    Args:
        sizes: Items of each source.
        weights: Weight of each source; None for all of them takes `sizes`.

    Attributes:
        shares: Share of each source in the epoch, [S] float64.
        counts: Items that an epoch takes of each source, [S] int64.

    Raises:
        UserError: A source has no items, or an epoch would have more than `MOST_ITEMS`.
    """

    def __init__(self, settings: Mixing, sizes: Sequence[int], weights: Sequence[float | None]) -> None:
        if 0 in sizes:
            raise UserError(f"data.mixing: source {list(sizes).index(0) + 1} has no rows to train on; remove it from "
                            "data.source")
        self._sizes = np.array(sizes, np.int64)
        if settings.schedule is None:
            totals = [size if weight is None else weight for size, weight in zip(sizes, weights, strict=True)]
            points = [(0.0, settings.shares(totals))]
        else:
            points = [(point.at, settings.shares(point.weights)) for point in settings.schedule]
        if points[-1][0] < 1:
            points.append((1.0, points[-1][1]))  # the last shares hold to the end
        self._ats = np.array([at for at, _ in points])
        begins, ends = (np.array([shares for _, shares in part]) for part in (points[:-1], points[1:]))
        self._begins, self._ends = begins, ends if settings.interpolation == "linear" else begins
        # What a source has had of the epoch's items at each point, as a share of them all, [points, S].
        grown = (self._begins + self._ends) / 2 * np.diff(self._ats)[:, None]
        self._grown = np.concatenate([np.zeros((1, len(sizes))), np.cumsum(grown, 0)])
        self.shares = self._grown[-1] / self._grown[-1].sum()
        # The epoch ends with the whole of this source.
        rule = np.argmin if settings.rule == "exhaust" else np.argmax
        last = int(rule(self._sizes / self.shares))
        counts = np.rint(self._sizes[last] * (self.shares / self.shares[last]))
        if counts.sum() > MOST_ITEMS:
            raise UserError(f"data.mixing: with these shares an epoch would have {counts.sum():,.0f} rows; give more "
                            f"weight to source {last + 1}, or set data.mixing.rule to exhaust")
        self.counts = np.maximum(counts, 1).astype(np.int64)

    @property
    def passes(self) -> int:
        """Passes that an epoch starts at most over one source."""
        return int((-(-self.counts // self._sizes)).max())

    def epoch(self, epoch: int, seed: int, shuffle: bool = True) -> np.ndarray:
        """Return the items of an epoch in order, int64: item number + pass * number of all items.

        Args:
            shuffle: Draw the order of each pass, and where within its even share of the epoch an item comes.
        """
        random = np.random.default_rng([seed, epoch])
        starts = np.cumsum([0, *self._sizes[:-1]])
        positions, numbers = [], []
        for source, count in enumerate(self.counts.tolist()):
            within = random.random(count) if shuffle else 0.5
            positions.append(self._place_of(source, (np.arange(count) + within) / count))
            numbers.append(self._upcoming(source, epoch * count, count, seed, shuffle) + starts[source])
        # Stable: of equal places the first source's comes first.
        return np.concatenate(numbers)[np.argsort(np.concatenate(positions), kind="stable")]

    def _place_of(self, source: int, part: np.ndarray) -> np.ndarray:
        """Return where in the epoch (0 to 1) a source has had these parts of its items.

        Shares that change in a straight line give a quadratic equation, in the form that is exact for a slope of 0.
        """
        grown = self._grown[:, source]
        part = part * grown[-1]
        # The last point before; segments in which the source is omitted have none.
        segment = np.minimum(np.searchsorted(grown, part, "right") - 1, len(self._begins) - 1)
        beyond = part - grown[segment]
        first, length = self._begins[segment, source], np.diff(self._ats)[segment]
        slope = (self._ends[segment, source] - first) / length
        below = first + np.sqrt(np.maximum(first**2 + 2 * slope * beyond, 0))
        return self._ats[segment] + np.divide(2 * beyond, below, out=np.zeros_like(beyond), where=below > 0)

    def _upcoming(self, source: int, done: int, count: int, seed: int, shuffle: bool) -> np.ndarray:
        """Return the next `count` items of a source after `done`, numbered as in `epoch` without those before it."""
        size, total = int(self._sizes[source]), int(self._sizes.sum())
        parts = []
        for epoch in range(done // size, -(-(done + count) // size)):
            # A fourth word, as seeds of other orders differ from this one then whatever their numbers are.
            random = np.random.default_rng([seed, source, epoch, 1])
            order = shuffle_rows(size, random) if shuffle else np.arange(size)
            parts.append(order + np.int64(epoch * total))
        return np.concatenate(parts)[done % size : done % size + count]

    def describe(self, names: Sequence[str], rule: str) -> dict[str, Any]:
        """Return the mixture for the data report; plain JSON."""
        return {"rule": rule, "rows_per_epoch": int(self.counts.sum()), "sources": [
            {"path": name, "rows": int(size), "share": float(share), "rows_per_epoch": int(count),
             "passes_per_epoch": count / size}
            for name, size, share, count in zip(names, self._sizes.tolist(), self.shares.tolist(),
                                                self.counts.tolist(), strict=True)]}
