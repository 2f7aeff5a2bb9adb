"""Mixing of training sources. Imports no library, as help reads it too."""

import math
from dataclasses import dataclass
from typing import Literal

from lmmods.core.errors import UserError
from lmmods.core.settings import check_set, require


@dataclass
class MixingPoint:
    """Weights of the sources at one point of the epoch.

    Args:
        at: Position in the epoch, from 0.0 (start) to 1.0.
        weights: Weight of each source, in the order of `data.source`; 0 skips a source.
    """

    at: float
    weights: list[float]

    def __post_init__(self) -> None:
        require(0 <= self.at <= 1, "data.mixing.schedule.at", self.at, "a position in the epoch from 0.0 to 1.0")
        require(all(weight >= 0 and math.isfinite(weight) for weight in self.weights) and sum(self.weights) > 0,
                "data.mixing.schedule.weights", self.weights, "numbers of 0 or more, not all of them 0")


@dataclass
class Mixing:
    """Share of each source in the batches of training.

    The share of a source is weight^(1 / temperature), divided by the sum over all sources. Without weights, a source's
    number of rows is its weight.

    Args:
        rule: When an epoch ends. `upsample`: when every source is used up; the others repeat until then. `exhaust`:
            when the first source is used up. `concat`: uses each row as often as its source's weight says, as without
            mixing.
        temperature: 1 keeps the weights; higher values bring the shares closer together, lower ones spread them.
        schedule: Weights that change during an epoch, instead of the weights of the sources: a list of {at, weights},
            the first at 0.0.
        interpolation: Between two points of the schedule, change shares linearly (linear) or only at the second point
            (step).
    """

    rule: Literal["upsample", "exhaust", "concat"] = "upsample"
    temperature: float = 1.0
    schedule: list[MixingPoint] | None = None
    interpolation: Literal["linear", "step"] = "linear"

    def __post_init__(self) -> None:
        check_set(self, "data.mixing")
        require(self.temperature > 0 and math.isfinite(self.temperature), "data.mixing.temperature", self.temperature,
                "more than 0")
        if self.rule == "concat":
            require(self.temperature == 1, "data.mixing.temperature", self.temperature,
                    "1 with data.mixing.rule concat", "data.mixing.rule")
            require(self.schedule is None, "data.mixing.schedule", "set", "null with data.mixing.rule concat",
                    "data.mixing.rule")
        require(self.schedule is not None or self.interpolation == "linear", "data.mixing.interpolation",
                self.interpolation, "linear without data.mixing.schedule", "data.mixing.schedule")
        if self.schedule is not None:
            self.schedule = [MixingPoint(**point) if isinstance(point, dict) else point for point in self.schedule]
            positions = [point.at for point in self.schedule]
            require(positions[:1] == [0] and all(a < b for a, b in zip(positions, positions[1:], strict=False)),
                    "data.mixing.schedule", f"at {positions}", "a list of points that starts at 0.0, each later than "
                    "the one before")

    def check(self, weights: list[float | None], streaming: bool, group_by_length: bool) -> None:
        """Raise UserError unless the shares of these sources are defined.

        Args:
            weights: Weight of each source; None if it has none.
        """
        if self.rule == "concat":
            return
        has_weight = [weight is not None for weight in weights]
        if any(has_weight) and not all(has_weight):
            raise UserError("data.mixing: some sources have a weight and others do not; set it for all, or for none "
                            "to mix them by their numbers of rows", "data.mixing", "data.source")
        if self.schedule is not None:
            if any(has_weight):
                raise UserError("data.mixing.schedule and the weight of a source are both set; keep one of them",
                                "data.mixing.schedule", "data.source")
            wrong = next((point for point in self.schedule if len(point.weights) != len(weights)), None)
            if wrong is not None:
                raise UserError(f"data.mixing.schedule: the point at {wrong.at} has {len(wrong.weights)} weights, but "
                                f"data.source has {len(weights)} sources; set one for each", "data.mixing.schedule",
                                "data.source")
            unused = next((index for index in range(len(weights))
                           if not any(point.weights[index] for point in self._used_points())), None)
            if unused is not None:
                raise UserError(f"data.mixing.schedule: source {unused + 1} has weight 0 throughout the epoch; remove "
                                "it from data.source, or raise its weight", "data.mixing.schedule", "data.source")
            if group_by_length:
                raise UserError("data.mixing.schedule and data.group_by_length both decide the order of rows; keep one "
                                "of them", "data.mixing.schedule", "data.group_by_length")
        if streaming and self.schedule is not None:
            raise UserError("data.mixing.schedule needs the length of an epoch, which a stream does not have; set it "
                            "to null, or data.streaming to false", "data.mixing.schedule", "data.streaming")
        if streaming and not all(has_weight):
            raise UserError("data.mixing of a stream needs a weight for each source, as their numbers of rows are "
                            "unknown; set it as in {path: ..., weight: 0.3}", "data.mixing", "data.source",
                            "data.streaming")

    def _used_points(self) -> list[MixingPoint]:
        """Return the points of the schedule that apply to more than the end of an epoch."""
        points = self.schedule or []
        return points if self.interpolation == "linear" else [point for point in points if point.at < 1]

    def shares(self, weights: list[float]) -> list[float]:
        """Return the shares that these weights give, which sum to 1."""
        largest = max(weights)  # powers of weight / largest do not overflow
        powers = [(weight / largest) ** (1 / self.temperature) for weight in weights]
        return [power / sum(powers) for power in powers]
