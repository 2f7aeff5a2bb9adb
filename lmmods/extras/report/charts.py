"""Geometry of SVG charts of several runs: scales, ticks, paths and markers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmmods.extras.report.numbers import format_tick
from lmmods.extras.report.reading import Run

WIDTH, HEIGHT = 360, 214  # SVG units; close to pixels, so that chart text matches the page's font size
LEFT, RIGHT, TOP, BOTTOM = 44, 350, 8, 184
MAX_POINTS = 1000
NUM_MARKERS = 6  # per line

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Group:
    """Chart definition: title, unit and metrics."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    log: bool = False  # logarithmic scale if the values span more than LOG_SPAN
    starts_at_zero: bool = False


LOG_SPAN = 30
GROUPS = (
    Group("Loss", "nats", ("train/loss", "val/loss")),
    Group("Perplexity", "exp of the loss", ("val/perplexity",), log=True),
    Group("Accuracy", "fraction correct", ("val/accuracy",)),
    Group("Reward margin", "", ("train/rewards/margin", "val/rewards/margin")),
    Group("Reward accuracy", "fraction of pairs ranked correctly", ("train/rewards/accuracy", "val/rewards/accuracy")),
    Group("Reward", "", ("train/reward", "val/reward")),
    Group("Answer length", "tokens", ("train/answer_length", "val/answer_length"), starts_at_zero=True),
    Group("Truncated answers", "fraction", ("train/truncated", "val/truncated")),
    Group("Entropy of sampled tokens", "nats", ("train/entropy",)),
    Group("Divergence from the reference", "nats", ("train/kl", "val/kl")),
    Group("Exact match", "", ("val/exact_match",)),
    Group("F1", "", ("val/f1", "val/f1_macro")),
    Group("Learning rate", "", ("train/lr",), starts_at_zero=True),
    Group("Gradient norm", "L2", ("train/grad_norm",), log=True),
    Group("Throughput", "tokens per second", ("train/tokens_per_second",), starts_at_zero=True),
)
NOT_PLOTTED = ("train/tokens", "train/epoch", "train/rows")  # alternative x axes


@dataclass
class Line:
    """One metric of one run.

    Args:
        points: Data points (x, y), in their own units, shown on hover.
        path: `d` attribute of the SVG path; it breaks at non-finite values.
        marks: Positions of the run's markers, in SVG units.
    """

    run: int
    metric: str
    is_dashed: bool
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
        return [(self(value), format_tick(value)) for value in values]


@dataclass
class Chart:
    """Chart of one group over one x axis.

    Args:
        is_thinned: True if a line shows only some of its points.
        has_gaps: True if a line breaks at non-finite values.
    """

    title: str
    unit: str
    x_name: str
    x: Scale
    y: Scale
    lines: list[Line]
    is_thinned: bool
    has_gaps: bool


def build_charts(runs: Sequence[Run]) -> tuple[list[list[Chart]], list[list[Chart]]]:
    """Return the charts of the main metrics and the charts of all others.

    Each metric gets one chart over steps and, if a run counted them, a second one over training tokens. Metrics
    without a finite value are skipped; MMLU subjects are shown as bars instead.
    """
    names = {name: None for run in runs for name in run.curves}
    reward_names = {name.split("/", 1)[1]: None for name in names
                    if name.startswith(("train/rewards/", "val/rewards/"))}
    pass_metrics = sorted((name for name in names if name.startswith("val/pass@")), key=lambda name: (len(name), name))
    groups = [*GROUPS, Group("Prompts answered correctly", "fraction, by number of answers", tuple(pass_metrics)),
              *(Group(f"MMLU {name.split('/')[1]}", "fraction of correct answers", (name,))
                for name in names if name.startswith("mmlu/") and name.endswith("/accuracy"))]
    grouped = {metric for group in groups for metric in group.metrics}
    rewards = [Group(name, "", (f"train/{name}", f"val/{name}")) for name in reward_names
               if not {f"train/{name}", f"val/{name}"} & grouped]
    grouped |= {metric for group in rewards for metric in group.metrics}
    others = [*rewards, *(Group(name, "", (name,)) for name in names
                          if name not in grouped and name not in NOT_PLOTTED and not name.startswith("mmlu/"))]
    return [pair for group in groups if (pair := _build_pair(group, runs))], [
        pair for group in others if (pair := _build_pair(group, runs))]


