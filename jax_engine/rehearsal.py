"""Training that leaves nothing: each step's figures are watched, and there is no run folder."""

from collections.abc import Callable
from typing import Any

from jax_engine.checkpointing import Checkpointer
from jax_engine.evaluation import Evaluation
from jax_engine.export import Exporter
from jax_engine.loop import Loop
from jax_engine.run import Training
from lmmods.core.signals import Interruption
from lmmods.evaluation.mmlu import MMLUEvaluator
from lmmods.evaluation.samples import SampleWriter
from lmmods.runs.checkpoint_policy import CheckpointPolicy
from lmmods.runs.events import Events
from lmmods.runs.hub_upload import Publisher
from lmmods.runs.identity import RunIdentity
from lmmods.runs.progress import Cut
from lmmods.runs.step_metrics import StepMetrics


class WatchedSteps(StepMetrics):
    """Hands the figures of each optimiser step to `watch`, which says whether it was the last."""

    def __init__(self, run: Training, watch: Callable[[dict[str, float]], bool]) -> None:
        super().__init__(run.stopwatch)
        self._run, self._watch = run, watch

    def add(self, step: int, epoch: float, figures: Callable[[], dict[str, float]],
            is_done: Callable[[], bool] = lambda: False) -> None:
        if self._watch(figures()):
            self._run.should_stop = True


def rehearse(run: Training, loader: Any, accumulate: int, watch: Callable[[dict[str, float]], bool]) -> None:
    """Train until `watch` says that a step was the last, or to the end of the run.

    Args:
        accumulate: Micro-batches of each rank that make an optimiser step.
    """
    run.metrics = WatchedSteps(run, watch)
    samples, mmlu, publish = SampleWriter(), MMLUEvaluator(), Publisher()
    evaluation = Evaluation(run, samples, mmlu)
    if run.schedule.num_val_batches:
        evaluation.evaluate("val", limit=1, keep=False)
    run.schedule = run.schedule.without_validation()
    cut = Cut(run.data.batch_size, accumulate, run.parallel.data_parallel_size)
    loop = Loop(run, accumulate, Events(None, samples, mmlu, publish, may_stop_early=False), evaluation,
                Checkpointer(run, cut, CheckpointPolicy(), [], RunIdentity()), Exporter(run, publish), [],
                Interruption(saves=False))
    loop.train(loader, resumed=False)
    run.bar.close()
