"""The order of training items whose sources have shares.

Each source is an endless series of passes over its items, each pass in a new random order. An epoch takes the next
items of each source, as many as its share requires, and spreads them evenly. So the order is a pure function of seed
and epoch, and over a run the items of a source are used equally often, give or take once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lmmods.core.errors import UserError
from lmmods.data.order.sampler import shuffle_rows
from lmmods.recipe.mixing import Mixing

MAX_ITEMS = 2**31 - 1  # of an epoch, whose order is in memory


class Mixture:
    """Shares of sources in the course of an epoch.

    Args:
        sizes: Items of each source.
        weights: Weight of each source; None for all of them takes `sizes`.

    Attributes:
        shares: Share of each source in the epoch, [S] float64.
        counts: Items that an epoch takes of each source, [S] int64.

    Raises:
        UserError: A source has no items, or an epoch would have more than `MAX_ITEMS`.
    """

    def __init__(self, settings: Mixing, sizes: Sequence[int], weights: Sequence[float | None]) -> None:
        if 0 in sizes:
            raise UserError(f"data.mixing: source {list(sizes).index(0) + 1} has no rows to train on. Remove it from "
                            "data.source")
        self._sizes = np.array(sizes, np.int64)
        if settings.schedule is None:
            totals = [size if weight is None else weight for size, weight in zip(sizes, weights, strict=True)]
            points = [(0.0, settings.shares(totals))]
        else:
            points = [(point.at, settings.shares(point.weights)) for point in settings.schedule]
        if points[-1][0] < 1:
            points.append((1.0, points[-1][1]))  # the last shares stay to the end
        self._times = np.array([time for time, _ in points])
        start_shares, end_shares = (np.array([shares for _, shares in part]) for part in (points[:-1], points[1:]))
        self._start_shares = start_shares
        self._end_shares = end_shares if settings.interpolation == "linear" else start_shares
        # Fraction of the epoch's items that came from a source before each point, [points, S].
        increments = (self._start_shares + self._end_shares) / 2 * np.diff(self._times)[:, None]
        self._cumulative = np.concatenate([np.zeros((1, len(sizes))), np.cumsum(increments, 0)])
        self.shares = self._cumulative[-1] / self._cumulative[-1].sum()
        # The epoch ends with the whole of this source.
        rule = np.argmin if settings.rule == "exhaust" else np.argmax
        last = int(rule(self._sizes / self.shares))
        counts = np.rint(self._sizes[last] * (self.shares / self.shares[last]))
        if counts.sum() > MAX_ITEMS:
            raise UserError(f"data.mixing: with these shares an epoch would have {counts.sum():,.0f} rows. Give more "
                            f"weight to source {last + 1}, or set data.mixing.rule to exhaust")
        self.counts = np.maximum(counts, 1).astype(np.int64)

    @property
    def passes(self) -> int:
        """Passes that an epoch starts at most over one source."""
        return int((-(-self.counts // self._sizes)).max())

    def epoch(self, epoch: int, seed: int, shuffle: bool = True) -> np.ndarray:
        """Return the items of an epoch in order, int64: item index + pass * number of all items.

        Args:
            shuffle: Randomise the order of each pass, and the position of each item within its even part of the epoch.
        """
        random = np.random.default_rng([seed, epoch])
        starts = np.cumsum([0, *self._sizes[:-1]])
        positions, items = [], []
        for source, count in enumerate(self.counts.tolist()):
            within = random.random(count) if shuffle else 0.5
            positions.append(self._position_of(source, (np.arange(count) + within) / count))
            items.append(self._upcoming(source, epoch * count, count, seed, shuffle) + starts[source])
        # Stable: at equal positions the first source comes first.
        return np.concatenate(items)[np.argsort(np.concatenate(positions), kind="stable")]

    def _position_of(self, source: int, part: np.ndarray) -> np.ndarray:
        """Return where in the epoch (0 to 1) these fractions of a source's items have come.

        Shares that change in a straight line give a quadratic equation, in the form that is exact for a slope of 0.
        """
        cumulative = self._cumulative[:, source]
        part = part * cumulative[-1]
        # The last point before; segments in which the source is omitted have none.
        segment = np.minimum(np.searchsorted(cumulative, part, "right") - 1, len(self._start_shares) - 1)
        excess = part - cumulative[segment]
        start_share, length = self._start_shares[segment, source], np.diff(self._times)[segment]
        slope = (self._end_shares[segment, source] - start_share) / length
        denominator = start_share + np.sqrt(np.maximum(start_share**2 + 2 * slope * excess, 0))
        fraction = np.divide(2 * excess, denominator, out=np.zeros_like(excess), where=denominator > 0)
        return self._times[segment] + fraction

    def _upcoming(self, source: int, num_done: int, count: int, seed: int, shuffle: bool) -> np.ndarray:
        """Return the next `count` items of a source after `num_done`, as in `epoch` without the source's offset."""
        size, total = int(self._sizes[source]), int(self._sizes.sum())
        parts = []
        for epoch in range(num_done // size, -(-(num_done + count) // size)):
            # The fourth number distinguishes this seed from those of all other orders.
            random = np.random.default_rng([seed, source, epoch, 1])
            order = shuffle_rows(size, random) if shuffle else np.arange(size)
            parts.append(order + np.int64(epoch * total))
        return np.concatenate(parts)[num_done % size : num_done % size + count]

    def describe(self, names: Sequence[str], rule: str) -> dict[str, Any]:
        """Return the mixture for the data report; plain JSON."""
        return {"rule": rule, "rows_per_epoch": int(self.counts.sum()), "sources": [
            {"path": name, "rows": int(size), "share": float(share), "rows_per_epoch": int(count),
             "passes_per_epoch": count / size}
            for name, size, share, count in zip(names, self._sizes.tolist(), self.shares.tolist(),
                                                self.counts.tolist(), strict=True)]}
