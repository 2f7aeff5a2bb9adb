"""Preference optimisation on JAX from answer pairs or individually judged answers: full or with adapters."""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_engine.distributed.devices import call_on_first, gather
from jax_engine.distributed.loss import LossSums, shift_labels, token_log_probs
from jax_engine.distributed.prefetch import GlobalBatch
from jax_engine.distributed.steps import Steps
from jax_engine.distributed.tree import Tree
from jax_engine.models.network import Network
from jax_engine.tasks.base import Weights
from jax_engine.tasks.image_task import ImageTask
from jax_engine.tasks.reference import Reference, ReferencedTask
from jax_engine.tasks.running import Run
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.hardware import Target
from lmmods.core.labels import IGNORED, PER_ROW
from lmmods.data.base import DataModule
from lmmods.data.references import adopt_references, begin_references, reference_store
from lmmods.data.store.references import COMPUTING, REFERENCE_LOGPS
from lmmods.recipe.tasks.preference import PreferenceFields
from lmmods.runs.model_card import describe_initial_weights

# ---------------------------------------------------------------------------------------------------------------------
# Reference log-probabilities of all answers, computed with the initial network once, and cached.


def cache_references(run: Run) -> None:
    """Add `reference_logps` to a preference task's batches, from the cache if it has them.

    All processes must call this.

    Args:
        run: A `Run` with its initial weights.

    Raises:
        UserError: The data are a stream.
    """
    data, trainer = run.data, run.data.trainer
    network = describe_initial_weights(run.task, trainer.precision, data.run_seed)
    for role in begin_references(data, trainer.state.fn.value):
        store = reference_store(data, role, network)
        logps = call_on_first(store.read)
        if logps is None:
            if run.is_first:
                say(COMPUTING.format(rows=store.shape[0], role=role))
            logps = _compute(run, role, store.shape)
            call_on_first(lambda store=store, logps=logps: store.write(logps))
        adopt_references(data, role, logps)


def _compute(run: Run, role: str, shape: tuple[int, int]) -> np.ndarray:
    """Compute the log-probabilities [rows, answers] of a split."""
    data, steps, weights = run.data, run.steps, run.weights
    results = [(batch.host["index"], steps.predict_step(weights.trainable, weights.frozen, batch.arrays)["logps"])
               for batch in run.batches(data.evaluation_loader(role, "index"), data.eval_batch_size, math.inf)]
    # By global batch and rank, so that all processes have different keys.
    parts = {(batch_index, rank): (index[position], values[position])
             for batch_index, (index, rows) in enumerate(results)
             for values in [steps.fetch_rows(rows)] for position, rank in enumerate(steps.local_ranks)}
    logps = np.zeros(shape, np.float32)
    for index, values in gather(parts).values():
        # Rows are in the loader's order; `index` is their position in the split, or -1 for padding.
        logps[index[index >= 0]] = values[index >= 0]
    return logps


# ---------------------------------------------------------------------------------------------------------------------
# The task.

Rows = dict[str, Array]
BASELINE = "kl"
_DEVICE = SimpleNamespace(log_sigmoid=jax.nn.log_sigmoid, sigmoid=jax.nn.sigmoid, relu=jax.nn.relu, log=jnp.log,
                          expm1=jnp.expm1, where=jnp.where)
_HOST = SimpleNamespace(log_sigmoid=lambda x: -np.logaddexp(0, -x), sigmoid=lambda x: np.exp(-np.logaddexp(0, -x)),
                        relu=lambda x: np.maximum(x, 0), log=np.log, expm1=np.expm1, where=np.where)


