"""Results of a JAX run: the model folder with its card, the plot of the loss, and uploads."""

from pathlib import Path

from jax_engine.distributed import devices as machines
from jax_engine.distributed.tree import Tree
from jax_engine.run import Training
from lmmods.core.console import say
from lmmods.runs.hub_upload import Publisher
from lmmods.runs.manifest import end_manifest
from lmmods.runs.model_card import complete_model
from lmmods.runs.wandb import log_checkpoint


class Exporter:
    """Writes and uploads the model. All processes must call each method."""

    def __init__(self, run: Training, publish: Publisher):
        self._run, self._publish = run, publish

    def upload(self) -> None:
        """Upload the current model in the background, unless the previous upload is still in progress."""
        run, publish, step = self._run, self._publish, self._run.progress.step
        if machines.any_of(publish.is_busy):
            return say(f"The upload to {publish.repo} is still under way: step {step} is left out.")
        with run.stopwatch.paused():
            trainable = run.parallel.fetch_state(run.state["trainable"])
            if run.is_first:
                folder = run.folder.room_for_upload()
                self._write(trainable, folder)
                publish.upload_aside(folder, step)

    def finish(self) -> None:
        """Write model/ and loss.png and mark the run completed."""
        run, folder, step = self._run, self._run.folder, self._run.progress.step
        trainable = run.parallel.fetch_state(run.state["trainable"])
        if run.is_first:
            folder.merge_metrics(run.metrics.final(step))
            exported = folder.room_for_model()
            self._write(trainable, exported)
            folder.put_model(exported)
            log_checkpoint(run.loggers, folder.find("last"), ends=True)
            end_manifest(folder, step)
            folder.complete()
            say(f"Wrote {folder.model}.")
        for logger in run.loggers[1:]:
            logger.finalize("success")
        machines.barrier("export")

    def publish(self) -> None:
        """Upload model/."""
        if self._run.is_first:
            self._publish.finish(self._run.folder.model, self._run.progress.step)
        machines.barrier("publish")

    def _write(self, trainable: Tree, path: Path) -> None:
        run, task = self._run, self._run.task
        task.export(trainable, path)
        complete_model(path, run.folder, task, task.auto_class, run.data)
