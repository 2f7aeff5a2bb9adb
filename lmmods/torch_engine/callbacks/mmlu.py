"""Multiple-choice questions, asked on Lightning."""

from typing import Any

import lightning as L
import torch

from lmmods.evaluation.mmlu import MMLUEvaluator
from lmmods.torch_engine.callbacks.eval_mode import undisturbed
from lmmods.torch_engine.nn.gradient_accumulation import gather
from lmmods.torch_engine.nn.lm_head import choice_logits


class MMLU(MMLUEvaluator, L.Callback):
    """Ask without side effects on training."""

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if stage in ("fit", "validate", "test"):
            self.prepare(trainer.datamodule, module)

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.is_on and trainer.state.fn == "validate":
            self._ask_and_keep(trainer, module)

    def on_test_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.is_on:
            self._ask_and_keep(trainer, module)

    def _ask_and_keep(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        found = self.ask(trainer, module)
        if trainer.is_global_zero:
            trainer.run_folder.merge_metrics(found)

    def ask(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, float]:
        """Ask, and log what others may monitor."""
        found = self.ask_at_end(trainer, module)
        for name, value in found.items():
            module.log(name, value, logger=False, rank_zero_only=False)
        return found

    def ask_at_end(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, float]:
        """Ask where Lightning lets no callback log any more."""
        found = self._evaluate(trainer, module)
        trainer.log_evaluation(found)
        return found

    def _evaluate(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, float]:
        """All processes must call this: each asks a part, and sharded parameters are gathered from all."""
        logits: dict[int, Any] = {}
        with undisturbed(trainer, module):
            choices = torch.from_numpy(self.choice_ids).to(module.device)
            for batch in self.batches(trainer.datamodule, trainer.data_rank, trainer.num_data_ranks):
                batch = {name: part.to(module.device) for name, part in batch.items()}
                found = module(choice_logits, module.model, module.head, batch, choices).cpu().numpy()
                logits |= {index: row for index, row in zip(batch["index"].tolist(), found) if index >= 0}
            logits = gather(logits, trainer.world_size)
        return self.score(trainer.global_step, logits)
