"""Lightning's moments of asking multiple-choice questions."""

from typing import Any

import lightning as L
import torch

from lmmods.evaluation.mmlu import MMLUEvaluator
from lmmods.torch_engine.callbacks.eval_mode import undisturbed
from lmmods.torch_engine.nn.gradient_accumulation import gather
from lmmods.torch_engine.nn.lm_head import choice_logits


class MMLU(MMLUEvaluator, L.Callback):
    """Ask at validations or every so many steps, and at the end; training does not feel it.

    Stands before Checkpoint in the list: a checkpoint is ranked, and holds the metrics, when its questions are asked.
    """

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if stage in ("fit", "validate", "test"):
            self.prepare(trainer.datamodule, module)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if module.accumulation.is_open or self.at_validation and trainer.validation_is_due():
            return
        if self.is_due(trainer.global_step, trainer.is_last_batch_of_run()):
            self._ask(trainer, module)

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Later, Lightning lets no callback log what others may monitor."""
        wanted = self.at_validation if trainer.state.fn == "fit" else self.is_on
        if wanted and not trainer.sanity_checking:
            self._ask(trainer, module)

    def on_test_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.is_on:
            self._ask(trainer, module)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Where a callback has stopped the run, no batch was known to be the last."""
        if self.is_due(trainer.global_step, ends=True):
            found = self._evaluate(trainer, module)
            trainer.log_evaluation(found)
            if trainer.is_global_zero:
                trainer.run_folder.merge_metrics(found)

    def _ask(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        found = self._evaluate(trainer, module)
        for name, value in found.items():  # for those who monitor it
            module.log(name, value, logger=False, rank_zero_only=False)
        trainer.log_evaluation(found)
        if trainer.state.fn != "fit" and trainer.is_global_zero:
            trainer.run_folder.merge_metrics(found)

    def _evaluate(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, float]:
        """All processes must call this: each asks a part, and sharded parameters are gathered from all."""
        logits: dict[int, Any] = {}
        with undisturbed(trainer, module):
            choices = torch.from_numpy(self.choice_ids).to(module.device)
            for batch in self.batches(trainer.datamodule, trainer.global_rank, trainer.world_size):
                batch = {name: part.to(module.device) for name, part in batch.items()}
                found = module(choice_logits, module.model, module.head, batch, choices).cpu().numpy()
                logits |= {index: row for index, row in zip(batch["index"].tolist(), found) if index >= 0}
            logits = gather(logits, trainer.world_size)
        return self.score(trainer.global_step, logits)
