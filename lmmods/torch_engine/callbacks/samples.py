"""Samples, generated on Lightning."""
import lightning as L
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lmmods.evaluation.samples import SampleWriter
from lmmods.torch_engine.callbacks.eval_mode import undisturbed
from lmmods.torch_engine.tasks.causal_task import generation_config


class Samples(SampleWriter, L.Callback):
    """Sample without side effects on training."""

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.prepare(trainer.datamodule, module.max_positions())

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """After StartReport has made the run folder ready."""
        if trainer.is_global_zero:
            self.begin(trainer.run_folder, trainer.global_step if trainer.resumed_from else None)

    def sample(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """All processes must call this: sharded parameters are gathered from all."""
        step, data = trainer.global_step, trainer.datamodule
        with undisturbed(trainer, module):
            tokens = self._generate(trainer, module)
            if trainer.is_global_zero:
                self.write(step, data.tokenizer.batch_decode(tokens, skip_special_tokens=True), trainer.loggers)
        self.latest_step = step

    def _generate(self, trainer: L.Trainer, module: L.LightningModule) -> Tensor:
        """New tokens [prompts, T_new]."""
        from lmmods.torch_engine.nn.decoding import generate

        data = trainer.datamodule
        config = generation_config(self.generation, data.tokenizer, data.stop_token_ids)
        rows = [torch.tensor(ids, device=module.device) for ids in self.prompt_ids]
        ids, mask = (pad_sequence(part, batch_first=True, padding_value=value, padding_side="left") for part, value in
                     ((rows, data.tokenizer.pad_token_id), ([torch.ones_like(row) for row in rows], 0)))
        tokens = module(generate, module.model, ids, mask, config, module.device_mesh is not None)
        return tokens[:, ids.shape[1]:]
