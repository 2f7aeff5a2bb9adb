"""Masked language modelling on JAX: from scratch, full fine-tuning or adapters."""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from jax_engine.distributed.loss import LossSums
from jax_engine.distributed.prefetch import GlobalBatch
from jax_engine.distributed.steps import Steps
from jax_engine.distributed.tree import Tree
from jax_engine.tasks.base import Task, Weights
from lmmods.data.base import DataModule
from lmmods.recipe.tasks.mlm import MLMFields


class MLM(MLMFields, Task):
    """Train an encoder to predict masked tokens; the data module masks. Loss and accuracy are over masked positions."""

    head = "masked"
    auto_class = "AutoModelForMaskedLM"

    def batch_loss(self, params: Tree, rows: dict[str, Array], training: bool, count_correct: bool) -> LossSums:
        hidden = self.network.hidden(params, rows, training)
        teacher = None if self.teacher_network is None else self.teacher_network.states(params, rows)
        return self.build_token_loss(teacher, training)(
            hidden, rows["labels"], partial(self.network.logits, params), self.network.arch.vocab_size, count_correct,
            plain=not self.fast_kernels, on=self.built_for)

    def predict(self, params: Tree, rows: dict[str, Array]) -> tuple[Array, Array]:
        """Return the top-k tokens [N, T, K] of every position, most likely first, and their probabilities."""
        logits = self.network.logits(params, self.network.hidden(params, rows))
        probabilities, tokens = jax.lax.top_k(jax.nn.softmax(logits, -1), min(self.top_k, logits.shape[-1]))
        return tokens, probabilities

    def outputs(self, steps: Steps, weights: Weights, batch: GlobalBatch, datamodule: DataModule, seed: int
                ) -> dict[int, Any]:
        top_k = steps.fetch_rows(steps.predict_step(weights.trainable, weights.frozen, batch.arrays))
        outputs = {}
        for rank in range(len(batch.host["index"])):
            rows = {name: part[rank] for name, part in batch.host.items()}
            # Only masked positions, in row-major order: [masks, K].
            is_masked = rows["input_ids"] == datamodule.tokenizer.mask_token_id
            inputs = {name: rows[name] for name in ("input_ids", "index")}
            outputs |= datamodule.outputs_by_index(inputs, tuple(np.asarray(part[rank])[is_masked] for part in top_k))
        return outputs
