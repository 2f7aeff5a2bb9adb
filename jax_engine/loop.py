"""The training loop: epochs, micro-batches, gradient accumulation, and the events that follow."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import jax

from jax_engine.callbacks import EarlyStopping
from jax_engine.checkpoint import Checkpointer
from jax_engine.distributed import devices as machines
from jax_engine.distributed.prefetch import Group
from jax_engine.distributed.tree import Tree
from jax_engine.evaluation import Evaluation
from jax_engine.export import Exporter
from jax_engine.run import Training
from lmmods.core.progress_bar import describe
from lmmods.core.signals import Interruption
from lmmods.runs.events import Event, Events, RunState


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
        run.bar.open("train", run.schedule.num_steps, progress.step, "compiling", run.schedule.validations_after)
        run.data_position = run.data.state_dict()
        run.stopwatch.start()
        while not run.is_done:
            if run.ends_epoch:
                progress.epoch, progress.batches = progress.epoch + 1, 0
                loader.load_state_dict(run.data_position)  # of what was read ahead nothing was used
            left = run.schedule.batches_per_epoch - progress.batches
            for group in self._surveyed(run.batches(loader, run.data.batch_size, left)):
                self.train_batch(group)
                if run.is_done:
                    break

    def _surveyed(self, groups: Iterator[Group]) -> Iterator[Group]:
        """The groups; where the loss depends on all rows of a step, these are read before the first is handed out."""
        run, surveys = self.run, self.run.steps.surveys
        if surveys:
            again = self._survey(self._groups_of_step())  # none between two steps
            if run.num_accumulated:
                run.accumulation["statistics"] = again["statistics"]
        while window := list(islice(groups, self._accumulate - run.num_accumulated if surveys else 1)):
            if surveys and len(window) > 1 and not run.num_accumulated:
                run.accumulation = self._survey(window)
            yield from window

    def _survey(self, groups: Iterable[Group]) -> Tree:
        """A new accumulation with the statistics of these groups."""
        run, accumulation = self.run, self.run.steps.new_accumulation(self.run.state)
        for group in groups:
            accumulation = run.steps.survey(run.state, run.weights.frozen, accumulation, group.batch)
        return accumulation

    def _groups_of_step(self) -> Iterator[Group]:
        """All groups of the step under way, those done and those to come; none where none is under way.

        Raises:
            UserError: The data cannot be read twice.
        """
        run, ranks = self.run, self.run.parallel.data_parallel_size
        first, count = run.progress.batches - run.num_accumulated, self._accumulate if run.num_accumulated else 0
        count = min(count, run.schedule.batches_per_epoch - first)
        batches = run.data.micro_batches(first * ranks, count * ranks)
        return run.batches(batches, run.data.batch_size, count)

    def train_batch(self, group: Group) -> None:
        """One micro-batch on each rank, the step that it may complete, and what follows."""
        run, progress = self.run, self.run.progress
        run.metrics.look()
        progress.batches, progress.total_batches = progress.batches + 1, progress.total_batches + 1
        run.data_position = group.position
        step_done = run.num_accumulated + 1 == self._accumulate or run.ends_epoch
        self._figures = self._step(group, step_done)
        progress.step += step_done
        if not run.is_done:
            self.interruption.note_step(progress.step)
        self._checkpointer.check()
        self._perform(self._events.after_batch(self._run_state(step_done)))

    def _step(self, group: Group, completes: bool) -> Any:
        """Accumulate; where the micro-batch `completes` the step, take it and return its figures."""
        run, steps, frozen = self.run, self.run.steps, self.run.weights.frozen
        if completes and not run.num_accumulated:
            state, figures = steps.full_step(run.state, frozen, group.batch, run.scalars())
        else:
            accumulation = steps.new_accumulation(run.state) if run.accumulation is None else run.accumulation
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
        self._perform(self._events.at_end(self._run_state(step_done=True)))

    # Events ----------------------------------------------------------------------------------------------------------

    def _run_state(self, step_done: bool) -> RunState:
        run = self.run
        return RunState(
            run.progress.step, step_done, run.ends_epoch,
            stops_inside_step=jax.process_count() == 1,
            validates=lambda: run.schedule.num_val_batches > 0 and (
                run.is_done or run.schedule.validates_after(run.progress)),
            run_ends=lambda: run.is_done,
            is_interrupted=lambda: machines.any_of(self.interruption.is_due),
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
        run.bar.pause()
        with run.stopwatch.paused():
            metrics = self._evaluation.evaluate("val")
        run.bar.go_on()
        run.metrics.log(metrics, run.progress.step)
        run.bar.say(describe(metrics, "val/"))

    def _check(self, validated: bool) -> None:
        for callback in self._callbacks:
            if callback.is_due(validated, self.run.ends_epoch) and callback.check(self.run.metrics.latest):
                self.run.should_stop = True

    def _stop(self) -> None:
        self._checkpointer.wait()
        machines.barrier("checkpoint")
        self.interruption.stop(self.run.progress.step,
                               self._checkpointer.path if self._events.checkpoint is not None else None)

    def _finish(self) -> None:
        self._checkpointer.wait()
        self._exporter.finish()
