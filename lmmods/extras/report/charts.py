"""Geometry of SVG charts of several runs: scales, ticks, paths and markers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmmods.extras.report.numbers import short
from lmmods.extras.report.reading import Run

WIDTH, HEIGHT = 360, 214  # SVG units; close to pixels, so that chart text matches the page's font size
LEFT, RIGHT, TOP, BOTTOM = 44, 350, 8, 184
MAX_POINTS = 1000
MARKED = 6  # markers per line

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Group:
    """Chart definition: title, unit and metrics."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    log: bool = False  # logarithmic scale if the values span more than LOG_SPAN
    zero: bool = False  # scale starts at 0


LOG_SPAN = 30
GROUPS = (
    Group("Loss", "nats", ("train/loss", "val/loss")),
    Group("Perplexity", "exp of the loss", ("val/perplexity",), log=True),
    Group("Accuracy", "share that is right", ("val/accuracy",)),
    Group("Reward margin", "", ("train/rewards/margin", "val/rewards/margin")),
    Group("Reward accuracy", "share of pairs in the right order", ("train/rewards/accuracy", "val/rewards/accuracy")),
    Group("Reward", "", ("train/reward", "val/reward")),
    Group("Tokens of an answer", "", ("train/answer_length", "val/answer_length"), zero=True),
    Group("Answers cut off", "share", ("train/truncated", "val/truncated")),
    Group("Entropy of drawn tokens", "nats", ("train/entropy",)),
    Group("Divergence from the reference", "nats", ("train/kl", "val/kl")),
    Group("Exact match", "", ("val/exact_match",)),
    Group("F1", "", ("val/f1", "val/f1_macro")),
    Group("Learning rate", "", ("train/lr",), zero=True),
    Group("Gradient norm", "L2", ("train/grad_norm",), log=True),
    Group("Throughput", "tokens per second", ("train/tokens_per_second",), zero=True),
)
NOT_DRAWN = ("train/tokens", "train/epoch", "train/rows")  # alternative x axes


@dataclass
class Line:
    """One metric of one run, in SVG units.

    Args:
        points: Data points (x, y), shown on hover.
        path: The `d` attribute of the SVG path; it breaks at non-finite values.
        marks: Positions of the run's markers.
    """

    run: int
    metric: str
    dashed: bool
    points: Points
    path: str
    marks: Points


@dataclass
class Scale:
    """Map from values in [`low`, `high`] to SVG units in [`start`, `end`]."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Return (position, label) of about five round values."""
        values = log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high)
        return [(self(value), short(value)) for value in values]


@dataclass
class Chart:
    """Chart of one group over one x axis.

    Args:
        thinned: True if a line shows only some of its points.
        gaps: True if a line breaks at non-finite values.
    """

    title: str
    unit: str
    x_name: str
    x: Scale
    y: Scale
    lines: list[Line]
    thinned: bool
    gaps: bool


def draw_charts(runs: Sequence[Run]) -> tuple[list[list[Chart]], list[list[Chart]]]:
    """Return the charts of the main metrics and those of all others.

    Each metric gets one chart over steps and, if a run counted them, a second one over training tokens. Metrics
    without a finite value are skipped; MMLU subjects are shown as bars instead.
    """
    names = {name: None for run in runs for name in run.curves}
    by_name = {name.split("/", 1)[1]: None for name in names if name.startswith(("train/rewards/", "val/rewards/"))}
    tries = sorted((name for name in names if name.startswith("val/pass@")), key=lambda name: (len(name), name))
    groups = [*GROUPS, Group("Prompts answered rightly", "share, by answers drawn", tuple(tries)),
              *(Group(f"MMLU {name.split('/')[1]}", "share of right answers", (name,))
                for name in names if name.startswith("mmlu/") and name.endswith("/accuracy"))]
    known = {metric for group in groups for metric in group.metrics}
    rewards = [Group(name, "", (f"train/{name}", f"val/{name}")) for name in by_name
               if not {f"train/{name}", f"val/{name}"} & known]
    known |= {metric for group in rewards for metric in group.metrics}
    others = [*rewards, *(Group(name, "", (name,)) for name in names
                          if name not in known and name not in NOT_DRAWN and not name.startswith("mmlu/"))]
    return [both for group in groups if (both := _both(group, runs))], [
        both for group in others if (both := _both(group, runs))]


