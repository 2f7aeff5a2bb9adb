"""Shared state of a command: data, network and weights on the devices, and in fit the state that training changes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jax_engine.distributed.interface import Parallel
from jax_engine.distributed.prefetch import GlobalBatch, Prefetcher
from jax_engine.distributed.steps import Steps, fetch_step_metrics
from jax_engine.distributed.tree import Tree
from jax_engine.optim import AVERAGE, step_scalars
from jax_engine.tasks.base import Task, Weights
from lmmods.core.memory import StepMemory
from lmmods.core.progress_bar import Bar
from lmmods.core.throughput import Stopwatch
from lmmods.data.base import DataModule
from lmmods.recipe.trainer_fields import limit_batches
from lmmods.runs.csv_logger import Logger
from lmmods.runs.folder import RunFolder
from lmmods.runs.progress import Progress
from lmmods.runs.schedule import Schedule
from lmmods.runs.step_metrics import StepMetrics


@dataclass(kw_only=True)
class Run:
    """State shared by the parts of a running command.

    Args:
        data: The DataModule, set up.
        description: One-line description of the network.
        memory: Memory of a training step on each device, estimated before the step is compiled.
        flops_per_token: FLOPs per training token.
        weights: Current parameters, on the devices.
        limits: `trainer.limit_<role>_batches` by role: train, val, test, predict.
        stopwatch: Measures training time only, without validation, checkpoints and compilation.
        loggers: This process's loggers; empty on all but the first process, and on it until the run folder is ready.
        progress: Training progress.
    """

    folder: RunFolder
    data: DataModule
    task: Task
    description: str
    memory: StepMemory
    flops_per_token: int
    parallel: Parallel
    steps: Steps
    weights: Weights
    limits: dict[str, int | float | None]
    bar: Bar
    stopwatch: Stopwatch
    loggers: list[Logger] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)

    @property
    def is_first(self) -> bool:
        """True on the process that writes files."""
        return jax.process_index() == 0

    @property
    def eval_weights(self) -> Weights:
        """Parameters to evaluate and export."""
        return self.weights

    def num_batches(self, loader: Any, role: str) -> int:
        """Return the number of global batches in one pass over a loader, after `limits`."""
        return limit_batches(-(-len(loader) // self.parallel.data_parallel_size), self.limits[role], role)

    def batches(self, loader: Any, batch_size: int, num_batches: int | float,
                max_length: int | None = None, lengths: Sequence[int] = ()) -> Iterator[GlobalBatch]:
        """Yield at most `num_batches` global batches of one pass over a loader.

        Args:
            max_length: Maximum row length in tokens. Default: `data.max_length`.
            lengths: See `Prefetcher`.
        """
        # One prefetcher per pass: leaving the loop early closes it and drops the batches read ahead.
        prefetcher = Prefetcher(loader, self.parallel, batch_size, self.data.tokenizer.pad_token_id,
                                max_length or self.data.max_length, lengths, complete=self.task.complete)
        with prefetcher:
            for count, batch in enumerate(prefetcher, start=1):
                yield batch
                if count == num_batches:
                    return


@dataclass(kw_only=True)
class Training(Run):
    """State of a training run (fit).

    Args:
        schedule: Length of the run and when it validates.
        metrics: Collects the metrics of steps and evaluations.
        state: Trainable parameters and optimiser state, on the devices.
        lengths: Lengths that training batches are padded to (see `choose_padded_lengths`).
        data_position: `state_dict()` of the training loader after the last completed step.
        should_stop: Set by early stopping to end the run.
    """

    schedule: Schedule
    metrics: StepMetrics
    state: Tree
    lengths: tuple[int, ...] = ()
    data_position: dict[str, Any] = field(default_factory=dict)
    should_stop: bool = False

    def note_step(self, step_metrics: dict[str, jax.Array]) -> None:
        """Add the metrics of the latest optimiser step (from `Steps`) to `metrics`, without waiting for the device."""
        progress, schedule = self.progress, self.schedule
        # `progress.step` already counts this step.
        lr = self.task.optimizer.lr_at(progress.step - 1, schedule.num_steps)

        def fetch() -> dict[str, float]:
            fetched = fetch_step_metrics(step_metrics)
            names = ("weight", "grad_norm", "num_tokens", "num_rows", *self.task.metric_names)
            return {"loss": fetched["loss"], "lr": lr, **{name: fetched[name] for name in names if name in fetched}}

        self.metrics.add(progress.step, progress.epoch + progress.epoch_step / schedule.steps_per_epoch, fetch,
                         step_metrics["total"].is_ready)
        self.bar.update(progress.step)

    def replace_state(self, state: Tree) -> None:
        """Adopt the state after a step; the buffers of the previous state were donated to it."""
        self.state = state
        self.weights = Weights(self.parallel, state["trainable"], self.weights.frozen)

    def scalars(self) -> Any:
        """Return the scalars of the next optimiser step (`optim.step_scalars`), on the devices."""
        return self.parallel.put_scalars(step_scalars(
            self.task.optimizer, self.progress.step, self.schedule.num_steps, self.task.network.num_named_layers))

    @property
    def eval_weights(self) -> Weights:
        """Averaged parameters, or the current ones if the run keeps no average."""
        if self.task.optimizer.ema_decay is None:
            return self.weights
        averages = jax.tree.map(lambda average, param: average.astype(param.dtype),
                                self.state["optimizer"][AVERAGE], self.weights.trainable)
        return Weights(self.parallel, averages, self.weights.frozen)

    @property
    def ends_epoch(self) -> bool:
        """True if the last completed step ended its epoch."""
        return self.schedule.ends_epoch(self.progress)

    @property
    def is_done(self) -> bool:
        """True after the last step, or after early stopping."""
        return self.should_stop or self.progress.step >= self.schedule.num_steps
