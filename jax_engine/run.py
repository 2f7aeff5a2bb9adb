"""What the parts of a command share: data and network on the devices, and, in fit, what training changes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from jax_engine.distributed.interface import Parallel
from jax_engine.distributed.prefetch import GlobalBatch, Prefetcher
from jax_engine.distributed.steps import Steps, fetch_figures
from jax_engine.distributed.tree import Tree
from jax_engine.optim import step_scalars
from jax_engine.tasks.base import Task, Weights
from lmmods.core.progress_bar import Bar
from lmmods.core.throughput import Stopwatch
from lmmods.runs.csv_logger import Logger
from lmmods.runs.folder import RunFolder
from lmmods.runs.progress import Progress
from lmmods.runs.schedule import Schedule, limited
from lmmods.runs.step_metrics import StepMetrics


@dataclass(kw_only=True)
class Run:
    """One command at work.

    Args:
        data: The DataModule, set up.
        description: Of the network, in a line.
        needed: Rough bytes of a training step on each device.
        flops_per_token: Arithmetic of one training token.
        weights: Parameters on the devices, as they are now.
        limits: `trainer.limit_<role>_batches` by role: train, val, test, predict.
        stopwatch: Time of training proper.
        loggers: Of this process; those of the first log, from when the run folder is ready.
        progress: How far training is.
    """

    folder: RunFolder
    data: Any
    task: Task
    description: str
    needed: int
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
        """Whether this process writes files."""
        return jax.process_index() == 0

    def num_batches(self, loader: Any, role: str) -> int:
        """Global micro-batches of a pass over a loader."""
        return limited(-(-len(loader) // self.parallel.data_parallel_size), self.limits[role], role)

    def batches(self, loader: Any, batch_size: int, num_batches: int | float,
                max_length: int | None = None) -> Iterator[GlobalBatch]:
        """At most `num_batches` global micro-batches of a pass over a loader.

        Args:
            max_length: Longest row in tokens; None is `data.max_length`.
        """
        prefetcher = Prefetcher(loader, self.parallel, batch_size, self.data.tokenizer.pad_token_id,
                                max_length or self.data.max_length)
        with prefetcher:
            for number, batch in enumerate(prefetcher, start=1):
                yield batch
                if number == num_batches:
                    return


@dataclass(kw_only=True)
class Training(Run):
    """A run of fit.

    Args:
        schedule: How long it is and when it validates.
        metrics: What is measured.
        state: Parameters that train and optimiser state, on the devices.
        accumulation: Summed gradients of the step under way; None where none is.
        num_accumulated: Micro-batches of each rank in it.
        data_position: `state_dict()` of the training loader after the last micro-batch trained on.
        should_stop: Whether early stopping has ended it.
    """

    schedule: Schedule
    metrics: StepMetrics
    state: Tree
    accumulation: Tree | None = None
    num_accumulated: int = 0
    data_position: dict[str, Any] = field(default_factory=dict)
    should_stop: bool = False

    def __post_init__(self) -> None:
        self.metrics.report = self._report
        self.metrics.show = lambda step: self.bar.update(step, self.metrics.shown())

    def _report(self, metrics: dict[str, float], step: int) -> None:
        for logger in self.loggers:
            logger.log_metrics(metrics, step=step)

    def note_step(self, figures: dict[str, jax.Array]) -> None:
        """Note the figures of the step just taken, from `Steps`, for `metrics`."""
        progress, schedule = self.progress, self.schedule
        lr = self.task.optimizer.lr_at(progress.step - 1, schedule.num_steps)

        def fetch() -> dict[str, float]:
            fetched = fetch_figures(figures)
            names = ("weight", "grad_norm", "num_tokens", "num_rows", *self.task.metric_names)
            return {"loss": fetched["loss"], "lr": lr, **{name: fetched[name] for name in names if name in fetched}}

        self.metrics.add(progress.step, progress.epoch + progress.batches / schedule.batches_per_epoch, fetch,
                         figures["total"].is_ready)
        self.bar.update(progress.step)

    def replace_state(self, state: Tree) -> None:
        """Take the state after a step, which has consumed the one before."""
        self.state = state
        self.weights = Weights(self.parallel, state["trainable"], self.weights.frozen)

    def scalars(self) -> Any:
        """What the next optimiser step needs beside gradients, on the devices."""
        return self.parallel.put_scalars(step_scalars(self.task.optimizer, self.progress.step, self.schedule.num_steps))

    @property
    def ends_epoch(self) -> bool:
        """Whether the last micro-batch was the last of its epoch."""
        return self.schedule.ends_epoch(self.progress)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to train."""
        return self.should_stop or self.progress.step >= self.schedule.num_steps
