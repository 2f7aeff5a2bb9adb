"""predictions.jsonl: what predict found, row by row."""

import json
from typing import Any

import lightning as L
import torch

from lmmods.console import say
from lmmods.run import write_text


class PredictionWriter(L.Callback):
    """Write the row, `prediction_with_input` and `prediction` of every predicted row, in the order of the data."""

    def __init__(self) -> None:
        self._records: dict[int, dict[str, Any]] = {}

    def on_predict_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: torch.Tensor,
                             batch: dict[str, torch.Tensor], *_: Any) -> None:
        data = trainer.datamodule
        prompts = data.tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
        answers = data.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        for index, prompt, answer in zip(batch["index"].tolist(), prompts, answers, strict=True):
            if index >= 0:  # the rest are rows that only even out the processes
                self._records[index] = {**data.example(index), "prediction_with_input": prompt + answer,
                                        "prediction": answer.strip()}

    def on_predict_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        records = self._records
        if trainer.world_size > 1:
            parts: list = [None] * trainer.world_size
            torch.distributed.all_gather_object(parts, records)
            records = {index: record for part in parts for index, record in part.items()}
        if trainer.is_global_zero:
            path = trainer.run_folder.predictions
            lines = [json.dumps(records[index], ensure_ascii=False) + "\n" for index in sorted(records)]
            write_text(path, "".join(lines))
            scores = trainer.datamodule.score({index: record["prediction"] for index, record in records.items()})
            scores = {f"predict/{name}": value for name, value in scores.items()}
            trainer.run_folder.merge_metrics(scores)
            say(f"Wrote {len(records)} rows to {path}. "
                           + "  ".join(f"{name} {value:.4g}" for name, value in scores.items()))