def thin(points: Points, limit: int = MAX_POINTS) -> Points:
    """Downsample to at most `limit` points: the first, the last, and of each bucket the smallest, largest and one gap.

    This keeps single-step spikes visible. At most `limit` points are returned unchanged.
    """
    if len(points) <= limit:
        return points
    values = np.array([y for _, y in points])
    is_gap = ~np.isfinite(values)
    indices = {0, len(points) - 1}
    for bucket in np.array_split(np.arange(len(points)), (limit - 2) // (3 if is_gap.any() else 2)):
        finite = bucket[~is_gap[bucket]]
        if finite.size:
            indices |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
        indices |= {int(index) for index in bucket[is_gap[bucket]][:1]}
    return [points[index] for index in sorted(indices)]


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
    candidates = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    inside = [value for value in candidates if low <= value <= high]
    if len(inside) <= 6:
        return inside
    powers = [10.0**power for power in range(first, last + 1) if low <= 10.0**power <= high]
    return powers[:: math.ceil(len(powers) / 6)]


def interpolate_tokens(run: Run, steps: Sequence[int]) -> list[float]:
    """Return the training tokens at `steps`: as logged, interpolated in between and extrapolated beyond the last.

    Raises:
        KeyError: The run logged no tokens.
    """
    logged = [(0, 0.0), *((step, tokens) for step, tokens in run.curves["train/tokens"] if step > 0)]
    known_steps, tokens = zip(*logged, strict=True)
    factors = [max(step / known_steps[-1], 1.0) if known_steps[-1] else 1.0 for step in steps]
    return [float(count * factor) for count, factor in zip(np.interp(steps, known_steps, tokens), factors, strict=True)]


def _build_pair(group: Group, runs: Sequence[Run]) -> list[Chart]:
    steps = [(index, metric, [(float(step), value) for step, value in run.curves[metric]])
             for metric in group.metrics for index, run in enumerate(runs) if metric in run.curves]
    tokens = [(index, metric, list(zip(interpolate_tokens(runs[index], [int(x) for x, _ in points]),
                                       [y for _, y in points], strict=True)))
              for index, metric, points in steps if "train/tokens" in runs[index].curves]
    charts = (_build_chart(group, "optimiser step", steps), _build_chart(group, "tokens trained on", tokens))
    return [chart for chart in charts if chart]


def _build_chart(group: Group, x_name: str, curves: list[tuple[int, str, Points]]) -> Chart | None:
    finite = [y for _, _, points in curves for _, y in points if math.isfinite(y)]
    if not finite:
        return None
    log = group.log and min(finite) > 0 and max(finite) / min(finite) > LOG_SPAN
    y = _make_y_scale(min(finite), max(finite), log, group.starts_at_zero)
    x = Scale(0, max(x for _, _, points in curves for x, _ in points) or 1, LEFT, RIGHT)
    lines = []
    for run, metric, points in curves:
        is_dashed = len(group.metrics) > 1 and metric != group.metrics[0]
        thinned = thin(points)
        svg_points = [(x(a), y(b)) if math.isfinite(b) else None for a, b in thinned]
        lines.append(Line(run, metric, is_dashed, thinned, _make_path(svg_points), _place_markers(svg_points, run)))
    lines.sort(key=lambda line: (line.is_dashed, -len(line.points)))  # draw the densest line first, at the bottom
    unit = ", ".join(part for part in (group.unit, "log scale" if log else "") if part)
    is_thinned = any(len(points) > MAX_POINTS for _, _, points in curves)
    has_gaps = any(not math.isfinite(y) for _, _, points in curves for _, y in points)
    return Chart(group.title, unit, x_name, x, y, lines, is_thinned, has_gaps)


def _make_y_scale(low: float, high: float, log: bool, starts_at_zero: bool) -> Scale:
    if log:
        return Scale(low / 1.1, high * 1.1, BOTTOM, TOP, log=True)
    low = min(low, 0.0) if starts_at_zero else low
    margin = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    return Scale(low if starts_at_zero and low == 0 else low - margin, high + margin, BOTTOM, TOP)


def _make_path(points: list[tuple[float, float] | None]) -> str:
    """Return a path that breaks at None; a lone point becomes a zero-length line, which round caps show as a dot."""
    segments: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point is None:
            segments.append([])
        else:
            segments[-1].append(point)
    return "".join("M" + "L".join(f"{x:g} {y:g}" for x, y in (segment if len(segment) > 1 else segment * 2))
                   for segment in segments if segment)


def _place_markers(svg_points: list[tuple[float, float] | None], run: int) -> Points:
    """Return marker positions: all points of a short line, some of a long one, offset by run to avoid overlaps."""
    points = [point for point in svg_points if point is not None]
    if len(points) <= 2 * NUM_MARKERS:
        return points
    stride = len(points) // NUM_MARKERS
    return points[(stride // 2 + run * stride // 5) % stride :: stride]
