"""Base class of all torch tasks: the network, the optimiser step, evaluation and checkpoints."""

import math
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torchmetrics
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn

from lmmods.core.errors import UserError
from lmmods.core.memory import Step, StepMemory, describe_sizes, describe_teacher
from lmmods.core.settings import TokenLoss, num_layers, require
from lmmods.core.text_metrics import perplexity
from lmmods.data.base import DataModule
from lmmods.data.batch.collate import PLACES
from lmmods.data.teacher import check_teacher
from lmmods.recipe.tasks.base import TaskFields
from lmmods.runs.averaging import load_averages
from lmmods.runs.identity import check_parameters
from lmmods.runs.step_metrics import check_finite
from lmmods.torch_engine.nn import sharding, summary
from lmmods.torch_engine.nn.building import build_network
from lmmods.torch_engine.nn.context_parallel import ContextParallel
from lmmods.torch_engine.nn.distillation import TeacherStates, TeacherTopK, distillation_loss
from lmmods.torch_engine.nn.dropout import TokenDropout
from lmmods.torch_engine.nn.export import save
from lmmods.torch_engine.nn.loss import IGNORED, LossSums, chunk_bytes, token_loss
from lmmods.torch_engine.nn.micro_batches import (
    StepSums,
    choose_chunk_tokens,
    full_precision,
    split_rows,
    stack_sums,
    sum_over_processes,
)
from lmmods.torch_engine.nn.optim import (
    averages,
    build_optimizer,
    build_schedule,
    follow_recipe,
    group_settings,
    recipe_lr,
    total_norm,
)
from lmmods.torch_engine.nn.stored import pop_sources, read_shards


