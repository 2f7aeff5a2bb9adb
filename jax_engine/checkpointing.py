"""Checkpoints of a run on JAX: what one holds, when it is restored, and how it is written beside training."""

from pathlib import Path

import jax

from jax_engine.callbacks import EarlyStopping
from jax_engine.checkpoint_arrays import pack, pack_accumulation, unpack, unpack_accumulation, unpack_trainable
from jax_engine.distributed import devices as machines
from jax_engine.distributed.weights import Weights
from jax_engine.run import Run, Training
from lmmods.core.errors import UserError
from lmmods.runs.checkpoint_content import CheckpointContent
from lmmods.runs.checkpoint_format import check_manifest
from lmmods.runs.checkpoint_io import BackgroundWriter, open_checkpoint
from lmmods.runs.checkpoint_pieces import Shares
from lmmods.runs.checkpoint_policy import CheckpointPolicy, KeptCheckpoints
from lmmods.runs.folder import checkpoint_name
from lmmods.runs.identity import RunIdentity
from lmmods.runs.progress import Cut, read_progress
from lmmods.runs.wandb import log_checkpoint


class Checkpointer:
    """Restores and saves all that a run needs to go on exactly.

    Args:
        cut: How its steps are cut.
    """

    def __init__(self, run: Training, cut: Cut, policy: CheckpointPolicy, callbacks: list[EarlyStopping],
                 identity: RunIdentity):
        self._run, self._cut, self._policy = run, cut, policy
        self._callbacks, self._identity = callbacks, identity
        self._latest: Path | None = None  # restored or saved
        self._writer = BackgroundWriter()
        several = jax.process_count() > 1
        self._shares = Shares(jax.process_index(), jax.process_count()) if several else None

    # Restoring -------------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: Path) -> None:
        """Everything as it was when `checkpoint` was written, by either engine."""
        run, network, parallel = self._run, self._run.task.network, self._run.parallel
        content = _opened(checkpoint)
        key = type(run.data).__qualname__
        run.progress = read_progress(content, key, self._cut)
        host = unpack(content, parallel.shapes(run.state), network.to_torch, network.from_torch)
        run.replace_state(parallel.put_state(host))
        if content["window"]:
            run.num_accumulated = run.progress.accumulated
            accumulation = unpack_accumulation(content["window"], network.from_torch, run.task.metric_names)
            run.metrics.laps.leave_out(int(accumulation["sums"]["num_tokens"]))
            run.accumulation = parallel.put_sums(accumulation)
        run.metrics.load_state_dict(content["callbacks"]["Metrics"])
        self._policy.load_state_dict(content["callbacks"]["Checkpoint"])
        for callback in self._callbacks:
            if callback.state_key in content["callbacks"]:
                callback.load_state_dict(content["callbacks"][callback.state_key])
        run.data.load_state_dict(content[key])
        self._latest = self.path

    def go_on_from(self, checkpoint: Path) -> None:
        """Finish what a run that died after writing `checkpoint` left undone. Called by the first process."""
        self._policy.resume(self._run.folder, checkpoint)

    # Saving ----------------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """Of a checkpoint of this very moment."""
        return self._run.folder.checkpoint(checkpoint_name(self._run.progress.step, self._run.num_accumulated))

    def is_saved(self) -> bool:
        """Whether this very moment was restored from a checkpoint or saved as one."""
        return self._latest == self.path

    def rank(self, metrics: dict[str, float]) -> None:
        """Note the checkpoint about to be written among the best, if it is."""
        self._policy.rank(metrics, self.path.name)

    def save(self) -> None:
        """Start to write a checkpoint of this very moment. All processes must call this."""
        run, self._latest = self._run, self.path
        path = self.path
        with run.stopwatch.paused():
            content = self._content()
            kept = self._policy.decide(path.name)
            self._writer.save(path, content, lambda: self._settle(path, kept), self._shares,
                              lambda: machines.barrier("checkpoint begins"))

    def _settle(self, path: Path, kept: KeptCheckpoints) -> None:
        """Called when a checkpoint stands, by the thread that wrote it."""
        kept.apply(self._run.folder)
        log_checkpoint(self._run.loggers, path)

    def check(self) -> None:
        """Raise what went wrong with a checkpoint, if anything has by now; waits for nothing."""
        self._writer.check()

    def wait(self) -> None:
        """Return when nothing is being written any more; raises what went wrong."""
        self._writer.wait()

    def _content(self) -> CheckpointContent:
        """All processes must call this."""
        run, network, progress = self._run, self._run.task.network, self._run.progress
        fetch, accumulation = run.parallel.pieces if self._shares else run.parallel.fetch_state, {}
        state = fetch(run.state)
        if run.num_accumulated:
            added = run.parallel.add_up(run.accumulation)
            sums = {**run.parallel.fetch_state({"sums": added["sums"]}), "gradients": fetch(added["gradients"])}
            accumulation = pack_accumulation(sums, run.num_accumulated, network.to_torch, run.task.metric_names)
        return {
            "engine": "jax",
            "epoch": progress.epoch,
            "global_step": progress.step,
            "loops": progress.loops(run.ends_epoch),
            **pack(state, run.task.optimizer, progress.step, run.schedule.num_steps, network.to_torch),
            "callbacks": {
                "Metrics": run.metrics.state_dict(),
                "Checkpoint": self._policy.state_dict(),
                **{callback.state_key: callback.state_dict() for callback in self._callbacks},
            },
            "window": accumulation,
            "world_size": run.parallel.data_parallel_size,
            "identity": self._identity.tree,
            type(run.data).__qualname__: run.data.state_at(run.data_position),
        }


def _opened(checkpoint: Path) -> CheckpointContent:
    """`open_checkpoint`, when each process has verified its share of the files. All of them must call this."""
    rank, problems = jax.process_index(), {}
    try:
        check_manifest(checkpoint, share=(rank, jax.process_count()))
    except UserError as error:
        problems = {rank: str(error)}
    if problems := machines.gather(problems):
        raise UserError(problems[min(problems)])
    return open_checkpoint(checkpoint)


def load_weights(run: Run, checkpoint: Path) -> None:
    """Parameters of a checkpoint instead of the first ones."""
    content, network, weights = _opened(checkpoint), run.task.network, run.weights
    like = run.parallel.shapes(weights.trainable)
    trainable = unpack_trainable(content, like, network.to_torch, network.from_torch)
    run.weights = Weights(run.parallel, run.parallel.put_state(trainable), weights.frozen)
