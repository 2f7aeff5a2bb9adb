"""A running command as tasks see it: parameters on the devices, data and loggers."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Protocol

from jax_engine.distributed.interface import Parallel
from jax_engine.distributed.prefetch import GlobalBatch
from jax_engine.distributed.steps import Steps
from jax_engine.distributed.tree import Tree, merge
from lmmods.data.base import DataModule
from lmmods.recipe.tasks.base import TaskFields
from lmmods.runs.csv_logger import Logger
from lmmods.runs.folder import RunFolder
from lmmods.runs.progress import Progress
from lmmods.runs.step_metrics import StepMetrics


class Weights:
    """Trainable and frozen parameters, as trees of kind state."""

    def __init__(self, parallel: Parallel, trainable: Tree, frozen: Tree):
        self._parallel, self.trainable, self.frozen = parallel, trainable, frozen

    @cached_property
    def replica(self) -> Tree:
        """All parameters in one tree, for programs outside the compiled steps. All processes must call this."""
        return self._parallel.replica(merge(self.trainable, self.frozen))


class Run(Protocol):
    """Interface of `jax_engine.run.Run` for tasks; `metrics` exists in training only."""

    folder: RunFolder
    data: DataModule
    task: TaskFields
    parallel: Parallel
    steps: Steps
    weights: Weights
    loggers: list[Logger]
    progress: Progress
    metrics: StepMetrics

    @property
    def is_first(self) -> bool:
        """True on the process that writes files."""

    def batches(self, loader: Iterable, batch_size: int, num_batches: int | float, max_length: int | None = None,
                lengths: Sequence[int] = ()) -> Iterator[GlobalBatch]:
        """Yield at most `num_batches` global batches of one pass over a loader."""
