"""Preference optimisation: DPO and related losses, on pairs of answers or on single labelled answers."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lmmods.core.labels import PER_ROW
from lmmods.recipe.tasks.preference import PreferenceFields
from lmmods.torch_engine.nn.lm_head import causal_logps
from lmmods.torch_engine.nn.loss import IGNORED, LossSums
from lmmods.torch_engine.nn.micro_batches import gather, split_rows, sum_over_processes
from lmmods.torch_engine.nn.reference import Reference, cache_references, eval_mode
from lmmods.torch_engine.tasks.base import WeightedMean
from lmmods.torch_engine.tasks.image_module import ImageModule

OPERATIONS = SimpleNamespace(log_sigmoid=F.logsigmoid, sigmoid=torch.sigmoid, relu=torch.relu, log=torch.log,
                             expm1=torch.expm1, where=torch.where)


class Preference(PreferenceFields, ImageModule):
    """Train a causal LM to prefer some answers to others; predict generates answers."""

    measures_experts = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.eval_metrics = torch.nn.ModuleDict({name: WeightedMean() for name in ("loss", *self.metric_names)})
        self._reference: Reference | None = None
        self._baseline: Tensor | None = None  # baseline of the current optimiser step
        self._evaluated: list[Tensor] = []

    @property
    def metric_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the loss's metrics."""
        return self.preference_loss.metric_names

    def prepare_model(self) -> None:
        super().prepare_model()
        if self.reference_kind == "cache":  # before a checkpoint is loaded, as with a copy
            cache_references(self)
        elif self.reference_kind is not None:
            self._reference = Reference(self.model, self.reference_kind, self.trainable())

    def complete(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch with `reference_logps` [B, A]."""
        if self._has_baseline:  # only `survey` needs the second answers
            batch = _select_answers(batch, slice(0, 1))
            self._dropout.begin(batch)
        if self.reference_kind is None:
            return batch
        return {**batch, "reference_logps": self._reference_logps(batch)}

    def _reference_logps(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the log-probability [B, A] of each answer under the reference."""
        if "reference_logps" in batch:
            return batch["reference_logps"]
        with self._reference.activate():
            logps, _ = self(self.answer_logps, batch)
        return logps

    def batch_loss(self, batch: dict[str, Tensor], count_correct: bool = False) -> LossSums:
        logps, lengths = self.answer_logps(batch)
        loss, reference = self.preference_loss, batch.get("reference_logps")
        if loss.method.is_paired:
            losses, metrics = loss.of_pairs(OPERATIONS, logps, lengths, reference)
        else:
            baseline = 0.0 if self._baseline is None else self._baseline
            losses, metrics = loss.of_answers(OPERATIONS, logps[:, 0], batch["desirable"].bool(), reference[:, 0],
                                              baseline)
        weights = self._weights(batch)
        sums = torch.stack([torch.stack([(weights * count * value).sum(), (weights * count).sum()])  # [M, 2]
                            for value, count in metrics.values()])
        loss_sums = LossSums((weights * losses).sum(), weights.sum(), metrics=sums.detach())
        # Log-probabilities are summed over whole rows, so each process has the whole loss and counts a fraction of it.
        return loss_sums if self.context_parallel is None else self.context_parallel.divide(loss_sums)

    def copied_bytes(self) -> int:
        return 4 * sum(param.numel() for param in self.trainable().values()) if self.reference_kind == "copy" else 0

    def target_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return self._weights(batch).sum()

    def _weights(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the weight of each row, [B] float32; 0 for filler rows."""
        weights = self.scored_rows(batch).float()
        return weights * batch["loss_weights"][:, 0, 0] if "loss_weights" in batch else weights

    def answer_logps(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the log-probability and the number of tokens of each answer, both [B, A]."""
        shape = batch["labels"].shape[:2]
        # [B, A, T] -> [B * A, T]
        rows = {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask", "labels")}
        rows |= {name: values.repeat_interleave(shape[1], 0) for name, values in batch.items()
                 if name.startswith(PER_ROW)}
        if self.context_parallel is None:
            logps, lengths = causal_logps(self.model, self.head, rows, self.built_for)
        else:
            local_sums = causal_logps(self.model, self.head, self.context_parallel.split(rows), self.built_for)
            logps, lengths = (self.context_parallel.sum(values) for values in local_sums)
        return logps.view(shape), lengths.view(shape)

    def scored_rows(self, batch: dict[str, Tensor]) -> Tensor:
        has_target = (batch["labels"][..., 1:] != IGNORED).any(-1)
        # A pair counts if both answers have targets.
        return has_target[:, 0] if self._has_baseline else has_target.all(-1)

    # Baseline of single answers: divergence of policy and reference on answers to other prompts ----------------------

    @property
    def _has_baseline(self) -> bool:
        return self.preference_loss.method.has_baseline

    def survey(self, batches: Iterable[dict[str, Tensor]]) -> None:
        if self._has_baseline:
            self._baseline = self._compute_baseline(batches)

    @torch.no_grad()
    def _compute_baseline(self, batches: Iterable[dict[str, Tensor]]) -> Tensor:
        """Return the mean divergence over a step's rows on all processes, before training on them, clamped at 0."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        size = self.chunk_tokens()
        for batch in batches:
            for chunk in split_rows(batch, size) if size else [batch]:  # as in `training_step`
                with self.trainer.precision_plugin.forward_context():
                    sums += self._divergence(chunk, self._weights(chunk))
        total, weight = sum_over_processes(sums, self.trainer.strategy)
        return _clamped_mean(total, weight).float()

    def _divergence(self, batch: dict[str, Tensor], weights: Tensor) -> Tensor:
        """Return the weighted sum over rows of log(policy / reference) of the second answer, and the total weight."""
        second_answers = _select_answers(batch, slice(1, 2))
        reference = self._reference_logps(second_answers)
        with eval_mode(self.model):
            logps, _ = self(self.answer_logps, second_answers)
        return torch.stack([((logps - reference)[:, 0] * weights).sum(), weights.sum()]).double()

    # Evaluation ------------------------------------------------------------------------------------------------------

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        if self._has_baseline:  # computed at the end, over the whole set
            reference = self._reference_logps(batch)
            logps, _ = self(self.answer_logps, batch)
            self._evaluated.append(torch.stack([self._weights(batch), batch["desirable"], logps[:, 0], reference[:, 0],
                                                (logps - reference)[:, 1]]).double().cpu())
            return
        sums = self(self.batch_loss, self.complete(batch))
        self.eval_metrics["loss"].update(sums.total, sums.weight)
        for name, (total, weight) in zip(self.metric_names, sums.metrics, strict=True):
            self.eval_metrics[name].update(total, weight)

    test_step = validation_step

    def eval_results(self, role: str) -> tuple[dict[str, float], dict[str, Any]]:
        """Return loss and metrics over all ranks, without metrics of weight 0; reset the sums."""
        if self._has_baseline:
            return self._row_results(), {}
        results = {name: metric.compute().item() for name, metric in self.eval_metrics.items()}
        for metric in self.eval_metrics.values():
            metric.reset()
        return {name: value for name, value in results.items() if value == value}, {}  # NaN where the weight is 0

    def _row_results(self) -> dict[str, float]:
        parts = gather({self.trainer.data_rank: torch.cat(self._evaluated, dim=1)}, self.trainer.world_size)
        self._evaluated = []
        weights, desirable, logps, reference, gains = torch.cat(list(parts.values()), dim=1)
        losses, metrics = self.preference_loss.of_answers(OPERATIONS, logps, desirable > 0, reference,
                                                          _clamped_mean((weights * gains).sum(), weights.sum()))
        sums = {name: ((weights * count * value).sum(), (weights * count).sum())
                for name, (value, count) in {"loss": (losses, torch.ones_like(losses)), **metrics}.items()}
        return {name: (total / weight).item() for name, (total, weight) in sums.items() if weight}


def _clamped_mean(total: Tensor, weight: Tensor) -> Tensor:
    """Return total / weight, at least 0; 0 if there is no weight."""
    return (total / torch.where(weight > 0, weight, 1)).clamp(min=0)


def _select_answers(batch: dict[str, Tensor], indices: slice) -> dict[str, Tensor]:
    """Return the rows with only the answers at `indices`."""
    return {name: values[:, indices] if values.ndim > 1 and not name.startswith(PER_ROW) else values
            for name, values in batch.items()}
