"""The picture of a range test."""

from pathlib import Path

from lmmods.core.errors import UserError
from lmmods.core.files import check_place
from lmmods.core.range_test import RangeTest

AUTHOR = "lmmods find"  # in each of its pictures


def check_replaceable(path: Path) -> None:
    """Raise UserError where the picture would replace a file that is none of ours, or its folder is missing."""
    check_place("--plot", path)
    if path.exists():
        with open(path, "rb") as file:
            head = file.read(4096)
        if AUTHOR.encode() not in head:
            raise UserError(f"--plot {path} is there and is no picture of a range test. Choose another file.")


def draw(test: RangeTest, path: Path) -> None:
    """Losses over learning rates, and the suggestion where there is one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(test.rates, test.losses, linewidth=0.6, alpha=0.5, label="loss of the step")
    axes.plot(test.rates, test.smoothed, linewidth=1.6, label="smoothed")
    try:
        axes.axvline(test.suggestion(), linestyle="--", color="black", label=f"suggestion {test.suggestion():g}")
    except UserError:
        axes.set_title("no suggestion")
    if test.smoothed:
        lowest, highest = min(test.smoothed), max(test.smoothed[: max(len(test.smoothed) // 2, 1)])
        margin = 0.3 * max(highest - lowest, 0.1 * abs(highest))
        axes.set_ylim(lowest - margin, highest + margin)  # the end, where it diverges, would flatten all else
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss (nats per token)")
    axes.legend()
    figure.savefig(path, dpi=120, format="png", metadata={"Software": AUTHOR})
