"""Base class of all torch tasks: the network, exact gradient accumulation, evaluation and checkpoints."""

import math
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torchmetrics
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lmmods.core.errors import UserError
from lmmods.core.memory import Step, StepMemory, describe_sizes, describe_teacher
from lmmods.core.settings import num_layers, require
from lmmods.core.text_metrics import perplexity
from lmmods.data.teacher import check_teacher
from lmmods.recipe.tasks.base import TaskFields
from lmmods.runs.averaging import averaged_parameters
from lmmods.runs.identity import check_parameters
from lmmods.torch_engine.nn import sharding, summary
from lmmods.torch_engine.nn.building import build_network
from lmmods.torch_engine.nn.context_parallel import ContextParallel
from lmmods.torch_engine.nn.dropout import TokenDropout
from lmmods.torch_engine.nn.export import save
from lmmods.torch_engine.nn.gradient_accumulation import GradientAccumulation, split_rows, tokens_per_piece
from lmmods.torch_engine.nn.loss import IGNORED, LossSums, chunk_bytes
from lmmods.torch_engine.nn.optim import (
    averages,
    build_optimizer,
    build_schedule,
    follow_recipe,
    group_settings,
    recipe_lr,
)
from lmmods.torch_engine.nn.stored import read_shards, waiting


class TaskModule(TaskFields, L.LightningModule, ABC):
    """A LightningModule that trains one network: builds it, takes steps, evaluates, and fills checkpoints."""

    auto_class = "AutoModel"
    task_type: str | None = None
    metric_names: tuple[str, ...] = ()  # of the sums in `LossSums.metrics`

    def __post_init__(self) -> None:
        L.LightningModule.__init__(self)  # takes none of the dataclass fields
        super().__post_init__()
        require(self.gradient_checkpointing != "minimal", "model.gradient_checkpointing", "minimal",
                "true or false in the torch engine")
        self.model: nn.Module | None = None
        self.teacher_model: nn.Module | None = None  # frozen, of `model.teacher`
        self.built_for: torch.device | None = None  # its kind chooses block sizes; None for that of the tensors
        # Checkpoints hold trainable parameters only; `on_load_checkpoint` checks their names and shapes strictly.
        self.strict_loading = False
        self._chunks: list[dict[str, Tensor]] = []
        self._is_averaged = False  # see `averaged`
        self._dropout: TokenDropout | None = None
        self.context_parallel: ContextParallel | None = None  # set where rows are cut over processes
        self.accumulation = GradientAccumulation(self.metric_names)
        self.eval_metrics = nn.ModuleDict({name: WeightedMean() for name in ("loss", "accuracy")})

    # The network -----------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build the network, on the trainer's device and in the dtypes of its precision."""
        if self.model is None:
            self.build_model()
            self.shard_model()
            self.prepare_model()

    def link(self, datamodule: Any) -> None:
        """Hook before the data module makes the training loader: hand it what it needs of the task."""

    def build_model(self, abstract: bool = False) -> None:
        """Build the network of this process: all of it, not sharded yet.

        Args:
            abstract: As in `build_network`.
        """
        if self.max_memory is not None and not isinstance(self.trainer.strategy, SingleDeviceStrategy):
            raise UserError("model.max_memory spreads the model over the GPUs within one process: set trainer.devices "
                            "to 1, or take it out and shard the model with trainer.strategy: fsdp.")
        # Deferred weights are read by rows, but tensor parallelism cuts matrices in two dimensions.
        by_parts = self.device_mesh is not None and sharding.num_repeats(self.trainer.strategy) == 1
        self.built_for = self.trainer.strategy.root_device
        self.model = build_network(self, self.auto_class, self.task_type, self.trainer.datamodule,
                                   precision=self.trainer.precision, device=self.built_for, seed=base_seed(),
                                   by_parts=by_parts, abstract=abstract)
        self._dropout = TokenDropout.from_model(self.model)
        if self.token_loss.divergence is None:
            return
        check_teacher(self.teacher, self.trainer.datamodule.tokenizer, self.trust_remote_code)
        self.metric_names = self.token_loss.metric_names
        self.accumulation = GradientAccumulation(self.metric_names)
        self.eval_metrics["divergence"] = WeightedMean()
        if self.teacher.top_k is None:
            self.teacher_model = self.build_teacher(abstract)
        else:
            self.trainer.datamodule.keeps_teacher = True

    def build_teacher(self, abstract: bool = False) -> nn.Module:
        """Return the teacher's network, frozen; argument as of `build_model`."""
        network = build_network(self.teacher_fields, self.auto_class, self.task_type, self.trainer.datamodule,
                                precision=self.trainer.precision, device=self.built_for, seed=base_seed(), frozen=True,
                                abstract=abstract)
        return network.requires_grad_(False)  # an adapter on it, too

    def shard_model(self, one_document: bool = False) -> None:
        """Shard the network over the device mesh, if there is one.

        Args:
            one_document: As in `ContextParallel`.
        """
        if self.device_mesh is None:
            return
        if (num_pieces := sharding.num_pieces(self.trainer.strategy)) > 1:
            self.context_parallel = ContextParallel.over(self.model, self.device_mesh, num_pieces, self.built_for,
                                                         one_document)
        # Sharded without values, then filled: each process reads only its own rows.
        stored = waiting(self.model)
        sharding.shard(self, self.model, self.device_mesh, self.teacher_model)
        read_shards(self.model, stored)

    def prepare_model(self) -> None:
        """Prepare what else the task needs for its steps, by running the network."""
        with self.trainer.precision_plugin.forward_context():
            self(self.on_model_ready)

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function that uses the network. Sharded parameters are gathered only while it runs."""
        return function(*args)

    def on_model_ready(self) -> None:
        """Hook called once the network is built, inside `forward`, so it may run the network."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name; a tied parameter appears once."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    # Training step: losses are summed over a step's micro-batches and divided once -----------------------------------
    #
    # Lightning calls on_train_batch_start, training_step and backward for each micro-batch, and after the last one of
    # an optimiser step configure_gradient_clipping, the optimiser and its schedule.

    @abstractmethod
    def batch_loss(self, batch: dict[str, Tensor], count_correct: bool = False) -> LossSums:
        """Return summed loss and weight of a micro-batch."""

    def complete(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch with the further inputs of the task's loss, computed without gradient."""
        return batch

    def survey(self, batches: Iterable[dict[str, Tensor]]) -> None:
        """Collect what each loss needs to know of all micro-batches of a step; called before the first of them."""

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        # Randomness other than dropout (noise, stochastic depth) depends on seed and position only, so neither an
        # evaluation nor a resume changes it.
        # Index of this micro-batch among those of all processes.
        place = batch_idx * self.trainer.num_data_ranks + self.trainer.data_rank
        seed_step(base_seed(), self.trainer.current_epoch, place)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the summed loss of the micro-batch's first chunk, scaled; `backward` computes the other chunks."""
        size = self.chunk_tokens()
        # Lightning runs one backward pass per training step, so `backward` computes the chunks after the first.
        first, *self._chunks = split_rows(batch, size) if size else [batch]
        self._dropout.begin(first)
        sums = self(self.batch_loss, self.complete(first))
        self.accumulation.add(sums, *self._counts(first))
        return sums.total / GradientAccumulation.GRADIENT_SCALE  # Lightning divides it by `accumulate_grad_batches` too

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run Lightning's backward pass, then forward and backward of the remaining chunks; gradients accumulate."""
        super().backward(loss, *args, **kwargs)
        for chunk in self._chunks:
            self._dropout.begin(chunk)
            with self.trainer.precision_plugin.forward_context():
                sums = self(self.batch_loss, self.complete(chunk))
            self.accumulation.add(sums, *self._counts(chunk))
            # Divided as the first chunk's loss was: there by `training_step` and by Lightning.
            (sums.total / GradientAccumulation.divisor(self.trainer.accumulate_grad_batches)).backward()
        self._chunks = []

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        """Average the gradient over the step, then clip it.

        The averaging is done here because Lightning calls this hook once per optimiser step, after the last backward
        pass and before the optimiser.
        """
        accumulated, strategy = self.trainer.accumulate_grad_batches, self.trainer.strategy
        norm = self.accumulation.average(optimizer, strategy, accumulated, recipe_lr(optimizer, self.optimizer))
        # On a CPU the check waits for no device, so it comes before weights change. 16-mixed skips such steps itself.
        if self.device.type == "cpu" and self.trainer.precision != "16-mixed":
            self.accumulation.check_finite(self.trainer.global_step + 1, self.trainer.current_epoch)
        if gradient_clip_val and gradient_clip_algorithm in (None, "norm"):
            # Under tensor parallelism gradients are on several meshes, which no foreach kernel combines.
            torch.nn.utils.clip_grads_with_norm_([p for group in optimizer.param_groups for p in group["params"]],
                                                 gradient_clip_val, norm,
                                                 foreach=False if sharding.num_repeats(strategy) > 1 else None)
        elif gradient_clip_val:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def chunk_tokens(self) -> int:
        """Return the tokens per chunk of a micro-batch; 0 for no chunks. Raises UserError as `tokens_per_piece`."""
        is_alone = isinstance(self.trainer.strategy, SingleDeviceStrategy) and self.trainer.precision != "16-mixed"
        hidden_size = self.model.config.get_text_config().hidden_size
        return tokens_per_piece(self.piece_tokens, is_alone, self.device, hidden_size)

    def _counts(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return real tokens of scored rows, and their number; the other rows only even out the processes.

        Under context parallelism only the first process of a group counts, as all of them see the same rows.
        """
        scored = self.scored_rows(batch) * (self.context_parallel is None or self.context_parallel.rank == 0)
        return (batch["attention_mask"].flatten(1).sum(1) * scored).sum(), scored.sum()

    def scored_rows(self, batch: dict[str, Tensor]) -> Tensor:
        """Return which rows have a label, [B] bool."""
        return (batch["labels"] != IGNORED).any(dim=1)

    # Optimiser -------------------------------------------------------------------------------------------------------

    def configure_optimizers(self):
        optimizer = build_optimizer(self.named_parameters(), self.optimizer)
        # From before a checkpoint overwrites them, for `on_train_start`.
        self._group_settings = group_settings(optimizer)
        schedule = build_schedule(optimizer, self.optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        """Restore the recipe's settings over those of a loaded checkpoint."""
        follow_recipe(self.trainer.optimizers[0], self.lr_schedulers(), self._group_settings)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the network the average of its parameters, if the run keeps one; may be nested."""
        if self.optimizer.ema_decay is None or self._is_averaged or not self.trainer.optimizers:
            yield
            return
        self._is_averaged = True
        try:
            with averages(self.trainer.optimizers[0]):
                yield
        finally:
            self._is_averaged = False

    # Lightning calls these after and before the hooks of callbacks, of which the last saves a checkpoint.

    def on_validation_epoch_start(self) -> None:
        if self.trainer.state.fn == "fit":
            self._validation = ExitStack()
            self._validation.enter_context(self.averaged())

    def on_validation_epoch_end(self) -> None:
        if self.trainer.state.fn == "fit":
            self._validation.close()

    # Validation and test; prediction is each task's own --------------------------------------------------------------

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        sums = self(self.batch_loss, batch, True)
        self.eval_metrics["loss"].update(sums.total, sums.weight)
        self.eval_metrics["accuracy"].update(sums.correct, sums.weight)
        if "divergence" in self.eval_metrics:
            self.eval_metrics["divergence"].update(*sums.metrics[0])

    test_step = validation_step

    def eval_results(self, role: str) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the metrics of an evaluation (`val` or `test`) over all ranks, and JSON files; resets the sums."""
        results = {name: metric.compute().item() for name, metric in self.eval_metrics.items()}
        results["perplexity"] = perplexity(results["loss"])
        for metric in self.eval_metrics.values():
            metric.reset()
        return results, {}

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Reduce the checkpoint to trainable parameters."""
        trainable = self.trainable()
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: state[name] for name in trainable}  # without the frozen base
        checkpoint["param_names"] = list(trainable)

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        if self.trainer.state.fn != "fit":
            checkpoint["state_dict"] = averaged_parameters(
                checkpoint, num_layers(name for name, _ in self.named_parameters()))
        check_parameters(*({name: tuple(tensor.shape) for name, tensor in tensors.items()}
                           for tensors in (checkpoint["state_dict"], self.trainable())))

    # Sizes -----------------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """Describe parameters, dtypes and how micro-batches are computed, in one or two lines."""
        sizes = summary.summarize(self.model)
        chunk = self.chunk_tokens()
        return (describe_sizes(sizes.num_params, sizes.num_trainable, sizes.dtypes)
                + (f" On this CPU a micro-batch is computed {chunk} tokens at a time." if chunk else "")
                + self._describe_teacher())

    def _describe_teacher(self) -> str:
        if self.teacher_model is None:
            return ""
        sizes = summary.summarize(self.teacher_model)
        return describe_teacher(self.teacher.pretrained, sizes.num_params, sizes.dtypes)

    def copied_bytes(self) -> int:
        """Return the bytes of weights that the task holds outside of the network."""
        return 0 if self.teacher_model is None else summary.summarize(self.teacher_model).weight_bytes

    def step_memory(self) -> StepMemory:
        """Return the memory of a training step on this device."""
        data = self.trainer.datamodule
        compute_bytes = 4 if self.trainer.precision == "32-true" else 2
        per_row, chunk = data.sequences_per_row * data.max_length, self.chunk_tokens()
        tokens = data.batch_size * per_row
        if chunk:
            tokens = min(tokens, max(chunk, per_row))  # a row is never split
        tokens = -(-tokens // sharding.num_pieces(self.trainer.strategy))
        step = Step(0, self.optimizer.name, bool(self.gradient_checkpointing), compute_bytes,
                    runs="compiled" if self.compile else "eager", averages=self.optimizer.ema_decay is not None,
                    in_full=not self.trains_adapter, has_dropout=self.lora is not None and self.lora.dropout > 0,
                    chunk_bytes=chunk_bytes(self.device) if self.fast_kernels else math.inf)
        return summary.step_memory(self.model, step, tokens, self.device, self.copied_bytes())

    def flops_per_token(self) -> int:
        """Return the FLOPs per training token."""
        teacher = self.teacher_model
        # Of a frozen network half of the FLOPs are those of the backward pass.
        return summary.training_flops(self.model) + (0 if teacher is None else summary.training_flops(teacher) // 2)

    # Export ----------------------------------------------------------------------------------------------------------

    def export(self, folder: Path) -> None:
        """Write the model or its adapter as a folder for from_pretrained / PeftModel.

        A collective call: all processes must make it; rank 0 writes.
        """
        save(self.model, folder, self.trains_adapter, self.save_dtype and getattr(torch, self.save_dtype),
             writes=self.trainer.is_global_zero)


# ---------------------------------------------------------------------------------------------------------------------
# Randomness.

def base_seed() -> int:
    """Return the seed set by Lightning's `seed_everything`."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def seed_step(*position: int) -> None:
    """Seed torch, numpy and python from the run's seed and a position in it, so no generator state is saved."""
    mixed = np.random.SeedSequence(position).generate_state(1, np.uint32)[0].item()
    # Not torch.manual_seed: for each uninitialised device it would queue a call with a traceback, at every step.
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(mixed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(mixed)
    np.random.seed(mixed)
    random.seed(mixed)


# ---------------------------------------------------------------------------------------------------------------------
# Means of an evaluation.

class WeightedMean(torchmetrics.Metric):
    """Sum of values over sum of weights, over all batches and ranks; float64, so that order hardly matters."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "weight"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, total: Tensor, weight: Tensor) -> None:
        self.total += total.double()
        self.weight += weight.double()

    def compute(self) -> Tensor:
        return self.total / self.weight
