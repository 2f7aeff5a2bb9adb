"""Reinforcement learning with checkable rewards: GRPO and its relatives, on answers that the network draws."""

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
from lmmods.data.batch.rollouts import Place
from lmmods.data.grpo import Begin, Rollouts, draw_nothing
from lmmods.recipe.tasks.base import ReadScorer
from lmmods.recipe.tasks.grpo import GRPOFields
from lmmods.rollouts.maker import RolloutMaker, plan_of, prompt_facts, token_columns
from lmmods.rollouts.policy import Row
from lmmods.rollouts.rollout import Rollout
from lmmods.torch_engine.nn.lm_head import token_logps
from lmmods.torch_engine.nn.loss import IGNORED, LossSums, shift_labels, shift_weights
from lmmods.torch_engine.nn.micro_batches import split_rows
from lmmods.torch_engine.nn.reference import Reference, evaluating
from lmmods.torch_engine.tasks.causal_task import CausalModule
from lmmods.torch_engine.tasks.sampler import TorchSampler

OPERATIONS = SimpleNamespace(exp=torch.exp, where=torch.where, stop_gradient=torch.detach)


class GRPO(GRPOFields, CausalModule):
    """Train a causal LM on its own answers, weighted by their rewards; predict generates answers."""

    measures_experts = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._reference: Reference | None = None
        self._evaluated: list[int] = []  # prompts of this process in the current evaluation

    @property
    def metric_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the loss's metrics."""
        return self.policy_loss.metric_names

    def data_facts(self, command: str, read_scorer: ReadScorer) -> dict[str, Any]:
        return {**super().data_facts(command, read_scorer), **prompt_facts(self, command, read_scorer)}

    def link(self, datamodule: DataModule, begin: Begin = draw_nothing) -> None:
        plan = plan_of(self, datamodule.shuffle, datamodule.seed)
        datamodule.take_rows_from(Rollouts(plan, token_columns(self), begin))

    def build_model(self, abstract: bool = False) -> None:
        self.link(self.trainer.datamodule, self._begin_rollout)
        super().build_model(abstract)

    def prepare_model(self) -> None:
        super().prepare_model()
        if self.reference_kind is not None:  # before a checkpoint is loaded: what training starts from
            self._reference = Reference(self.model, self.reference_kind, self.trainable())

    def copied_bytes(self) -> int:
        return 4 * sum(param.numel() for param in self.trainable().values()) if self.reference_kind == "copy" else 0

    # Steps -----------------------------------------------------------------------------------------------------------

    def batch_loss(self, batch: dict[str, Tensor], count_correct: bool = False) -> LossSums:
        rows, columns = batch, {name: shift_weights(batch[name]) for name in token_columns(self)}
        context, row_sums = self.context_parallel, lambda x: x.sum(-1)
        if context is not None:
            rows, columns = context.cut(batch), {name: context.own(values) for name, values in columns.items()}
            row_sums = lambda x: context.total(x.sum(-1))  # noqa: E731
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
        """Makes the rollouts, once the network is built."""
        trainer = self.trainer
        return RolloutMaker(self, trainer.datamodule, trainer.run_folder, TorchPolicy(self),
                            lambda: trainer.global_step, self._report, trainer.is_global_zero)

    def _begin_rollout(self, place: Place, name: str | None) -> tuple[str, list[dict[str, Any]]]:
        return self.maker.begin(place, name)

    def _report(self, metrics: dict[str, float], rollout: Rollout) -> None:
        self.trainer.log_rollout(metrics, rollout)

    def teardown(self, stage: str) -> None:
        if "maker" in vars(self):
            self.maker.close()

    @contextmanager
    def inference(self, reference: bool = False) -> Iterator[None]:
        """Disable gradient and dropout, in the precision of training; `reference` makes the network its reference."""
        standing = self._reference.standing_in() if reference else evaluating(self.model)
        with standing, self.trainer.precision_plugin.forward_context():
            yield

    # Evaluation ------------------------------------------------------------------------------------------------------

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluated += [place for place in batch["index"].tolist() if place >= 0]

    test_step = validation_step

    def eval_results(self, role: str) -> tuple[dict[str, float], dict[str, Any]]:
        """Answer the prompts of the evaluation, and return the metrics over all ranks."""
        numbers, self._evaluated = self._evaluated, []
        return self.maker.evaluate(role, numbers)


class TorchPolicy(TorchSampler):
    """The network in training as a `Policy`. Processes that share micro-batches draw and score the same rows."""

    def logps(self, rows: Sequence[Row], temperature: float, reference: bool = False) -> list[np.ndarray]:
        """As of `Policy`."""
        data = self._task.trainer.datamodule
        order = sorted(range(len(rows)), key=lambda place: -len(rows[place].ids))
        found: dict[int, np.ndarray] = {}
        for start in range(0, self._most(len(order), data.batch_size), data.batch_size):
            places = order[start : start + data.batch_size]
            # A row without labels where this process has none left.
            chosen = [rows[place] for place in places] or [Row(np.zeros(1, np.int32), np.full(1, IGNORED, np.int32))]
            values = self._logps(chosen, temperature, reference)
            found |= dict(zip(places, values, strict=False))
        return [found[place] for place in range(len(rows))]

    def _logps(self, rows: list[Row], temperature: float, reference: bool) -> list[np.ndarray]:
        task = self._task
        batch = {"input_ids": _pad([row.ids for row in rows], 0), "labels": _pad([row.labels for row in rows],
                                                                                      IGNORED)}
        batch["attention_mask"] = _pad([np.ones(len(row.ids), np.int32) for row in rows], 0)
        batch = {name: values.to(task.device) for name, values in batch.items()}
        batch["place"], size = torch.arange(len(rows), device=task.device), task.chunk_tokens()
        found: dict[int, np.ndarray] = {}
        for chunk in split_rows(batch, size) if size else [batch]:
            with task.inference(reference):
                logps, _ = task(self._by_token, chunk, temperature)
            # The log-probability of token t is found at t - 1.
            values = F.pad(logps.float(), (1, 0)).cpu().numpy()
            found |= {place: values[number, : len(rows[place].ids)]
                      for number, place in enumerate(chunk["place"].tolist())}
        return [found[place] for place in range(len(rows))]

    def _by_token(self, chunk: dict[str, Tensor], temperature: float) -> tuple[Tensor, Tensor]:
        task = self._task
        # Whole rows, also where training cuts them.
        return token_logps(task.model, task.head, {**chunk, "targets": shift_labels(chunk["labels"])}, temperature,
                           task.built_for)

    def export(self, folder: Path) -> None:
        """As of `Policy`."""
        self._task.export(folder)


def _pad(rows: list[np.ndarray], value: int) -> Tensor:
    width = max(map(len, rows))
    found = torch.full((len(rows), width), value)
    for place, row in enumerate(rows):
        found[place, : len(row)] = torch.from_numpy(row.astype(np.int64))
    return found
