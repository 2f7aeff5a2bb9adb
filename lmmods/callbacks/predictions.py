"""predictions.jsonl and its companions: what predict found, row by row."""

import json
from typing import Any

import lightning as L
import torch

from lmmods.console import say
from lmmods.modules.window import gather
from lmmods.run import write_json, write_text


class PredictionWriter(L.Callback):
    """Hand the outputs of predict to the data, which turn them into rows, and write these in the order of the data."""

    def __init__(self) -> None:
        self._outputs: dict[int, Any] = {}

    def on_predict_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any,
                             batch: dict[str, torch.Tensor], *_: Any) -> None:
        self._outputs |= trainer.datamodule.outputs_by_index(batch, outputs)

    def on_predict_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        outputs = gather(self._outputs, trainer.world_size)
        if not trainer.is_global_zero:
            return
        found = trainer.datamodule.predictions(outputs)
        folder = trainer.run_folder
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in found.rows]
        write_text(folder.predictions, "".join(lines))
        for name, content in found.files.items():
            write_json(folder.root / name, content)
        scores = {f"predict/{name}": value for name, value in found.scores.items()}
        folder.merge_metrics(scores)
        say(f"Wrote {len(lines)} rows to {folder.predictions}. "
            + "  ".join(f"{name} {value:.4g}" for name, value in scores.items()))

