"""Reinforcement learning with checkable rewards on JAX: full or with adapters."""

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_engine.distributed.loss import LossSums, shift_labels, shift_weights, token_log_probs
from jax_engine.distributed.prefetch import GlobalBatch, halve_lengths
from jax_engine.distributed.steps import Steps
from jax_engine.distributed.tree import Tree
from jax_engine.models.network import Network
from jax_engine.tasks.base import Weights
from jax_engine.tasks.reference import Reference, ReferencedTask
from jax_engine.tasks.running import Run
from jax_engine.tasks.sampler import JaxSampler
from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.base import DataModule
from lmmods.data.batch.rollouts import PlannedRollout
from lmmods.data.grpo import PromptData, Rollouts
from lmmods.recipe.tasks.base import ReadScorer
from lmmods.recipe.tasks.grpo import GRPOFields
from lmmods.rollouts.maker import RolloutMaker, make_plan_function, read_prompt_facts, token_columns
from lmmods.rollouts.policy import Row
from lmmods.rollouts.rollout import Rollout
from lmmods.runs.wandb import RolloutTable

Rows = dict[str, Array]
OF_REFERENCE = "of_reference"  # column of rows that `predict` evaluates under the reference
_OPERATIONS = SimpleNamespace(exp=jnp.exp, where=jnp.where, stop_gradient=jax.lax.stop_gradient)


class GRPO(GRPOFields, ReferencedTask):
    """Train a causal LM on its own answers, weighted by their rewards; predict answers prompts.

    Rows are [N, T]: a prompt with its answer.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._loss = self.policy_loss
        self.metric_names = self._loss.metric_names
        self._run: Any = None
        self._prompt_indices: list[int] = []  # this process's prompts in the current evaluation

    def data_facts(self, command: str, read_scorer: ReadScorer) -> dict[str, Any]:
        return {**super().data_facts(command, read_scorer), **read_prompt_facts(self, command, read_scorer)}

    def link(self, datamodule: DataModule) -> None:
        if not isinstance(datamodule, PromptData):
            raise UserError("model.class_path is GRPO, which needs prompts. Set data.class_path to PromptData.")
        plan = make_plan_function(self, datamodule.shuffle, datamodule.seed)
        datamodule.take_rows_from(Rollouts(plan, token_columns(self), self._make_or_read))

    def begin(self, run: Run) -> None:
        self._run = run

    def end(self) -> None:
        if "_maker" in vars(self):
            self._maker.close()

    # Rollouts --------------------------------------------------------------------------------------------------------

    @cached_property
    def _maker(self) -> RolloutMaker:
        """Maker of the run's rollouts."""
        run, table = self._run, RolloutTable()

        def report(metrics: dict[str, float], rollout: Rollout) -> None:
            run.metrics.fetch()  # the previous steps' metrics
            run.metrics.log(metrics, run.progress.step)
            table.log(run.loggers, rollout.to_records(), run.progress.step, run.metrics.every)

        return RolloutMaker(self, run.data, run.folder, JaxPolicy(run), lambda: run.progress.step, report, run.is_first)

    def _make_or_read(self, planned: PlannedRollout, name: str | None) -> tuple[str, list[dict[str, Any]]] | None:
        # `inspect` and plans do not train.
        return None if self._run is None else self._maker.make_or_read(planned, name)

    # Steps -----------------------------------------------------------------------------------------------------------

    def batch_loss(self, params: Tree, rows: Rows, training: bool, count_correct: bool) -> LossSums:
        """Return the summed loss of N answers and their weight in tokens or answers.

        Columns [N, T] are aligned with `labels`; `advantages` and `idle_weight` are [N].
        """
        logps = self._log_probs(self.network, params, rows, training=training)
        mask = (shift_labels(rows["labels"]) != IGNORED).astype(jnp.float32)
        old, reference, sampler_weights = (
            shift_weights(rows.get(name)) for name in ("old_logps", "reference_logps", "sampler_weights"))
        total, weight, metrics = self._loss.of_rows(_OPERATIONS, logps, mask, rows["advantages"], old, reference,
                                                    sampler_weights)
        return LossSums(total.sum(), weight.sum() + rows["idle_weight"].sum(), metrics={
            name: jnp.stack([value.sum(), count.sum()]) for name, (value, count) in metrics.items()})

    def _log_probs(self, network: Network | Reference, params: Tree, rows: Rows, **options: bool) -> Array:
        """Return the log-probability [N, T] of the token after each position, 0 where it has no label."""
        columns = {name: rows[name] for name in ("input_ids", "attention_mask", "token_seeds") if name in rows}
        hidden = network.hidden(params, columns, **options)
        return token_log_probs(hidden, shift_labels(rows["labels"]),
                               lambda x: network.logits(params, x) / self.temperature, self.network.arch.vocab_size,
                               not self.fast_kernels, self.built_for)

    def predict(self, params: Tree, rows: Rows) -> Array:
        """Return log-probabilities [N, T] of the token after each position; without labels, like any causal LM.

        Rows with a column `OF_REFERENCE` are evaluated under the reference.
        """
        if "labels" not in rows:  # multiple-choice questions
            return super().predict(params, rows)
        return self._log_probs(self._reference if OF_REFERENCE in rows else self.network, params, rows)

    def passes(self) -> tuple[float, float]:
        # Once per rollout, which is trained on `num_iterations` times.
        return 1.0, len({"old_logps", "reference_logps"} & {*token_columns(self)}) / self.num_iterations

    # Evaluation ------------------------------------------------------------------------------------------------------

    def evaluate(self, steps: Steps, weights: Weights, batch: GlobalBatch) -> None:
        self._prompt_indices += batch.host["index"][batch.host["index"] >= 0].tolist()

    def eval_results(self, role: str, datamodule: DataModule) -> tuple[dict[str, float], dict[str, Any]]:
        """Answer the prompts; return metrics over all processes."""
        indices, self._prompt_indices = self._prompt_indices, []
        return self._maker.evaluate(role, indices)


