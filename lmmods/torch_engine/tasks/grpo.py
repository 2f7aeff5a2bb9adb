"""Reinforcement learning with verifiable rewards: GRPO and related losses, on answers sampled from the network."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lmmods.data.base import DataModule
from lmmods.data.batch.rollouts import PlannedRollout
from lmmods.data.grpo import MakeOrRead, Rollouts, sample_nothing
from lmmods.recipe.tasks.base import ReadScorer
from lmmods.recipe.tasks.grpo import GRPOFields
from lmmods.rollouts.maker import RolloutMaker, make_plan_function, read_prompt_facts, token_columns
from lmmods.rollouts.policy import Row
from lmmods.rollouts.rollout import Rollout
from lmmods.torch_engine.nn.lm_head import token_logps
from lmmods.torch_engine.nn.loss import IGNORED, LossSums, shift_labels, shift_weights
from lmmods.torch_engine.nn.micro_batches import split_rows
from lmmods.torch_engine.nn.reference import Reference, eval_mode
from lmmods.torch_engine.tasks.causal_task import CausalModule
from lmmods.torch_engine.tasks.sampler import TorchSampler

OPERATIONS = SimpleNamespace(exp=torch.exp, where=torch.where, stop_gradient=torch.detach)


class GRPO(GRPOFields, CausalModule):
    """Train a causal LM on its own answers, weighted by their rewards; predict generates answers."""

    measures_experts = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._reference: Reference | None = None
        self._evaluated: list[int] = []  # indices of this process's prompts in the current evaluation

    @property
    def metric_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the loss's metrics."""
        return self.policy_loss.metric_names

    def data_facts(self, command: str, read_scorer: ReadScorer) -> dict[str, Any]:
        return {**super().data_facts(command, read_scorer), **read_prompt_facts(self, command, read_scorer)}

    def link(self, datamodule: DataModule, make_or_read: MakeOrRead = sample_nothing) -> None:
        plan = make_plan_function(self, datamodule.shuffle, datamodule.seed)
        datamodule.take_rows_from(Rollouts(plan, token_columns(self), make_or_read))

    def build_model(self, abstract: bool = False) -> None:
        self.link(self.trainer.datamodule, self._make_or_read)
        super().build_model(abstract)

    def prepare_model(self) -> None:
        super().prepare_model()
        if self.reference_kind is not None:  # before a checkpoint is loaded, so that it is the initial network
            self._reference = Reference(self.model, self.reference_kind, self.trainable())

    def copied_bytes(self) -> int:
        return 4 * sum(param.numel() for param in self.trainable().values()) if self.reference_kind == "copy" else 0

    # Steps -----------------------------------------------------------------------------------------------------------

    def batch_loss(self, batch: dict[str, Tensor], count_correct: bool = False) -> LossSums:
        rows, columns = batch, {name: shift_weights(batch[name]) for name in token_columns(self)}
        context, row_sums = self.context_parallel, lambda x: x.sum(-1)
        if context is not None:
            rows, columns = context.split(batch), {name: context.take_local(values) for name, values in columns.items()}
            row_sums = lambda x: context.sum(x.sum(-1))  # noqa: E731
        logps, mask = token_logps(self.model, self.head, rows, self.temperature, self.built_for)
        losses, weights, metrics = self.policy_loss.of_rows(
            OPERATIONS, logps, mask, batch["advantages"], columns.get("old_logps"), columns.get("reference_logps"),
            columns.get("sampler_weights"), row_sums)
        idle = batch["idle_weight"].sum()
        sums = torch.stack([torch.stack([total.sum(), weight.sum()]) for total, weight in metrics.values()])  # [M, 2]
        return LossSums(losses.sum(), weights.sum() + (idle if context is None else idle / context.size),
                        metrics=sums.detach())

    def target_weight(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = (shift_labels(batch["labels"]) != IGNORED).sum(1)
        return self.policy_loss.weight_of(tokens).sum() + batch["idle_weight"].sum()

    # Rollouts --------------------------------------------------------------------------------------------------------

    @cached_property
    def maker(self) -> RolloutMaker:
        """Maker of the rollouts, for use once the network is built."""
        trainer = self.trainer
        return RolloutMaker(self, trainer.datamodule, trainer.run_folder, TorchPolicy(self),
                            lambda: trainer.global_step, self._report, trainer.is_global_zero)

    def _make_or_read(self, planned: PlannedRollout, name: str | None) -> tuple[str, list[dict[str, Any]]]:
        return self.maker.make_or_read(planned, name)

    def _report(self, metrics: dict[str, float], rollout: Rollout) -> None:
        self.trainer.log_rollout(metrics, rollout)

    def teardown(self, stage: str) -> None:
        if "maker" in vars(self):
            self.maker.close()

    @contextmanager
    def inference(self, reference: bool = False) -> Iterator[None]:
        """Disable gradient and dropout, and use the training precision; `reference` activates the reference weights."""
        mode = self._reference.activate() if reference else eval_mode(self.model)
        with mode, self.trainer.precision_plugin.forward_context():
            yield

    # Evaluation ------------------------------------------------------------------------------------------------------

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluated += [index for index in batch["index"].tolist() if index >= 0]

    test_step = validation_step

    def eval_results(self, role: str) -> tuple[dict[str, float], dict[str, Any]]:
        """Answer the prompts of the evaluation; return the metrics over all ranks, and files."""
        indices, self._evaluated = self._evaluated, []
        return self.maker.evaluate(role, indices)


class TorchPolicy(TorchSampler):
    """The network in training as a `Policy`. Processes that share micro-batches sample and score the same rows."""

    def logps(self, rows: Sequence[Row], temperature: float, reference: bool = False) -> list[np.ndarray]:
        """Return the log-probabilities of rows, each [T]; see `Policy`."""
        data = self._task.trainer.datamodule
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index].ids))
        logps: dict[int, np.ndarray] = {}
        for start in range(0, self._max_num_rows(len(order), data.batch_size), data.batch_size):
            indices = order[start : start + data.batch_size]
            # A dummy row without labels if other processes have more rows.
            batch = [rows[index] for index in indices] or [Row(np.zeros(1, np.int32), np.full(1, IGNORED, np.int32))]
            values = self._logps(batch, temperature, reference)
            logps |= dict(zip(indices, values, strict=False))
        return [logps[index] for index in range(len(rows))]

    def _logps(self, rows: list[Row], temperature: float, reference: bool) -> list[np.ndarray]:
        task = self._task
        batch = {"input_ids": _pad([row.ids for row in rows], 0), "labels": _pad([row.labels for row in rows],
                                                                                      IGNORED)}
        batch["attention_mask"] = _pad([np.ones(len(row.ids), np.int32) for row in rows], 0)
        batch = {name: values.to(task.device) for name, values in batch.items()}
        batch["index"], size = torch.arange(len(rows), device=task.device), task.chunk_tokens()
        row_logps: dict[int, np.ndarray] = {}
        for chunk in split_rows(batch, size) if size else [batch]:
            with task.inference(reference):
                logps, _ = task(self._chunk_logps, chunk, temperature)
            # The log-probability of token t is at position t - 1.
            values = F.pad(logps.float(), (1, 0)).cpu().numpy()
            row_logps |= {index: values[chunk_index, : len(rows[index].ids)]
                          for chunk_index, index in enumerate(chunk["index"].tolist())}
        return [row_logps[index] for index in range(len(rows))]

    def _chunk_logps(self, chunk: dict[str, Tensor], temperature: float) -> tuple[Tensor, Tensor]:
        task = self._task
        # Whole rows, even if context parallelism splits them in training.
        return token_logps(task.model, task.head, {**chunk, "targets": shift_labels(chunk["labels"])}, temperature,
                           task.built_for)

    def export(self, folder: Path) -> None:
        """Write the model to a folder; see `Policy`."""
        self._task.export(folder)


def _pad(rows: list[np.ndarray], value: int) -> Tensor:
    width = max(map(len, rows))
    padded = torch.full((len(rows), width), value)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.from_numpy(row.astype(np.int64))
    return padded