class Preference(PreferenceFields, ImageTask, ReferencedTask):
    """Train a causal LM to prefer the better answers; predict answers prompts.

    Rows are [N, answers, T]. For individually judged answers, the second one is another prompt's, for the KL baseline.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._loss = self.preference_loss
        self.metric_names = self._loss.metric_names
        if self._loss.method.has_baseline:
            self.survey, self.statistic_names = self._divergence, (BASELINE,)
        # Global batches of the current evaluation: steps to fetch with, facts on the host, outputs on the devices.
        self._evaluated: list[tuple[Steps, dict[str, np.ndarray], Any]] = []

    def build(self, precision: str, datamodule: DataModule, seed: int, abstract: bool = False, on: Target | None = None
              ) -> tuple[Tree, Tree]:
        if self.reference_kind == "cache":
            datamodule.add_column(REFERENCE_LOGPS)
        return super().build(precision, datamodule, seed, abstract, on)

    def begin(self, run: Run) -> None:
        super().begin(run)
        if self.reference_kind == "cache":
            cache_references(run)

    # Steps -----------------------------------------------------------------------------------------------------------

    def batch_loss(self, params: Tree, rows: Rows, training: bool, count_correct: bool,
                   statistics: dict[str, Array] | None = None) -> LossSums:
        """Return the summed loss and weight of N pairs or answers, each with its own weight."""
        _check(rows, 3)
        # Only the survey uses the other prompt's answer.
        if not self._loss.method.is_paired:
            rows = _select_answers(rows, slice(0, 1))
        logps = self._log_probs(self.network, params, rows, training=training)
        reference, facts = self._reference_log_probs(params, rows), self._facts(rows)
        # Only losses with a baseline get statistics.
        baseline = _baseline(jnp, *statistics[BASELINE]) if statistics else 0.0
        losses, metrics = self._measure(_DEVICE, facts, logps, reference, baseline)
        weights = facts["weights"]
        return LossSums((losses * weights).sum(), weights.sum(), metrics={
            name: jnp.stack([(value * count * weights).sum(), (count * weights).sum()])
            for name, (value, count) in metrics.items()})

    def _divergence(self, params: Tree, rows: Rows) -> dict[str, Array]:
        """Return the KL statistics: summed log-ratio of other prompts' answers to the reference, and their weight."""
        weights, rows = self._facts(rows)["weights"], _select_answers(rows, slice(1, 2))
        gains = self._log_probs(self.network, params, rows) - self._reference_log_probs(params, rows)
        return {BASELINE: jnp.stack([(gains[:, 0] * weights).sum(), weights.sum()])}

    def _facts(self, rows: Rows) -> Rows:
        """Return facts about rows [..., N, answers, T] that need no network.

        `lengths` [..., N, answers]; `weights` [..., N] float32, 0 for padding rows; `desirable` [..., N] if judged.
        """
        # Number of predicted tokens; the first one is not predicted. For arrays on the host and on the devices.
        lengths = (rows["labels"][..., 1:] != IGNORED).sum(-1)
        has_label = (lengths > 0).all(-1) if self._loss.method.is_paired else lengths[..., 0] > 0
        weights = has_label.astype("float32") * (rows["loss_weights"][..., 0, 0] if "loss_weights" in rows else 1)
        judged = {"desirable": rows["desirable"] > 0} if "desirable" in rows else {}
        return {"lengths": lengths, "weights": weights, **judged}

    def _measure(self, ops: Any, facts: Rows, logps: Array, reference: Array | None, baseline: Any
                 ) -> tuple[Array, dict[str, tuple[Array, Array]]]:
        """Return the loss [N] of each row, and metrics as `PreferenceLoss` does."""
        if self._loss.method.is_paired:
            return self._loss.of_pairs(ops, logps, facts["lengths"], reference)
        return self._loss.of_answers(ops, logps[:, 0], facts["desirable"], reference[:, 0], baseline)

    def _log_probs(self, network: Network | Reference, params: Tree, rows: Rows, **options: bool) -> Array:
        """Return the summed log-probability [N, answers] of each answer's tokens."""
        # [N, answers, T] -> [N * answers, T]: answers are independent rows for the network.
        flat = {name: rows[name].reshape(-1, rows[name].shape[-1])
                for name in ("input_ids", "attention_mask", "labels", "token_seeds") if name in rows}
        flat |= {name: jnp.repeat(values, rows["labels"].shape[1], 0) for name, values in rows.items()
                 if name.startswith(PER_ROW)}
        hidden = network.hidden(params, flat, **options)
        by_token = token_log_probs(hidden, shift_labels(flat["labels"]), lambda x: network.logits(params, x),
                                   self.network.arch.vocab_size, not self.fast_kernels, self.built_for)
        return by_token.sum(1).reshape(rows["labels"].shape[:2])

    def _reference_log_probs(self, params: Tree, rows: Rows) -> Array | None:
        if "reference_logps" in rows:
            return rows["reference_logps"]
        return None if self._reference is None else self._log_probs(self._reference, params, rows)

    def predict(self, params: Tree, rows: Rows) -> Any:
        """Return log-probabilities [N, answers] under model and reference; for rows [N, T], like any causal LM."""
        # Multiple-choice questions.
        if rows["input_ids"].ndim == 2:
            return super().predict(params, rows)
        by_model = {"logps": self._log_probs(self.network, params, rows),
                    "reference": self._reference_log_probs(params, rows)}
        return {name: values for name, values in by_model.items() if values is not None}

    def passes(self) -> tuple[float, float]:
        has_reference = self._reference is not None
        if not self._loss.method.has_baseline:
            return 1.0, has_reference
        # Half of the tokens are other prompts' answers, which are not trained on but need forward passes of the model
        # and the reference. The rest needs one of the reference.
        return 0.5, (has_reference + 1 + has_reference) / 2

    # Evaluation ------------------------------------------------------------------------------------------------------

    def evaluate(self, steps: Steps, weights: Weights, batch: GlobalBatch) -> None:
        _check(batch.host, 4)
        outputs = steps.predict_step(weights.trainable, weights.frozen, batch.arrays)
        self._evaluated.append((steps, self._facts(batch.host), outputs))

    def eval_results(self, role: str, datamodule: DataModule) -> tuple[dict[str, float], dict[str, Any]]:
        """Return loss and metrics over all processes. The baseline is computed over the whole set."""
        evaluated, self._evaluated = self._evaluated, []
        # Rows of all processes in the loader's order: by global batch, then rank.
        parts = {}
        for batch_index, (steps, facts, outputs) in enumerate(evaluated):
            by_rank = {**facts, **steps.fetch_rows(outputs)}
            for position, rank in enumerate(steps.local_ranks):
                parts[batch_index, rank] = {name: values[position] for name, values in by_rank.items()}
        parts = gather(parts)
        rows = {name: np.concatenate([part[name] for _, part in sorted(parts.items())]) for name in by_rank}
        return self._results(rows), {}

    def _results(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        """Return means over rows, computed in float64 on the host.

        Args:
            rows: Facts (see `_facts`), `logps` and, with a reference, `reference`.
        """
        # In float64, whose rounding is far below that of the float32 inputs.
        rows = {name: values.astype(np.float64) if values.dtype == np.float32 else values
                for name, values in rows.items()}
        weights, reference, baseline = rows["weights"], rows.get("reference"), 0.0
        if self._loss.method.has_baseline:
            gains = (rows["logps"] - reference)[:, 1]
            baseline = _baseline(np, (gains * weights).sum(), weights.sum())
        losses, metrics = self._measure(_HOST, rows, rows["logps"], reference, baseline)
        sums = {name: ((value * count * weights).sum(), (count * weights).sum())
                for name, (value, count) in {"loss": (losses, 1.0), **metrics}.items()}
        return {name: (total / weight).item() for name, (total, weight) in sums.items() if weight}


def _check(rows: Rows, num_dimensions: int) -> None:
    if rows["labels"].ndim != num_dimensions:
        raise UserError("model.class_path is Preference, which needs rows with answers. Set data.class_path to "
                        "PreferenceData.")


def _select_answers(rows: Rows, indices: slice) -> Rows:
    """Return the rows with these answers only."""
    return {name: values[:, indices] if values.ndim > 1 and not name.startswith(PER_ROW) else values
            for name, values in rows.items()}


def _baseline(numpy: Any, total: Any, weight: Any) -> Any:
    """Return the mean divergence from the reference, clipped at zero."""
    return numpy.maximum(total / numpy.where(weight > 0, weight, 1.0), 0.0)
