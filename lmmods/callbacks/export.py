"""What a finished run leaves: the model folder with its card, and the curves as a picture."""

import shutil
from pathlib import Path

import lightning as L

from lmmods.card import model_card
from lmmods.console import say
from lmmods.curves import draw_curves
from lmmods.loggers import log_checkpoint
from lmmods.runs.folder import commit_folder


class Export(L.Callback):
    """Write model/ and loss.png at the end of training and mark the run completed."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        folder = trainer.run_folder
        temporary = folder.root / ".model"
        write_model(trainer, module, temporary)
        if trainer.is_global_zero:
            commit_folder(temporary, folder.model)
            folder.show_curves()
            log_checkpoint(trainer.loggers, folder.find("last"), ends=True)
            folder.completed.touch()
            say(f"Wrote {folder.model}.")
        trainer.strategy.barrier("export")


def write_model(trainer: L.Trainer, module: L.LightningModule, folder: Path) -> None:
    """Write model or adapter, tokenizer and card; what `folder` held before is gone. All processes must call this."""
    if trainer.is_global_zero:
        shutil.rmtree(folder, ignore_errors=True)
    trained = [(param, param.data) for param in module.trainable().values()]
    module.export(folder)  # sharded parameters are gathered by all processes
    for param, data in trained:  # model.save_dtype has rounded them, and training may go on
        param.data = data
    if trainer.is_global_zero:
        trainer.datamodule.tokenizer.save_pretrained(folder)
        card = model_card(trainer.run_folder, module.pretrained, module.trains_adapter, module.auto_class)
        (folder / "README.md").write_text(card, encoding="utf-8")
        draw_curves(trainer.run_folder.metrics_csv, folder / "loss.png")
