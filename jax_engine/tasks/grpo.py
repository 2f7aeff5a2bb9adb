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
from jax_engine.tasks.sampler import JaxSampler, answers_at_once
from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.base import DataModule
from lmmods.data.batch.rollouts import Place
from lmmods.data.grpo import PromptData, Rollouts
from lmmods.recipe.tasks.base import ReadScorer
from lmmods.recipe.tasks.grpo import GRPOFields
from lmmods.rollouts.maker import RolloutMaker, plan_of, prompt_facts, token_columns
from lmmods.rollouts.policy import Row
from lmmods.rollouts.rollout import Rollout
from lmmods.runs.wandb import RolloutTable

Rows = dict[str, Array]
OF_REFERENCE = "of_reference"  # column of rows that `predict` takes under the reference
_OPERATIONS = SimpleNamespace(exp=jnp.exp, where=jnp.where, stop_gradient=jax.lax.stop_gradient)


class GRPO(GRPOFields, ReferencedTask):
    """Train a causal LM on its own answers, weighted by their rewards; predict answers prompts.

    Rows are [N, T]: a prompt with an answer each.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._loss = self.policy_loss
        self.metric_names = self._loss.metric_names
        self._run: Any = None
        self._asked: list[int] = []  # prompts of the current evaluation that are this process's

    def data_facts(self, command: str, read_scorer: ReadScorer) -> dict[str, Any]:
        return {**super().data_facts(command, read_scorer), **prompt_facts(self, command, read_scorer)}

    def link(self, datamodule: DataModule) -> None:
        if not isinstance(datamodule, PromptData):
            raise UserError("model.class_path is GRPO, which answers prompts: set data.class_path to PromptData.")
        datamodule.take_rows_from(Rollouts(plan_of(self, datamodule.shuffle, datamodule.seed), token_columns(self),
                                           self._begin_rollout))

    def begin(self, run: Run) -> None:
        self._run = run

    def end(self) -> None:
        if "_maker" in vars(self):
            self._maker.close()

    # Rollouts --------------------------------------------------------------------------------------------------------

    @cached_property
    def _maker(self) -> RolloutMaker:
        """Makes the rollouts of a run."""
        run, table = self._run, RolloutTable()

        def report(metrics: dict[str, float], rollout: Rollout) -> None:
            run.metrics.fetch()  # those of the steps before
            run.metrics.log(metrics, run.progress.step)
            table.log(run.loggers, rollout.lines(), run.progress.step, run.metrics.every)

        return RolloutMaker(self, run.data, run.folder, JaxPolicy(run), lambda: run.progress.step, report, run.is_first)

    def _begin_rollout(self, place: Place, name: str | None) -> tuple[str, list[dict[str, Any]]] | None:
        # In `inspect` and a plan nothing trains.
        return None if self._run is None else self._maker.begin(place, name)

    # Steps -----------------------------------------------------------------------------------------------------------

    def batch_loss(self, params: Tree, rows: Rows, training: bool, count_correct: bool) -> LossSums:
        """Return the summed loss of N answers and their weight, of tokens or of answers.

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
                               lambda x: network.logits(params, x) / self.temperature, self.network.config.vocab_size,
                               not self.fast_kernels, self.built_for)

    def predict(self, params: Tree, rows: Rows) -> Array:
        """Return log-probabilities [N, T] of the token after each position; without labels, as any causal LM.

        They are under the reference where rows have a column `OF_REFERENCE`.
        """
        if "labels" not in rows:  # multiple-choice questions
            return super().predict(params, rows)
        return self._log_probs(self._reference if OF_REFERENCE in rows else self.network, params, rows)

    def passes(self) -> tuple[float, float]:
        # Once per rollout, which `num_iterations` train on.
        return 1.0, len({"old_logps", "reference_logps"} & {*token_columns(self)}) / self.num_iterations

    def answers_at_once(self, length: int, memory: float) -> int:
        return answers_at_once(self.network, length, memory)

    # Evaluation ------------------------------------------------------------------------------------------------------

    def evaluate(self, steps: Steps, weights: Weights, batch: GlobalBatch) -> None:
        self._asked += batch.host["index"][batch.host["index"] >= 0].tolist()

    def eval_results(self, role: str, datamodule: DataModule) -> tuple[dict[str, float], dict[str, Any]]:
        """Answer the prompts; metrics are over all processes."""
        asked, self._asked = self._asked, []
        return self._maker.evaluate(role, asked)


# ---------------------------------------------------------------------------------------------------------------------
# What rollouts ask of this engine.


class JaxPolicy(JaxSampler):
    """The network of a run in training, as `lmmods.rollouts.policy.Policy`; answers are scored on all devices."""

    def logps(self, rows: Sequence[Row], temperature: float, reference: bool = False) -> list[np.ndarray]:
        run, steps = self._run, self._run.steps
        if temperature != run.task.temperature:
            raise ValueError(f"scoring is compiled for the temperature {run.task.temperature}, not {temperature}")
        # The rows of all processes, in an order that all agree on: a rank may belong to several of them.
        parts = self.gather({self.rank: rows})
        everything = [row for rank in sorted(parts) for row in parts[rank]]
        order = sorted(range(len(everything)), key=lambda number: len(everything[number].ids))
        size, longest = run.data.batch_size, run.data.max_length
        batches = [self._batch(everything, order[start : start + size], reference)
                   for start in range(0, len(order), size)]
        found = [(batch.host["index"], steps.predict_step(run.weights.trainable, run.weights.frozen, batch.arrays))
                 for batch in run.batches(batches, size, math.inf, lengths=halve_lengths(longest))]
        scored: dict[int, np.ndarray] = {}
        for index, values in found:
            for numbers, by_row in zip(index, steps.fetch_rows(values), strict=True):
                scored |= {number: by_row[row, : len(everything[number].ids) - 1].copy()
                           for row, number in enumerate(numbers.tolist()) if number >= 0}
        scored = self.gather(scored)
        first = sum(len(parts[rank]) for rank in range(self.rank))
        # From positions that predict a token to those of the token itself.
        return [np.pad(scored[number], (1, 0)) for number in range(first, first + len(rows))]

    @staticmethod
    def _batch(rows: Sequence[Row], numbers: Sequence[int], reference: bool) -> dict[str, np.ndarray]:
        """Return a micro-batch of these rows as loaders yield it."""
        length = max(len(rows[number].ids) for number in numbers)
        batch = {"input_ids": np.zeros((len(numbers), length), np.int32)}
        batch |= {"attention_mask": np.zeros_like(batch["input_ids"]),
                  "labels": np.full_like(batch["input_ids"], IGNORED), "index": np.array(numbers, np.int32)}
        for place, number in enumerate(numbers):
            row = rows[number]
            batch["input_ids"][place, : len(row.ids)] = row.ids
            batch["labels"][place, : len(row.ids)] = row.labels
            batch["attention_mask"][place, : len(row.ids)] = 1
        return batch | ({OF_REFERENCE: np.ones(len(numbers), np.int32)} if reference else {})

    def export(self, folder: Path) -> None:
        run = self._run
        # On all processes, although only the first one writes: a collective call.
        params = run.task.exported(run.weights, run.parallel)
        if run.is_first:
            run.task.export(params, folder)
