"""Callbacks that evaluate: multiple-choice questions, samples and predictions."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lmmods.core.console import say
from lmmods.evaluation.mmlu import MMLUEvaluator
from lmmods.evaluation.samples import SampleWriter
from lmmods.runs.wandb import log_predictions
from lmmods.torch_engine.nn.lm_head import choice_logits
from lmmods.torch_engine.nn.micro_batches import gather
from lmmods.torch_engine.tasks.causal_task import generation_config


class MMLU(MMLUEvaluator, L.Callback):
    """Evaluation on MMLU questions, without side effects on training."""

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if stage in ("fit", "validate", "test"):
            self.prepare(trainer.datamodule, module)

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.is_on and trainer.state.fn == "validate":
            self._ask_and_save(trainer, module)

    def on_test_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.is_on:
            self._ask_and_save(trainer, module)

    def _ask_and_save(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        scores = self.ask(trainer, module)
        if trainer.is_global_zero:
            trainer.run_folder.merge_metrics(scores)

    def ask(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, float]:
        """Ask the questions, and log the scores for other callbacks to monitor."""
        scores = self.ask_at_end(trainer, module)
        for name, value in scores.items():
            module.log(name, value, logger=False, rank_zero_only=False)
        return scores

    def ask_at_end(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, float]:
        """Ask the questions in hooks in which Lightning does not allow callbacks to log."""
        scores = self._evaluate(trainer, module)
        trainer.log_evaluation(scores)
        return scores

    def _evaluate(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, float]:
        """Answer the questions and return the scores. A collective call: each process answers some of the questions."""
        logits: dict[int, Any] = {}
        with evaluation_mode(trainer, module):
            choices = torch.from_numpy(self.choice_ids).to(module.device)
            for batch in self.batches(trainer.datamodule, trainer.data_rank, trainer.num_data_ranks):
                batch = {name: values.to(module.device) for name, values in batch.items()}
                outputs = module(choice_logits, module.model, module.head, batch, choices).cpu().numpy()
                # Negative indices are filler rows that give all processes equally many batches.
                logits |= {index: row for index, row in zip(batch["index"].tolist(), outputs) if index >= 0}
            logits = gather(logits, trainer.world_size)
        return self.score(trainer.global_step, logits)


# ---------------------------------------------------------------------------------------------------------------------
# Samples.

class Samples(SampleWriter, L.Callback):
    """Generation of samples, without side effects on training."""

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.prepare(trainer.datamodule, module.max_positions())

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        # StartReport has prepared the run folder by now.
        if trainer.is_global_zero:
            self.begin(trainer.run_folder, trainer.global_step if trainer.resumed_from else None)

    def sample(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Generate and write samples. A collective call: sharded parameters are gathered."""
        step, data = trainer.global_step, trainer.datamodule
        with evaluation_mode(trainer, module):
            tokens = self._generate(trainer, module)
            if trainer.is_global_zero:
                self.write(step, data.codec.decode_answers(tokens), trainer.loggers)
        self.latest_step = step

    def _generate(self, trainer: L.Trainer, module: L.LightningModule) -> Tensor:
        """Return the new tokens [prompts, T_new]."""
        from lmmods.torch_engine.nn.capturing import choose_capture
        from lmmods.torch_engine.nn.decoding import generate

        data = trainer.datamodule
        config = generation_config(self.generation, data.tokenizer, data.codec.stop_token_ids)
        rows = [torch.tensor(ids, device=module.device) for ids in self.prompt_ids]
        ids, mask = (pad_sequence(tensors, batch_first=True, padding_value=value, padding_side="left")
                     for tensors, value in ((rows, data.tokenizer.pad_token_id),
                                            ([torch.ones_like(row) for row in rows], 0)))
        search = partial(generate, capture=choose_capture(module.cuda_graphs, module.device))
        tokens = module(search, module.model, ids, mask, config, module.device_mesh is not None)
        return tokens[:, ids.shape[1]:]


# ---------------------------------------------------------------------------------------------------------------------
# Running the network in callbacks, without side effects on training.

@contextmanager
def evaluation_mode(trainer: L.Trainer, module: L.LightningModule) -> Iterator[None]:
    """Disable dropout and gradients, use averaged parameters and pause the stopwatch; restore all of it afterwards."""
    # Also synchronises with the device before the stopwatch is paused.
    module.check_finite(trainer.global_step)
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    with (trainer.stopwatch.paused(), isolate_rng(), torch.no_grad(), module.use_averages(),
          trainer.precision_plugin.forward_context()):
        yield
    for submodule, was_training in modes:
        submodule.training = was_training


# ---------------------------------------------------------------------------------------------------------------------
# predictions.jsonl and other files of predict.

class PredictionWriter(L.Callback):
    """Callback that collects the outputs of predict and writes the data module's rows of them, in data order."""

    def __init__(self) -> None:
        self._outputs: dict[int, Any] = {}

    def on_predict_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any,
                             batch: dict[str, torch.Tensor], *_: Any) -> None:
        self._outputs |= trainer.datamodule.outputs_by_index(batch, outputs)

    def on_predict_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        outputs = gather(trainer.datamodule.complete(self._outputs), trainer.world_size)
        if trainer.is_global_zero:
            predictions = trainer.datamodule.predictions(outputs)
            say(trainer.run_folder.write_predictions(predictions))
            log_predictions(trainer.run_loggers, predictions.rows)
