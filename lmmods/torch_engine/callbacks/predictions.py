"""predictions.jsonl and its companions: what predict found, row by row."""

from typing import Any

import lightning as L
import torch

from lmmods.core.console import say
from lmmods.runs.wandb import log_predictions
from lmmods.torch_engine.nn.gradient_accumulation import gather


class PredictionWriter(L.Callback):
    """Hand the outputs of predict to the data, which turn them into rows, and write these in the order of the data."""

    def __init__(self) -> None:
        self._outputs: dict[int, Any] = {}

    def on_predict_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any,
                             batch: dict[str, torch.Tensor], *_: Any) -> None:
        self._outputs |= trainer.datamodule.outputs_by_index(batch, outputs)

    def on_predict_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        outputs = gather(self._outputs, trainer.world_size)
        if trainer.is_global_zero:
            found = trainer.datamodule.predictions(outputs)
            say(trainer.run_folder.write_predictions(found))
            log_predictions(trainer.run_loggers, found.rows)
