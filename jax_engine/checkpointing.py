"""Checkpoints of a run on JAX: what one holds, when it is restored, and how it is written beside training."""

from pathlib import Path
from typing import Any

from jax_engine import checkpoint as checkpoints
from jax_engine.callbacks import EarlyStopping
from jax_engine.distributed.weights import Weights
from jax_engine.progress import read_progress
from jax_engine.run import Run, Training
from lmmods.runs.checkpoint_policy import KeepRules, Kept
from lmmods.runs.csv_logger import log_checkpoint
from lmmods.runs.folder import checkpoint_name
from lmmods.runs.identity import RunIdentity


class Checkpointer:
    """Restores and saves all that a run needs to go on exactly.

    Args:
        run: What is saved.
        rules: Which checkpoints are written and kept.
        callbacks: Their state is saved too.
        identity: What the run is, noted in each checkpoint.
        enabled: `trainer.enable_checkpointing`.
    """

    def __init__(self, run: Training, rules: KeepRules, callbacks: list[EarlyStopping], identity: RunIdentity,
                 enabled: bool):
        self._run, self.rules, self.enabled = run, rules, enabled
        self._callbacks, self._identity = callbacks, identity
        self._writer = checkpoints.Writer()

    # Restoring -------------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: Path) -> None:
        """Everything as it was when `checkpoint` was written, by either engine."""
        run, network, parallel = self._run, self._run.task.network, self._run.parallel
        content = checkpoints.read(checkpoint)
        key = type(run.data).__qualname__
        run.progress = read_progress(content, key, parallel.data_parallel_size)
        host = checkpoints.unpack(content, parallel.shapes(run.state), network.to_torch, network.from_torch)
        run.replace_state(parallel.put_state(host))
        if content["window"]:
            run.num_accumulated = content["window"]["num_batches"]
            sums = checkpoints.unpack_accumulation(content["window"], network.from_torch)
            run.metrics.laps.leave_out(int(sums["sums"]["num_tokens"]))
            run.accumulation = parallel.put_sums(sums)
        run.metrics.load_state_dict(content["callbacks"]["Metrics"])
        self.rules.load_state_dict(content["callbacks"]["Checkpoint"])
        for callback in self._callbacks:
            if callback.state_key in content["callbacks"]:
                callback.load_state_dict(content["callbacks"][callback.state_key])
        run.data.load_state_dict(content[key])

    def go_on_from(self, checkpoint: Path) -> None:
        """Finish what a run that died after writing `checkpoint` left undone. Called by the first process."""
        if self.enabled:
            self.rules.take_up(self._run.folder, checkpoint)

    # Saving ----------------------------------------------------------------------------------------------------------

    @property
    def _path(self) -> Path:
        return self._run.folder.checkpoint(checkpoint_name(self._run.progress.step, self._run.num_accumulated))

    def rank(self, metrics: dict[str, float]) -> None:
        """Note the checkpoint about to be written among the best, if it is."""
        self.rules.rank(metrics, self._path.name)

    def save(self) -> Path | None:
        """Start to write a checkpoint of this very moment; none where checkpoints are off. All processes call this."""
        run = self._run
        run.metrics.fetch()
        if not self.enabled:
            return None
        path = self._path
        with run.stopwatch.paused():
            content = self._content()
            kept = self.rules.kept_with(path.name)
            if run.is_first:
                self._writer.save(path, content, lambda: self._settle(path, kept))
        return path

    def _settle(self, path: Path, kept: Kept) -> None:
        """Called when a checkpoint stands, by the thread that wrote it."""
        kept.settle(self._run.folder)
        log_checkpoint(self._run.loggers, path)

    def check(self) -> None:
        """Raise what went wrong with a checkpoint, if anything has by now; waits for nothing."""
        self._writer.check()

    def wait(self) -> None:
        """Return when nothing is being written any more; raises what went wrong."""
        self._writer.wait()

    def _content(self) -> dict[str, Any]:
        """A checkpoint, laid out as Lightning's. All processes must call this."""
        run, network, settings = self._run, self._run.task.network, self._run.task.optimizer
        progress, num_steps = run.progress, run.schedule.num_steps
        packed = checkpoints.pack(run.parallel.fetch_state(run.state), settings, progress.step, num_steps,
                                  network.to_torch)
        sums: dict[str, Any] = {}
        if run.num_accumulated:
            sums = checkpoints.pack_accumulation(run.parallel.fetch_sums(run.accumulation), run.num_accumulated,
                                                 network.to_torch)
        num_groups = len(packed["optimizer_states"][0]["param_groups"])
        return {
            "epoch": progress.epoch,
            "global_step": progress.step,
            "engine": "jax",
            "identity": self._identity.tree,
            **packed,
            "loops": progress.loops(run.ends_epoch),
            "callbacks": {
                "Metrics": run.metrics.state_dict(),
                "Checkpoint": self.rules.state_dict(),
                **{callback.state_key: callback.state_dict() for callback in self._callbacks},
            },
            "lr_schedulers": [checkpoints.schedule_state(settings, num_groups, progress.step, num_steps)],
            type(run.data).__qualname__: run.data.state_at(run.data_position),
            "world_size": run.parallel.data_parallel_size,
            "window": sums,
        }


def load_weights(run: Run, checkpoint: Path) -> None:
    """Parameters of a checkpoint instead of the first ones."""
    content, network, weights = checkpoints.read(checkpoint), run.task.network, run.weights
    like = run.parallel.shapes(weights.trainable)
    trainable = checkpoints.unpack_trainable(content, like, network.to_torch, network.from_torch)
    run.weights = Weights(run.parallel, run.parallel.put_state(trainable), weights.frozen)
