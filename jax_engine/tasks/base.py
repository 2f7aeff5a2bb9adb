"""Base class of JAX tasks: building the network, the functions that compiled steps call, evaluation and export."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from jax_engine.distributed.distillation import TeacherStates, TeacherTopK, distillation_loss
from jax_engine.distributed.interface import Parallel
from jax_engine.distributed.loss import LossSums, chunk_bytes, token_loss
from jax_engine.distributed.pool import largest_gap
from jax_engine.distributed.prefetch import GlobalBatch
from jax_engine.distributed.steps import Steps, Survey
from jax_engine.distributed.target import target
from jax_engine.distributed.tree import AT, IMAGE_PARTS, Tree, flatten, merge
from jax_engine.models import hub
from jax_engine.models import lora as adapters
from jax_engine.models.architecture import Head
from jax_engine.models.building import build_network
from jax_engine.models.heads import HEADS
from jax_engine.models.network import Network
from jax_engine.tasks.running import Run, Weights
from jax_engine.tasks.teacher import TEACHER, TeacherNetwork, without_teacher
from lmmods.core.errors import UserError
from lmmods.core.experts import mixture_of
from lmmods.core.hardware import Target
from lmmods.core.memory import (
    Step,
    StepMemory,
    describe_sizes,
    describe_teacher,
    estimate_step,
    flops_per_token,
    widths_of,
)
from lmmods.core.settings import TokenLoss
from lmmods.core.text_metrics import perplexity
from lmmods.data.base import DataModule
from lmmods.data.teacher import check_teacher
from lmmods.recipe.tasks.base import TaskFields

# Fields with restricted values in this engine: the supported values, and the advice for all others.
SUPPORTED = {
    "trust_remote_code": ((False,), "Use engine: torch."),
    "attention": ((None, "sdpa", "eager"), "Use engine: torch."),
    "max_memory": ((None,), "Remove it; trainer.strategy: fsdp shards the model."),
}


# Approximate number of hidden features in a chunk of a micro-batch, and its minimum number of tokens: with fewer,
# dequantising the weights for each chunk takes a noticeable part of the time.
CHUNK_FEATURES, LEAST_CHUNK_TOKENS = 2**18, 1024


def check_supported(fields: TaskFields) -> None:
    """Raise UserError for a field value that this engine does not support."""
    for name, (supported, instead) in SUPPORTED.items():
        if (value := getattr(fields, name)) not in supported:
            raise UserError(f"model.{name} is {value!r}, which the JAX engine does not support "
                            f"(supported: {', '.join(map(json.dumps, supported))}). {instead}")


class Task(TaskFields, ABC):
    """Network and training objective on JAX.

    Attributes:
        metric_names: Names of the metrics that `batch_loss` returns in addition to the loss.
        statistic_names: Names of the statistics that `survey` returns.
    """

    head: Head
    auto_class = "AutoModel"
    metric_names: tuple[str, ...] = ()
    statistic_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_supported(self)
        super().__post_init__()
        self.network: Network | None = None
        self.teacher_network: TeacherNetwork | None = None  # `model.teacher`
        self.built_for: Target | None = None  # None: the devices that are present
        self._sums: list[dict[str, Array]] = []

    # The network -----------------------------------------------------------------------------------------------------

    def build(self, precision: str, datamodule: DataModule, seed: int, abstract: bool = False, on: Target | None = None
              ) -> tuple[Tree, Tree]:
        """Build the network; return its initial trainable and frozen parameters, on the host.

        Args:
            abstract: Return shapes and dtypes instead of parameters, without reading weights.
            on: Devices that the network is for. Default: the present ones.
        """
        self.built_for = on
        self.network, params, _ = build_network(self, self.head, datamodule, precision=precision, seed=seed,
                                                abstract=abstract, on=on)
        trainable, frozen = self.network.split(params)
        if self.divergence is not None:
            self.metric_names = self.divergence.metric_names
            check_teacher(self.teacher, datamodule.tokenizer)
            if not self.precomputes_teacher:
                self.teacher_network, teacher_params = TeacherNetwork.build(self, self.head, datamodule, precision,
                                                                            seed, abstract, on)
                frozen |= teacher_params
        return trainable, frozen

    def build_token_loss(self, teacher: TeacherStates | TeacherTopK | None, is_training: bool
                         ) -> Callable[..., LossSums]:
        """Return `token_loss` or `distillation_loss` with the task's settings, or plain ones in evaluation."""
        form = self.token_loss if is_training else TokenLoss()
        if teacher is None:
            return partial(token_loss, form=form)
        divergence = self.divergence if is_training else self.divergence.evaluated
        return partial(distillation_loss, form=form, divergence=divergence, teacher=teacher)

    # Steps -----------------------------------------------------------------------------------------------------------

    def chunk_tokens(self, num_devices: int) -> int:
        """Return the number of tokens per chunk of a micro-batch; 0 for no chunks. The network must be built.

        Only a single CPU splits micro-batches: several devices would synchronise, and GPUs are most efficient on large
        products. By default it does so for adapters, whose gradients are small, since each chunk sums all gradients.

        Raises:
            UserError: `piece_tokens` is set for several devices.
        """
        if self.piece_tokens and num_devices > 1:
            raise UserError(f"model.piece_tokens is {self.piece_tokens}, but several devices do not split "
                            "micro-batches. Set it to 0 or null.")
        if self.piece_tokens is not None:
            return self.piece_tokens
        divides = num_devices == 1 and self.trains_adapter and target(self.built_for).platform == "cpu"
        return max(CHUNK_FEATURES // self.network.arch.hidden_size, LEAST_CHUNK_TOKENS) if divides else 0

    @abstractmethod
    def batch_loss(self, params: Tree, rows: dict[str, Array], training: bool, count_correct: bool) -> LossSums:
        """Return the summed loss and weight of rows [N, T]; compiled."""

    # (parameters, rows) -> statistics that `batch_loss` receives if it depends on all rows of a step; compiled.
    survey: Survey | None = None

    # (parameters, rows) -> a tree of per-row arrays [N, ...], for tasks that need it; compiled.
    predict: Callable[[Tree, dict[str, Array]], Any] | None = None

    def link(self, datamodule: DataModule) -> None:
        """Hook before the data module creates the training loader: pass it what it needs from the task."""

    def complete(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return a global batch on the host with the additional inputs of the task's loss."""
        return batch

    def begin(self, run: Run) -> None:
        """Hook before training or evaluation, called by all processes with a `Run` that has its initial weights."""

    def end(self) -> None:
        """Hook after training or evaluation, also after an error."""

    def passes(self) -> tuple[float, float]:
        """Return the fraction of a step's tokens trained on, and the number of additional forward passes.

        Sampling answers is not included.
        """
        return 1.0, 0.0

    # Evaluation ------------------------------------------------------------------------------------------------------

    def evaluate(self, steps: Steps, weights: Weights, batch: GlobalBatch) -> None:
        """Add a global batch to the evaluation without waiting for the device."""
        self._sums.append(steps.eval_step(weights.trainable, weights.frozen, batch.arrays))

    def eval_results(self, role: str, datamodule: DataModule) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the metrics of the evaluation (`val` or `test`) and its JSON files to write; reset the sums."""
        sums, self._sums = jax.device_get(self._sums), []
        total, weight, correct = (sum(float(part[name]) for part in sums) for name in ("total", "weight", "correct"))
        loss = total / weight if weight else math.nan
        metrics = {"loss": loss, "accuracy": correct / weight if weight else math.nan, "perplexity": perplexity(loss)}
        if self.divergence is not None:
            divergence = sum(float(part["metrics"]["divergence"][0]) for part in sums)
            metrics["divergence"] = divergence / weight if weight else math.nan
        return metrics, {}

    @abstractmethod
    def outputs(self, steps: Steps, weights: Weights, batch: GlobalBatch, datamodule: DataModule, seed: int
                ) -> dict[int, Any]:
        """Return the outputs of predict for a global batch, by row index."""

    # Export ----------------------------------------------------------------------------------------------------------

    def fetch_export_params(self, weights: Weights, parallel: Parallel) -> Tree:
        """Return the parameters that `export` writes, on the host. A collective call."""
        trainable = parallel.fetch_state(weights.trainable)
        if self.trains_adapter:
            return trainable
        # Without the reference's parameters.
        frozen = {name: leaf for name, leaf in weights.frozen.items() if name.partition(AT)[0] in self.network.shapes}
        return merge(trainable, parallel.fetch_state(frozen))

    def export(self, params: Tree, folder: Path) -> None:
        """Write the model, or its adapter, as a folder that from_pretrained / PeftModel reads.

        Args:
            params: From `fetch_export_params`.
        """
        if not self.trains_adapter:
            return hub.save(self.network, params, folder, self.save_dtype)
        adapters.save_adapter(self.network, params, folder, self.pretrained, self.save_dtype)

    def describe(self, trainable: Tree, frozen: Tree) -> str:
        """Return a summary of parameter counts and dtypes, with the teacher on a second line."""
        by_type = _sizes_by_type(trainable, without_teacher(frozen))
        summary = describe_sizes(sum(by_type.values()), _size(trainable), by_type)
        if self.teacher_network is None:
            return summary
        by_type = _sizes_by_type(frozen[TEACHER])
        return summary + describe_teacher(self.teacher.pretrained, sum(by_type.values()), by_type)

    def step_memory(self, trainable: Tree, frozen: Tree, precision: str, datamodule: DataModule, on: Target,
                    chunk_tokens: int, accumulates: bool) -> StepMemory:
        """Return the memory of a training step on a device with all parameters, without compiling it.

        Args:
            on: The present devices.
            chunk_tokens: As returned by `chunk_tokens`.
            accumulates: A step has several micro-batches.
        """
        per_row = datamodule.sequences_per_row * datamodule.max_length
        tokens = datamodule.batch_size * per_row
        if chunk_tokens:
            tokens = min(tokens, max(chunk_tokens, per_row))
        trained, has_logits = jax.tree.leaves(trainable), HEADS[self.head].vocabulary
        num_trained = _size(trainable)
        shares_table = HEADS[self.head].shares_table or self.network.config.tie_word_embeddings
        table = flatten(trainable).get(("embed", "tokens", "weight") if shares_table else ("head", "weight"))
        step = Step(num_trained, self.optimizer.name, bool(self.gradient_checkpointing),
                    4 if precision == "32-true" else 2,
                    param_bytes=sum(leaf.nbytes for leaf in trained) / max(num_trained, 1), runs="scanned",
                    offloads=self.network.remat == "offload" and on.platform != "cpu",
                    recomputes=self.network.recomputes, averages=self.optimizer.ema_decay is not None,
                    sums_gradients=accumulates, in_full=not self.trains_adapter,
                    chunk_bytes=chunk_bytes(on) if has_logits else 0,
                    trained_head=table.size if has_logits and table is not None else 0)
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves((trainable, frozen)))
        widths = widths_of(self.network.config, bool(self.network.arch.qk_norm))
        memory = estimate_step(widths, weights, step, tokens, on.memory)
        # In the order in which a run places arrays: parameters, optimiser state, summed gradients; then one block.
        state = memory.parts["optimiser state"] / max(num_trained, 1)
        sizes = [leaf.nbytes for leaf in (*trained, *jax.tree.leaves(frozen))]
        sizes += [round(num_bytes * leaf.size) for num_bytes in (state, 4 * accumulates) for leaf in trained]
        return replace(memory, block=memory.needed - sum(sizes), gap=largest_gap(on, on.memory, sizes))

    def flops_per_token(self, trainable: Tree, frozen: Tree) -> int:
        """Return the FLOPs per training token."""
        trained_weights, frozen_weights = (self._active_weights(self.network, tree)
                                           for tree in (trainable, without_teacher(frozen)))
        # Half of a frozen network's FLOPs are counted for the backward pass, which a teacher does not have.
        teacher_flops = 0 if self.teacher_network is None or TEACHER not in frozen else flops_per_token(
            self._active_weights(self.teacher_network.network, frozen[TEACHER]), 0) // 2
        return flops_per_token(trained_weights + frozen_weights, trained_weights) + teacher_flops

    def _active_weights(self, network: Network, tree: Tree) -> int:
        """Return the number of weights in a network's tree that each token is multiplied with, without image parts."""
        is_also_head = HEADS[self.head].vocabulary and network.config.tie_word_embeddings
        # A table that is only looked up needs no product.
        lookup_path = None if is_also_head else ("embed", "tokens", "weight")
        mixture = mixture_of(network.config)
        return sum(round(leaf.size * mixture.fraction) if "experts" in path else leaf.size
                   for path, leaf in flatten(tree).items() if path != lookup_path and path[0] not in IMAGE_PARTS)


def _sizes_by_type(*trees: Tree) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for leaf in (leaf for tree in trees for leaf in flatten(tree).values()):
        sizes[str(leaf.dtype)] = sizes.get(str(leaf.dtype), 0) + leaf.size
    return sizes


def _size(tree: Tree) -> int:
    return sum(leaf.size for leaf in flatten(tree).values())
