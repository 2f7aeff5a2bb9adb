"""Training without a run folder: nothing is logged, sampled or saved. `find` measures steps with it."""

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmmods.commands.setup import Setup
    from lmmods.data.base import DataModule

Watch = Callable[[dict[str, float]], bool]


def dry_run(setup: "Setup", watch: Watch) -> int | None:
    """Train as `fit` does, without writing anything: no run folder is created or locked.

    Args:
        watch: Called with the metrics of each optimiser step; training stops when it returns True.

    Returns:
        Peak memory of the engine on this process's first device, in bytes; None if it does not report it.
    """
    run = _run_on_jax if setup.recipe.engine == "jax" else _run_on_torch
    return run(setup.trainer, setup.model, setup.datamodule, watch)


def _run_on_torch(trainer: Any, model: Any, datamodule: "DataModule", watch: Watch) -> int | None:
    import lightning as L
    import torch

    class Watcher(L.Callback):
        """Stops training when `watch` returns True, or at the end of the run."""

        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
            # The metrics are sums over all processes, so all processes stop at the same step.
            if watch(module.last_step.step_metrics()) or trainer.global_step >= trainer.num_steps:
                trainer.end()

    trainer.callbacks = [Watcher()]  # without those that write files
    with trainer.fast_products(model):
        L.Trainer.fit(trainer, model, datamodule=datamodule)  # our trainer's own fit would lock the run folder
    device = trainer.strategy.root_device
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def _run_on_jax(trainer: Any, model: Any, datamodule: "DataModule", watch: Watch) -> int | None:
    from jax_engine.checkpoint import Checkpointer
    from jax_engine.distributed import devices
    from jax_engine.trainer import Evaluation, Exporter, Loop
    from lmmods.core.signals import Interruption
    from lmmods.evaluation.mmlu import MMLUEvaluator
    from lmmods.evaluation.samples import SampleWriter
    from lmmods.runs.checkpoint_policy import CheckpointPolicy
    from lmmods.runs.events import Events
    from lmmods.runs.hub_upload import Publisher
    from lmmods.runs.identity import RunIdentity
    from lmmods.runs.step_metrics import StepMetrics

    class Watcher(StepMetrics):
        """Stops training when `watch` returns True."""

        def add(self, step: int, epoch: float, step_metrics: Callable[[], dict[str, float]],
                is_done: Callable[[], bool] = lambda: False) -> None:
            if watch(step_metrics()):
                run.should_stop = True

    trainer.connect()
    run, loader = trainer.training_run(model, datamodule, None)
    model.begin(run)
    run.metrics = Watcher(run.stopwatch)
    samples, mmlu, publish = SampleWriter(), MMLUEvaluator(), Publisher()
    evaluation = Evaluation(run, samples, mmlu)
    # Evaluate one batch, so that its memory counts and its errors show.
    if run.schedule.num_val_batches:
        evaluation.evaluate("val", limit=1, keep=False)
    run.schedule = run.schedule.without_validation()
    loop = Loop(run, trainer.accumulate_grad_batches, Events(None, samples, mmlu, publish, may_stop_early=False),
                evaluation, Checkpointer(run, CheckpointPolicy(), [], RunIdentity()), Exporter(run, publish), [],
                Interruption(saves=False))
    with closing(run.bar):
        loop.train(loader, resumed=False)
    return devices.peak_memory()
