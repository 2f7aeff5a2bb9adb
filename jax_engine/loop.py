"""The training loop: epochs, micro-batches, gradient accumulation, and what follows a step."""

from typing import Any

import jax

from jax_engine.callbacks import EarlyStopping
from jax_engine.checkpointing import Checkpointer
from jax_engine.distributed import devices as machines
from jax_engine.distributed.prefetch import Group
from jax_engine.evaluation import Evaluation
from jax_engine.export import Exporter
from jax_engine.run import Training
from lmmods.core.progress_bar import describe
from lmmods.core.signals import Interruption, stop


class Loop:
    """Train until the schedule or early stopping ends the run.

    Args:
        run: Changed by each step.
        accumulate: Micro-batches of each rank that make an optimiser step; the last of an epoch may have fewer.
        evaluation: Validates, asks and samples on the way.
        checkpointer: Saves.
        exporter: Uploads the model of a checkpoint.
        callbacks: Watch the metrics.
        interruption: Whether the user has asked to stop.
    """

    def __init__(self, run: Training, accumulate: int, evaluation: Evaluation, checkpointer: Checkpointer,
                 exporter: Exporter, callbacks: list[EarlyStopping], interruption: Interruption):
        self.run, self.interruption = run, interruption
        self._accumulate, self._callbacks = accumulate, callbacks
        self._evaluation, self._checkpointer, self._exporter = evaluation, checkpointer, exporter

    def train(self, loader: Any) -> None:
        """Train to the end of the run."""
        run, progress = self.run, self.run.progress
        run.bar.open("train", run.schedule.num_steps, progress.step, unit="step", first="compiling")
        run.data_position = run.data.state_dict()
        run.stopwatch.start()
        while not run.is_done:
            if run.ends_epoch:
                progress.epoch, progress.batches = progress.epoch + 1, 0
                loader.load_state_dict(run.data_position)  # of what was read ahead nothing was used
            left = run.schedule.batches_per_epoch - progress.batches
            for group in run.batches(loader, run.data.batch_size, left, progress.epoch, progress.batches):
                self.train_batch(group)
                if run.is_done:
                    break
        run.metrics.fetch()

    def train_batch(self, group: Group) -> None:
        """One micro-batch on each rank, the step that it may complete, and what follows."""
        run, progress = self.run, self.run.progress
        run.metrics.look()
        progress.batches, progress.total_batches = progress.batches + 1, progress.total_batches + 1
        run.data_position = group.position
        step_done = run.num_accumulated + 1 == self._accumulate or run.ends_epoch
        figures = self._step(group, step_done)
        if step_done:
            progress.step += 1
            run.note_step(figures)
        self._after_batch(step_done)

    def _step(self, group: Group, completes: bool) -> Any:
        """Accumulate; where the micro-batch `completes` the step, take it and return its figures."""
        run, steps, frozen = self.run, self.run.steps, self.run.weights.frozen
        if completes and not run.num_accumulated:
            state, figures = steps.full_step(run.state, frozen, group.batch, run.scalars())
        else:
            accumulation = run.accumulation if run.num_accumulated else steps.new_accumulation(run.state)
            run.accumulation = steps.accumulate(run.state, frozen, accumulation, group.batch)
            run.num_accumulated += 1
            if not completes:
                return None
            state, figures = steps.update(run.state, run.accumulation, run.scalars())
            run.accumulation, run.num_accumulated = None, 0
        run.replace_state(state)
        return figures

    def _after_batch(self, step_done: bool) -> None:
        """Sample, ask, validate and save when it is time."""
        self._checkpointer.check()
        run, step, evaluation = self.run, self.run.progress.step, self._evaluation
        validates = run.schedule.validates_after(run.progress)
        if run.ends_epoch and not validates:
            self._check_stopping(validated=False)
        ends = run.is_done
        validates = validates or ends and run.schedule.num_val_batches
        if step_done and evaluation.samples.is_due(step, ends):
            run.metrics.fetch()
            evaluation.sample()
        if step_done and not (validates and evaluation.mmlu.at_validation) and evaluation.mmlu.is_due(step, ends):
            run.metrics.fetch()
            run.metrics.log(evaluation.ask(), step)
        if validates:
            return self._validate()
        due = step_done and self._checkpointer.policy.is_due(step)
        # Several processes agree on an interruption once a step: asking each other makes them wait.
        inside = jax.process_count() == 1 and self._checkpointer.enabled  # what is not saved ends with a whole step
        may_stop = (step_done or inside) and machines.any_of(self.interruption.requested)
        if due or ends or may_stop:
            self._save()

    def _validate(self) -> None:
        """Evaluate, and save what has been evaluated."""
        run, evaluation = self.run, self._evaluation
        run.metrics.fetch()
        with run.stopwatch.paused():
            metrics = evaluation.evaluate("val")
        if evaluation.mmlu.at_validation:
            metrics |= evaluation.ask()
        run.metrics.log(metrics, run.progress.step)
        run.bar.say(describe(metrics, "val/"))
        self._check_stopping(validated=True)
        self._checkpointer.rank(run.metrics.latest)
        self._save()

    def finish(self) -> None:
        """Sample and ask at the last step, where early stopping has made it that, and export the model."""
        run, step, evaluation = self.run, self.run.progress.step, self._evaluation
        if evaluation.samples.is_due(step, ends=True):
            evaluation.sample()
        if evaluation.mmlu.is_due(step, ends=True):
            run.metrics.log(evaluation.ask(), step)
        self._checkpointer.wait()
        self._exporter.finish()

    def _check_stopping(self, validated: bool) -> None:
        """Let early stopping look at the metrics."""
        run = self.run
        if self._callbacks:
            run.metrics.fetch()
        for callback in self._callbacks:
            if callback.is_due(validated, run.ends_epoch) and callback.check(run.metrics.latest):
                run.should_stop = True

    def _save(self) -> None:
        """Write a checkpoint in the background; stop where that has been asked for, else upload what is to be."""
        path = self._checkpointer.save()
        if machines.any_of(self.interruption.requested):
            self._checkpointer.wait()
            machines.barrier("checkpoint")
            stop(self.run.progress.step, path)
        self._exporter.checkpoint_saved()