def thin(points: Points, limit: int = MAX_POINTS) -> Points:
    """Downsample to at most `limit` points: first, last, and the smallest, largest and one gap of each bucket.

    This keeps single-step spikes visible. If there are no more than `limit` points, they are returned unchanged.
    """
    if len(points) <= limit:
        return points
    values = np.array([y for _, y in points])
    gaps = ~np.isfinite(values)
    kept = {0, len(points) - 1}
    for bucket in np.array_split(np.arange(len(points)), (limit - 2) // (3 if gaps.any() else 2)):
        finite = bucket[~gaps[bucket]]
        if finite.size:
            kept |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
        kept |= {int(index) for index in bucket[gaps[bucket]][:1]}
    return [points[index] for index in sorted(kept)]


def linear_ticks(low: float, high: float) -> list[float]:
    """Return at most six multiples of 1, 2 or 5 times a power of ten within [low, high]."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 1 - math.floor(math.log10(step))) for n in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten within [low, high], or only some powers if those are too many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    inside = [value for value in every if low <= value <= high]
    if len(inside) <= 6:
        return inside
    powers = [10.0**power for power in range(first, last + 1) if low <= 10.0**power <= high]
    return powers[:: math.ceil(len(powers) / 6)]


def tokens_at(run: Run, steps: Sequence[int]) -> list[float]:
    """Return the training tokens at `steps`: as logged, interpolated in between and extrapolated beyond the last.

    Raises:
        KeyError: The run logged no tokens.
    """
    logged = [(0, 0.0), *((step, tokens) for step, tokens in run.curves["train/tokens"] if step > 0)]
    known, tokens = zip(*logged, strict=True)
    beyond = [max(step / known[-1], 1.0) if known[-1] else 1.0 for step in steps]
    return [float(count * factor) for count, factor in zip(np.interp(steps, known, tokens), beyond, strict=True)]


def _both(group: Group, runs: Sequence[Run]) -> list[Chart]:
    steps = [(index, metric, [(float(step), value) for step, value in run.curves[metric]])
             for metric in group.metrics for index, run in enumerate(runs) if metric in run.curves]
    tokens = [(index, metric, list(zip(tokens_at(runs[index], [int(x) for x, _ in points]),
                                       [y for _, y in points], strict=True)))
              for index, metric, points in steps if "train/tokens" in runs[index].curves]
    charts = (_chart(group, "optimiser step", steps), _chart(group, "tokens trained on", tokens))
    return [chart for chart in charts if chart]


def _chart(group: Group, x_name: str, curves: list[tuple[int, str, Points]]) -> Chart | None:
    finite = [y for _, _, points in curves for _, y in points if math.isfinite(y)]
    if not finite:
        return None
    log = group.log and min(finite) > 0 and max(finite) / min(finite) > LOG_SPAN
    y = _y_scale(min(finite), max(finite), log, group.zero)
    x = Scale(0, max(x for _, _, points in curves for x, _ in points) or 1, LEFT, RIGHT)
    lines = []
    for run, metric, points in curves:
        dashed = len(group.metrics) > 1 and metric != group.metrics[0]
        kept = thin(points)
        drawn = [(x(a), y(b)) if math.isfinite(b) else None for a, b in kept]
        lines.append(Line(run, metric, dashed, kept, _path(drawn), _marks(drawn, run)))
    lines.sort(key=lambda line: (line.dashed, -len(line.points)))  # draw the densest line first, at the bottom
    unit = ", ".join(part for part in (group.unit, "log scale" if log else "") if part)
    thinned = any(len(points) > MAX_POINTS for _, _, points in curves)
    gaps = any(not math.isfinite(y) for _, _, points in curves for _, y in points)
    return Chart(group.title, unit, x_name, x, y, lines, thinned, gaps)


def _y_scale(low: float, high: float, log: bool, zero: bool) -> Scale:
    if log:
        return Scale(low / 1.1, high * 1.1, BOTTOM, TOP, log=True)
    low = min(low, 0.0) if zero else low
    margin = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    return Scale(low if zero and low == 0 else low - margin, high + margin, BOTTOM, TOP)


def _path(drawn: list[tuple[float, float] | None]) -> str:
    """Return a path that breaks at None; a lone point becomes a zero-length line, which round caps show as a dot."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for point in drawn:
        if point is None:
            pieces.append([])
        else:
            pieces[-1].append(point)
    return "".join("M" + "L".join(f"{x:g} {y:g}" for x, y in (piece if len(piece) > 1 else piece * 2))
                   for piece in pieces if piece)


def _marks(drawn: list[tuple[float, float] | None], run: int) -> Points:
    """Return marker positions: all points of a short line, some of a long one, offset by run to avoid overlaps."""
    points = [point for point in drawn if point is not None]
    if len(points) <= 2 * MARKED:
        return points
    stride = len(points) // MARKED
    return points[(stride // 2 + run * stride // 5) % stride :: stride]
