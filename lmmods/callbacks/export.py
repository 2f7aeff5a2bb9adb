"""What a finished run leaves: the model folder with its card, and the curves as a picture."""

import csv
import shutil
from pathlib import Path

import lightning as L

from lmmods.card import model_card
from lmmods.console import say
from lmmods.run import commit_folder


class Export(L.Callback):
    """Write model/ and loss.png at the end of training and mark the run completed."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        folder = trainer.run_folder
        temporary = folder.root / ".model"
        if trainer.is_global_zero:
            shutil.rmtree(temporary, ignore_errors=True)
            module.export(temporary)
            trainer.datamodule.tokenizer.save_pretrained(temporary)
            card = model_card(folder, module.pretrained, module.trains_adapter, module.auto_class)
            (temporary / "README.md").write_text(card, encoding="utf-8")
            commit_folder(temporary, folder.model)
            draw_curves(folder.metrics_csv, folder.loss_png)
            folder.completed.touch()
            say(f"Wrote {folder.model}.")
        trainer.strategy.barrier("export")


def draw_curves(metrics_csv: Path, picture: Path) -> None:
    """Draw training and validation loss over the steps; nothing where no step was logged."""
    if not metrics_csv.exists():
        return
    with open(metrics_csv, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, style in (("train/loss", {"linewidth": 1.2}), ("val/loss", {"marker": "o", "markersize": 4})):
        points = [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, **style)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("loss (nats per token)")
    if axes.lines:
        axes.legend()
    figure.savefig(picture, dpi=120)