class TaskModule(TaskFields, L.LightningModule, ABC):
    """A LightningModule that trains one network: builds it, takes steps, evaluates, and fills checkpoints."""

    auto_class = "AutoModel"
    task_type: str | None = None
    metric_names: tuple[str, ...] = ()  # names of `LossSums.metrics`

    def __post_init__(self) -> None:
        L.LightningModule.__init__(self)  # takes none of the dataclass fields
        super().__post_init__()
        require(self.gradient_checkpointing != "minimal", "model.gradient_checkpointing", "minimal",
                "true, offload or false in the torch engine")
        require(self.gradient_checkpointing != "offload" or not self.compile, "model.compile", True,
                "false with model.gradient_checkpointing: offload")
        self.model: nn.Module | None = None
        self.teacher_model: nn.Module | None = None  # the frozen network of `model.teacher`
        self.built_for: torch.device | None = None  # its type determines block sizes; None uses the tensors' device
        # Checkpoints contain only trainable parameters; `on_load_checkpoint` checks their names and shapes.
        self.strict_loading = False
        self._is_averaged = False  # see `use_averages`
        self._dropout: TokenDropout | None = None
        self.context_parallel: ContextParallel | None = None  # set if rows are split over processes
        self.automatic_optimization = False
        self.last_step: StepSums | None = None  # sums of the last optimiser step
        self.eval_metrics = nn.ModuleDict({name: WeightedMean() for name in ("loss", "accuracy")})

    # The network -----------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build the network, on the trainer's device and in the dtypes of its precision."""
        if self.model is None:
            self.build_model()
            self.shard_model()
            self.prepare_model()

    def link(self, datamodule: DataModule) -> None:
        """Hook called before the data module makes the training loader, to give it what it needs from the task."""

    def build_model(self, abstract: bool = False) -> None:
        """Build the whole network on this process, not sharded yet.

        Args:
            abstract: As in `build_network`.
        """
        if self.max_memory is not None and not isinstance(self.trainer.strategy, SingleDeviceStrategy):
            raise UserError("model.max_memory spreads the model over the GPUs of one process. Set trainer.devices to "
                            "1, or remove model.max_memory and set trainer.strategy to fsdp.")
        # Deferred weights are read by rows, but tensor parallelism splits matrices in two dimensions.
        by_parts = self.device_mesh is not None and sharding.tensor_parallel_size(self.trainer.strategy) == 1
        self.built_for = self.trainer.strategy.root_device
        self.model = build_network(self, self.auto_class, self.task_type, self.trainer.datamodule,
                                   precision=self.trainer.precision, device=self.built_for, seed=base_seed(),
                                   by_parts=by_parts, abstract=abstract)
        self._dropout = TokenDropout.from_model(self.model)
        if self.divergence is None:
            return
        check_teacher(self.teacher, self.trainer.datamodule.tokenizer, self.trust_remote_code)
        self.metric_names = self.divergence.metric_names
        self.eval_metrics["divergence"] = WeightedMean()
        if self.teacher.top_k is None:
            self.teacher_model = self.build_teacher(abstract)
        else:
            self.trainer.datamodule.add_column(PLACES)

    def build_teacher(self, abstract: bool = False) -> nn.Module:
        """Return the teacher's network, frozen; `abstract` as in `build_model`."""
        network = build_network(self.teacher_fields, self.auto_class, self.task_type, self.trainer.datamodule,
                                precision=self.trainer.precision, device=self.built_for, seed=base_seed(), frozen=True,
                                abstract=abstract)
        return network.requires_grad_(False)  # an adapter may train

    def shard_model(self, one_document: bool = False) -> None:
        """Shard the network over the device mesh, if there is one.

        Args:
            one_document: As in `ContextParallel`.
        """
        if self.device_mesh is None:
            return
        if (num_parts := sharding.context_parallel_size(self.trainer.strategy)) > 1:
            self.context_parallel = ContextParallel.over(self.model, self.device_mesh, num_parts, self.built_for,
                                                         one_document)
        # Shard the network without values, then fill it, so that each process reads only its own rows.
        sources = pop_sources(self.model)
        sharding.shard(self, self.model, self.device_mesh, self.teacher_model)
        read_shards(self.model, sources)

    def prepare_model(self) -> None:
        """Run the network to prepare the rest of the task, such as its head."""
        with self.trainer.precision_plugin.forward_context():
            self(self.on_model_ready)

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that uses the network. Sharded parameters are gathered only during this call."""
        return function(*args)

    def on_model_ready(self) -> None:
        """Hook called within `forward` once the network is built, so it may run the network."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name; a tied parameter appears once."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    # Training step: the gradient of the mean loss over a step's micro-batches, on all processes -----------------------

    def build_token_loss(self, teacher: TeacherStates | TeacherTopK | None, is_training: bool
                         ) -> Callable[..., LossSums]:
        """Return `token_loss` or `distillation_loss` with the task's settings; evaluation uses plain cross-entropy."""
        form = self.token_loss if is_training else TokenLoss()
        if teacher is None:
            return partial(token_loss, form=form)
        divergence = self.divergence if is_training else self.divergence.evaluated
        return partial(distillation_loss, form=form, divergence=divergence, teacher=teacher)

    @abstractmethod
    def batch_loss(self, batch: dict[str, Tensor], count_correct: bool = False) -> LossSums:
        """Return summed loss and weight of a micro-batch."""

    def target_weight(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the total weight of a micro-batch in `batch_loss`, a scalar, before its loss is computed."""
        return (batch["labels"] != IGNORED).sum()

    def complete(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch with additional inputs of the task's loss, computed without gradient."""
        return batch

    def survey(self, batches: Iterable[dict[str, Tensor]]) -> None:
        """Compute statistics of all micro-batches that their losses need; called at the start of a step."""

    def training_step(self, batches: list[dict[str, Tensor]], batch_idx: int) -> None:
        """Take an optimiser step on these micro-batches; `batch_idx` is the index of the step in its epoch."""
        optimizer = self.optimizers()

        def backward(loss: Tensor) -> None:
            self.trainer.stop_if_requested()  # a step abandoned here is computed again on resume
            self.manual_backward(loss)

        with full_precision(self.device):
            optimizer.zero_grad()
            self.survey(batches)
            self.add_gradients(batches, batch_idx, backward)
            optimizer.step()  # calls `on_before_optimizer_step`
            self.lr_schedulers().step()

    def add_gradients(self, batches: list[dict[str, Tensor]], step: int, backward: Callable[[Tensor], None]) -> None:
        """Add the gradient of a step's mean loss over all processes to the parameters' gradients.

        Args:
            step: Index of the step in its epoch.
            backward: Computes the gradients of a part of the loss.
        """
        trainer, strategy = self.trainer, self.trainer.strategy
        weight = torch.stack([self.target_weight(batch) for batch in batches]).sum().double().to(self.device)
        # Processes that share a micro-batch have each counted all of its weight.
        weight = sum_over_processes(weight, strategy) / sharding.model_parallel_size(strategy)
        self._weight = weight
        # Strategies average gradients over processes. A step without labels has gradient 0, not NaN.
        scale = sharding.num_losses(strategy) / torch.where(weight > 0, weight, 1)
        start, size, sums = step * trainer.accumulate, self.chunk_tokens(), []
        # DeepSpeed needs a forward pass through its engine before each backward pass.
        run = getattr(strategy, "run_forward", self)
        for index, batch in enumerate(batches):
            # Randomness other than dropout (noise, stochastic depth) depends only on the seed and on the position among
            # the micro-batches of all processes, so neither an evaluation nor a resume changes it.
            seed_step(base_seed(), trainer.current_epoch, (start + index) * trainer.num_data_ranks + trainer.data_rank)
            chunks = split_rows(batch, size) if size else [batch]
            for chunk in chunks:
                is_last = index == len(batches) - 1 and chunk is chunks[-1]
                self._dropout.begin(chunk)
                # DDP sums the gradients of processes in a step's last backward pass.
                with nullcontext() if is_last else getattr(strategy, "block_backward_sync", nullcontext)():
                    with trainer.precision_plugin.forward_context():
                        loss = run(self.batch_loss, self.complete(chunk))
                    backward(loss.total * scale.to(loss.total))
                sums.append(stack_sums(loss, *self._count_rows(chunk)))
        # All processes of a tensor-parallel group have computed the same loss, so count it once.
        self._sums = sum_over_processes(torch.stack(sums).sum(0), strategy) / sharding.tensor_parallel_size(strategy)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure and clip the gradient."""
        trainer, tensor_parallel_size = self.trainer, sharding.tensor_parallel_size(self.trainer.strategy)
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = total_norm([p.grad for p in params])
        self.finish_step(norm, recipe_lr(optimizer, self.optimizer))
        # On a CPU the check need not synchronise, so run it before weights change. 16-mixed skips such steps itself.
        if self.device.type == "cpu" and trainer.precision != "16-mixed":
            self.check_finite(trainer.global_step + 1)
        if trainer.clip_val and trainer.gradient_clip_algorithm in (None, "norm"):
            # Under tensor parallelism gradients are on several meshes, which foreach kernels do not support.
            torch.nn.utils.clip_grads_with_norm_(params, trainer.clip_val, norm,
                                                 foreach=False if tensor_parallel_size > 1 else None)
        elif trainer.clip_val:
            self.clip_gradients(optimizer, trainer.clip_val, trainer.gradient_clip_algorithm)

    def finish_step(self, grad_norm: Tensor, lr: float) -> None:
        """Record the sums of the step; `grad_norm` is the gradient norm before clipping."""
        if hasattr(grad_norm, "full_tensor"):  # sharded gradients
            grad_norm = grad_norm.full_tensor()
        self.last_step = StepSums(torch.cat([self._sums, grad_norm.to(self._sums).unsqueeze(0)]), self._weight, lr,
                                  self.metric_names)

    def check_finite(self, step: int) -> None:
        """Raise UserError if the last step's loss or gradient norm is not finite. Synchronises with the device.

        Raises:
            RuntimeError: `target_weight` differs from the weight of the losses, so gradients are scaled wrongly.
        """
        if self.last_step is None:
            return
        metrics, weight = self.last_step.step_metrics(), self.last_step.target_weight.item()
        check_finite(metrics, step, self.trainer.current_epoch)
        if abs(metrics["weight"] - weight) > 1e-3 * metrics["weight"]:
            raise RuntimeError(f"{type(self).__name__}: the losses of step {step} have weight {metrics['weight']}, "
                               f"but target_weight returned {weight}. Make them equal.")

    def chunk_tokens(self) -> int:
        """Return the number of tokens per chunk of a micro-batch, 0 for no chunks; see `choose_chunk_tokens`."""
        is_whole = isinstance(self.trainer.strategy, SingleDeviceStrategy) or type(self.trainer.strategy) is DDPStrategy
        hidden_size = self.model.config.get_text_config().hidden_size
        return choose_chunk_tokens(self.piece_tokens, is_whole, self.device, hidden_size)

    def _count_rows(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the number of real tokens in rows with targets, and of these rows; filler rows do not count.

        Under context parallelism only the first process of a group counts, as all of them have the same rows.
        """
        is_counted = self.scored_rows(batch) * (self.context_parallel is None or self.context_parallel.rank == 0)
        return (batch["attention_mask"].flatten(1).sum(1) * is_counted).sum(), is_counted.sum()

    def scored_rows(self, batch: dict[str, Tensor]) -> Tensor:
        """Return which rows have a target, [B] bool."""
        return (batch["labels"] != IGNORED).any(dim=1)

    # Optimiser -------------------------------------------------------------------------------------------------------

    def configure_optimizers(self):
        optimizer = build_optimizer(self.named_parameters(), self.optimizer)
        # Recorded for `on_train_start` before a checkpoint overwrites them.
        self._group_settings = group_settings(optimizer)
        schedule = build_schedule(optimizer, self.optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        """Replace the settings of a loaded checkpoint by the recipe's."""
        follow_recipe(self.trainer.optimizers[0], self.lr_schedulers(), self._group_settings)

    @contextmanager
    def use_averages(self) -> Iterator[None]:
        """Use the averages of the parameters, if the run keeps them; may be nested."""
        if self.optimizer.ema_decay is None or self._is_averaged or not self.trainer.optimizers:
            yield
            return
        self._is_averaged = True
        try:
            with averages(self.trainer.optimizers[0]):
                yield
        finally:
            self._is_averaged = False

    # Lightning calls the first hook after those of callbacks, and the second before them; the last callback saves.

    def on_validation_epoch_start(self) -> None:
        if self.trainer.state.fn == "fit":
            self._validation = ExitStack()
            self._validation.enter_context(self.use_averages())

    def on_validation_epoch_end(self) -> None:
        if self.trainer.state.fn == "fit":
            self._validation.close()

    # Validation and test; each task implements prediction -------------------------------------------------------------

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        sums = self(self.batch_loss, batch, True)
        self.eval_metrics["loss"].update(sums.total, sums.weight)
        self.eval_metrics["accuracy"].update(sums.correct, sums.weight)
        if "divergence" in self.eval_metrics:
            self.eval_metrics["divergence"].update(*sums.metrics[0])

    test_step = validation_step

    def eval_results(self, role: str) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the metrics of an evaluation (`val` or `test`) over all ranks, and JSON files; reset the sums."""
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
            checkpoint["state_dict"] = load_averages(
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
        """Return the size in bytes of the weights that the task keeps outside the network."""
        return 0 if self.teacher_model is None else summary.summarize(self.teacher_model).weight_bytes

    def step_memory(self) -> StepMemory:
        """Return the memory of a training step on this device."""
        data = self.trainer.datamodule
        compute_bytes = 4 if self.trainer.precision == "32-true" else 2
        per_row, chunk = data.sequences_per_row * data.max_length, self.chunk_tokens()
        tokens = data.batch_size * per_row
        if chunk:
            tokens = min(tokens, max(chunk, per_row))  # a row is never split
        tokens = -(-tokens // sharding.context_parallel_size(self.trainer.strategy))
        step = Step(0, self.optimizer.name, bool(self.gradient_checkpointing), compute_bytes,
                    offloads=self.gradient_checkpointing == "offload" and self.device.type != "cpu",
                    runs="compiled" if self.compile else "eager", averages=self.optimizer.ema_decay is not None,
                    in_full=not self.trains_adapter, has_dropout=self.lora is not None and self.lora.dropout > 0,
                    chunk_bytes=chunk_bytes(self.device) if self.fast_kernels else math.inf)
        return summary.step_memory(self.model, step, tokens, self.device, self.copied_bytes())

    def flops_per_token(self) -> int:
        """Return the number of FLOPs per training token."""
        teacher = self.teacher_model
        # A frozen network has no backward pass, which is half of its FLOPs.
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
    seed = np.random.SeedSequence(position).generate_state(1, np.uint32)[0].item()
    # Not torch.manual_seed: for each uninitialised device it would queue a call with a traceback, at every step.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


# ---------------------------------------------------------------------------------------------------------------------
# Metrics of an evaluation.

class WeightedMean(torchmetrics.Metric):
    """Sum of values divided by sum of weights, over all batches and ranks; float64, so that order hardly matters."""

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
