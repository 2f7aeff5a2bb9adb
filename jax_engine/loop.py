"""The training loop: epochs, micro-batches, gradient accumulation, and the events that follow."""

from collections.abc import Callable, Iterator
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
from lmmods.runs.events import Event, Events, Moment


class Loop:
    """Train until the schedule or early stopping ends the run.

    Args:
        accumulate: Micro-batches of each rank that make an optimiser step; the last of an epoch may have fewer.
        interruption: Whether the user has asked to stop.
    """

    def __init__(self, run: Training, accumulate: int, events: Events, evaluation: Evaluation,
                 checkpointer: Checkpointer, exporter: Exporter, callbacks: list[EarlyStopping],
                 interruption: Interruption):
        self.run, self.interruption = run, interruption
        self._accumulate, self._events, self._callbacks = accumulate, events, callbacks
        self._evaluation, self._checkpointer, self._exporter = evaluation, checkpointer, exporter
        self._figures: Any = None  # of the last step
        self._performers: dict[Event, Callable[[], Any]] = {
            Event.LOG: lambda: run.note_step(self._figures),
            Event.CHECK_EPOCH: lambda: self._check(validated=False),
            Event.SAMPLE: evaluation.sample,
            Event.ASK: self._ask,
            Event.VALIDATE: self._validate,
            Event.CHECK_VALIDATION: lambda: self._check(validated=True),
            Event.RANK: lambda: checkpointer.rank(run.metrics.latest),
            Event.SAVE: checkpointer.save,
            Event.STOP: self._stop,
            Event.UPLOAD: exporter.upload,
            Event.FINISH: self._finish,
            Event.PUBLISH: exporter.publish,
        }

    def train(self, loader: Any, resumed: bool) -> None:
        """Train to the end of the run."""
        run, progress = self.run, self.run.progress
        self._perform(self._events.at_start(resumed))
        run.bar.open("train", run.schedule.num_steps, progress.step, unit="step", first="compiling")
        run.data_position = run.data.state_dict()
        run.stopwatch.start()
        while not run.is_done:
            if run.ends_epoch:
                progress.epoch, progress.batches = progress.epoch + 1, 0
                loader.load_state_dict(run.data_position)  # of what was read ahead nothing was used
            left = run.schedule.batches_per_epoch - progress.batches
            for group in run.batches(loader, run.data.batch_size, left):
                self.train_batch(group)
                if run.is_done:
                    break

    def train_batch(self, group: Group) -> None:
        """One micro-batch on each rank, the step that it may complete, and what follows."""
        run, progress = self.run, self.run.progress
        run.metrics.look()
        progress.batches, progress.total_batches = progress.batches + 1, progress.total_batches + 1
        run.data_position = group.position
        step_done = run.num_accumulated + 1 == self._accumulate or run.ends_epoch
        self._figures = self._step(group, step_done)
        progress.step += step_done
        self._checkpointer.check()
        self._perform(self._events.after_batch(self._moment(step_done)))

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

    def finish(self) -> None:
        """Do what is due at the end of the run, and return when all of it is on disk."""
        self._perform(self._events.at_end(self._moment(step_done=True)))

    # Events ----------------------------------------------------------------------------------------------------------

    def _moment(self, step_done: bool) -> Moment:
        run = self.run
        return Moment(
            run.progress.step, step_done, run.ends_epoch,
            stops_inside_step=jax.process_count() == 1,
            validates=lambda: run.schedule.num_val_batches > 0 and (
                run.is_done or run.schedule.validates_after(run.progress)),
            run_ends=lambda: run.is_done,
            is_interrupted=lambda: machines.any_of(self.interruption.requested),
            is_saved=self._checkpointer.is_saved)

    def _perform(self, events: Iterator[Event]) -> None:
        for event in events:
            if event is not Event.LOG:  # all else wants the figures of the steps so far, and waits for the device
                self.run.metrics.fetch()
            self._performers[event]()

    def _ask(self) -> None:
        self.run.metrics.log(self._evaluation.ask(), self.run.progress.step)

    def _validate(self) -> None:
        run = self.run
        with run.stopwatch.paused():
            metrics = self._evaluation.evaluate("val")
        run.metrics.log(metrics, run.progress.step)
        run.bar.say(describe(metrics, "val/"))

    def _check(self, validated: bool) -> None:
        for callback in self._callbacks:
            if callback.is_due(validated, self.run.ends_epoch) and callback.check(self.run.metrics.latest):
                self.run.should_stop = True

    def _stop(self) -> None:
        self._checkpointer.wait()
        machines.barrier("checkpoint")
        stop(self.run.progress.step, self._checkpointer.path if self._events.checkpoint is not None else None)

    def _finish(self) -> None:
        self._checkpointer.wait()
        self._exporter.finish()
