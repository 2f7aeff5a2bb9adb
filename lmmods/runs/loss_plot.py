"""loss.png of the run folder."""

from pathlib import Path

from lmmods.runs.repair import read_table


def draw_curves(metrics_csv: Path, picture: Path) -> None:
    """Draw training and validation loss over the steps; nothing where no step was logged."""
    if not metrics_csv.exists():
        return
    rows = read_table(metrics_csv).rows
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, style in (("train/loss", {"linewidth": 1.2}), ("val/loss", {"marker": "o", "markersize": 4})):
        points = [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, **style)
    axes.set_xlabel("optimiser step")
    is_preference = any(row.get("train/rewards/chosen") for row in rows)
    axes.set_ylabel("loss" if is_preference else "loss (nats per token)")
    if axes.lines:
        axes.legend()
    figure.savefig(picture, dpi=120)
