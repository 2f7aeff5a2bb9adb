"""Base class of tasks whose metrics are computed once per evaluation, from the network's outputs for all rows."""

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lmmods.torch_engine.nn.loss import LossSums
from lmmods.torch_engine.nn.micro_batches import gather
from lmmods.torch_engine.tasks.base import TaskModule


class RowModule(TaskModule):
    """A task with few outputs per row, from which the data module computes metrics and predictions."""

    row_columns: ClassVar[tuple[str, ...]] = ()  # columns of a batch that `row_output` reads

    def __post_init__(self) -> None:
        super().__post_init__()
        self.eval_metrics = torch.nn.ModuleDict({"loss": self.eval_metrics["loss"]})
        self._outputs: dict[int, Any] = {}  # outputs of the current evaluation by row index

    @abstractmethod
    def outputs(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the network's outputs for a batch, [B, ...]."""

    @abstractmethod
    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> LossSums:
        """Return the summed loss of `outputs`."""

    def row_output(self, output: np.ndarray, row: dict[str, np.ndarray]) -> Any:
        """Convert the output of a row for the data module; `row` has the row's `row_columns`."""
        return output

    def batch_loss(self, batch: dict[str, Tensor], count_correct: bool = False) -> LossSums:
        return self.loss(self.outputs(batch), batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        outputs = self(self.outputs, batch)
        sums = self.loss(outputs, batch)
        self.eval_metrics["loss"].update(sums.total, sums.weight)
        self._outputs |= self._by_row(batch, outputs)

    test_step = validation_step

    def eval_results(self, role: str) -> tuple[dict[str, float], dict[str, Any]]:
        """Return loss and metrics over all ranks, and the files with predictions."""
        loss = self.eval_metrics["loss"]
        results = {"loss": loss.compute().item()}
        loss.reset()
        outputs, self._outputs = gather(self._outputs, self.trainer.world_size), {}
        answers = self.trainer.datamodule.answer(role, outputs)
        return {**results, **answers.scores}, answers.files

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[int, Any]:
        """Return the outputs of each row of the batch, by its index."""
        return self._by_row(batch, self(self.outputs, batch))

    def _by_row(self, batch: dict[str, Tensor], outputs: Tensor) -> dict[int, Any]:
        outputs = outputs.float().cpu().numpy()
        columns = {name: batch[name].cpu().numpy() for name in self.row_columns}
        # Rows with a negative index only give all processes equally many rows.
        return {index: self.row_output(outputs[row], {name: values[row] for name, values in columns.items()})
                for row, index in enumerate(batch["index"].tolist()) if index >= 0}
