"""Lightning hooks that perform the events that lmmods/runs/events.py schedules."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L

from lmmods.core.errors import UserError
from lmmods.core.peers import Peers
from lmmods.runs.events import Event, Events, RunState
from lmmods.runs.start import RunEnd, RunStart
from lmmods.torch_engine.callbacks.checkpoint import Checkpoint
from lmmods.torch_engine.callbacks.early_stopping import SharedEarlyStopping
from lmmods.torch_engine.callbacks.evaluation import MMLU, Samples
from lmmods.torch_engine.callbacks.export import Publish, export_run
from lmmods.torch_engine.callbacks.metrics import Metrics

NEEDS_CHECKPOINT = (Event.STOP, Event.UPLOAD, Event.FINISH)  # the latest checkpoint must be complete
Performer = Callable[[L.Trainer, L.LightningModule], None]


class RunEvents(L.Callback):
    """Callback that performs the events of a run. Must come after all callbacks whose state is part of a checkpoint.

    Args:
        callbacks: The run's callbacks; this project's classes perform their events.
    """

    def __init__(self, metrics: Metrics, callbacks: list[L.Callback]):
        def find(cls: type, default: Any) -> Any:
            return next((callback for callback in callbacks if isinstance(callback, cls)), default)

        samples, self._mmlu, publish = find(Samples, Samples()), find(MMLU, MMLU()), find(Publish, Publish())
        self._metrics, self._checkpoint = metrics, find(Checkpoint, None)
        self._early_stopping = [callback for callback in callbacks if isinstance(callback, SharedEarlyStopping)]
        self._events = Events(self._checkpoint, samples, self._mmlu, publish, bool(self._early_stopping))
        self._performers: dict[Event, Performer] = {
            Event.LOG: metrics.log_step,
            Event.CHECK_EPOCH: lambda trainer, _: self._check(trainer, validated=False),
            Event.SAMPLE: samples.sample,
            Event.ASK: self._mmlu.ask,
            Event.CHECK_VALIDATION: lambda trainer, _: self._check(trainer, validated=True),
            Event.STOP: self._stop,
            Event.UPLOAD: publish.upload,
            Event.FINISH: self._finish,
            Event.PUBLISH: publish.publish,
        }
        if self._checkpoint is not None:
            self._performers |= {Event.RANK: self._checkpoint.rank_current, Event.SAVE: self._checkpoint.save}

    # Hooks -----------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._start = trainer.global_step, time.perf_counter()
        if self._checkpoint is not None and trainer.resumed_from is None:
            self._checkpoint.note_position(trainer)
        if trainer.global_step >= trainer.num_steps:
            trainer.end()  # resumed after the last step: only the final events are left
        self._perform(self._events.at_start(trainer.resumed_from is not None), trainer, module)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step >= trainer.num_steps:
            trainer.end()
        else:
            trainer.interruption.note_step(trainer.global_step)
        # Raise an error of the background writer now, not at the next checkpoint.
        if self._checkpoint is not None:
            self._checkpoint.check(trainer)
            self._checkpoint.note_position(trainer)
        self._perform(self._events.after_step(self._run_state(trainer)), trainer, module)
        if trainer.is_stopping and trainer.check_val_every_n_epoch is not None:
            trainer.check_val_every_n_epoch = 1  # validate the final model, whatever the epoch

    def abandon_step(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Stop within a step; the saved state is the one before the step."""
        self._perform(self._events.inside_step(self._run_state(trainer)), trainer, module)

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Perform events that log metrics, which Lightning does not allow in later hooks."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._perform(self._events.in_validation(), trainer, module)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._perform(self._events.after_validation(self._run_state(trainer)), trainer, module)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        at_end = {Event.ASK: self._mmlu.ask_at_end}
        self._perform(self._events.at_end(self._run_state(trainer)), trainer, module, self._performers | at_end)
        if trainer.is_global_zero:
            first_step, start = self._start
            RunEnd(trainer.run_folder, module, trainer.datamodule, self._metrics.steps, self._checkpoint, first_step,
                   trainer.global_step, time.perf_counter() - start, trainer.loggers).say()

    # Events ----------------------------------------------------------------------------------------------------------

    def _run_state(self, trainer: L.Trainer) -> RunState:
        return RunState(
            trainer.global_step,
            epoch_ends=trainer.is_last_batch,
            validates=trainer.validation_is_due,
            run_ends=lambda: trainer.global_step >= trainer.num_steps,
            is_interrupted=trainer.is_interrupted,
            is_saved=lambda: self._checkpoint.is_saved(trainer))

    def _perform(self, events: Iterator[Event], trainer: L.Trainer, module: L.LightningModule,
                 performers: dict[Event, Performer] | None = None) -> None:
        for event in events:
            if event is Event.VALIDATE:
                return  # Lightning validates next; the validation hooks perform the remaining events
            if event in NEEDS_CHECKPOINT and self._checkpoint is not None:
                self._checkpoint.wait(trainer)
            (performers or self._performers)[event](trainer, module)

    def _check(self, trainer: L.Trainer, validated: bool) -> None:
        for callback in self._early_stopping:
            callback.check(trainer, validated)

    def _stop(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.interruption.stop(trainer.global_step,
                                  None if self._checkpoint is None else self._checkpoint.path(trainer))

    def _finish(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._metrics.finish(trainer)
        export_run(trainer, module)


# ---------------------------------------------------------------------------------------------------------------------
# Start of a run.

class StartReport(L.Callback):
    """Callback that prepares the run folder, attaches the loggers and prints a summary of the run."""

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Connect the processes. Raise the same UserError on all of them if the first could not lock the run folder."""
        Peers.current().connect_all(trainer.global_rank, trainer.world_size, trainer.strategy.broadcast,
                                    trainer.heartbeat_timeout)
        problem = trainer.strategy.broadcast(str(trainer.run_folder.problem or ""))
        if problem:
            raise UserError(problem)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.check_unfinished()
        trainer.interruption.listen()
        start = RunStart(trainer.run_folder, trainer.identity, trainer.recipe, trainer.datamodule,
                         trainer.machine(), trainer.resumed_from, trainer.global_step)
        if trainer.is_global_zero:
            start.make_folder_ready()
        trainer.strategy.barrier("run folder")
        trainer.loggers = trainer.run_loggers
        start.begin_logging(trainer.loggers)
        if trainer.is_global_zero:
            start.say(trainer.summary())