# ---------------------------------------------------------------------------------------------------------------------
# Interface of the rollouts to this engine.


class JaxPolicy(JaxSampler):
    """The network in training as `lmmods.rollouts.policy.Policy`. All devices score answers."""

    def logps(self, rows: Sequence[Row], temperature: float, reference: bool = False) -> list[np.ndarray]:
        run, steps = self._run, self._run.steps
        if temperature != run.task.temperature:
            raise ValueError(f"scoring is compiled for the temperature {run.task.temperature}, not {temperature}")
        # The rows of all processes, in the same order on all of them: a rank may span several processes.
        parts = self.gather({self.rank: rows})
        all_rows = [row for rank in sorted(parts) for row in parts[rank]]
        order = sorted(range(len(all_rows)), key=lambda index: len(all_rows[index].ids))
        size, max_length = run.data.batch_size, run.data.max_length
        batches = [self._batch(all_rows, order[start : start + size], reference)
                   for start in range(0, len(order), size)]
        results = [(batch.host["index"], steps.predict_step(run.weights.trainable, run.weights.frozen, batch.arrays))
                   for batch in run.batches(batches, size, math.inf, lengths=halve_lengths(max_length))]
        logps: dict[int, np.ndarray] = {}
        for indices, values in results:
            for rank_indices, rank_logps in zip(indices, steps.fetch_rows(values), strict=True):
                logps |= {index: rank_logps[position, : len(all_rows[index].ids) - 1].copy()
                          for position, index in enumerate(rank_indices.tolist()) if index >= 0}
        logps = self.gather(logps)
        first = sum(len(parts[rank]) for rank in range(self.rank))
        # Shift from the position that predicts a token to the token's own position.
        return [np.pad(logps[index], (1, 0)) for index in range(first, first + len(rows))]

    @staticmethod
    def _batch(rows: Sequence[Row], indices: Sequence[int], reference: bool) -> dict[str, np.ndarray]:
        """Return a micro-batch of these rows, like a loader's."""
        length = max(len(rows[index].ids) for index in indices)
        batch = {"input_ids": np.zeros((len(indices), length), np.int32)}
        batch |= {"attention_mask": np.zeros_like(batch["input_ids"]),
                  "labels": np.full_like(batch["input_ids"], IGNORED), "index": np.array(indices, np.int32)}
        for position, index in enumerate(indices):
            row = rows[index]
            batch["input_ids"][position, : len(row.ids)] = row.ids
            batch["labels"][position, : len(row.ids)] = row.labels
            batch["attention_mask"][position, : len(row.ids)] = 1
        return batch | ({OF_REFERENCE: np.ones(len(indices), np.int32)} if reference else {})

    def export(self, folder: Path) -> None:
        run = self._run
        # On all processes, although only the first one writes: a collective call.
        params = run.task.fetch_export_params(run.weights, run.parallel)
        if run.is_first:
            run.task.export(params, folder)
