"""Order of the events after an optimiser step and at the end of a run. Each engine performs them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from lmmods.runs.checkpoint_policy import CheckpointPolicy
from lmmods.runs.hub_upload import Publisher


class Event(StrEnum):
    LOG = "log"  # metrics of the optimiser step
    CHECK_EPOCH = "check epoch"  # early stopping at the end of an epoch without a validation
    SAMPLE = "sample"
    ASK = "ask"  # multiple-choice questions
    VALIDATE = "validate"
    CHECK_VALIDATION = "check validation"  # early stopping after a validation
    RANK = "rank"  # the checkpoint about to be written, by the monitored metric
    SAVE = "save"
    STOP = "stop"  # at the user's request
    UPLOAD = "upload"  # the model of this checkpoint, in the background
    FINISH = "finish"  # metrics.json, model/, the marker file of a completed run
    PUBLISH = "publish"  # the finished model


class Samples(Protocol):
    """When samples are due."""

    @property
    def wants_base(self) -> bool: ...

    def is_due(self, step: int, ends: bool = False) -> bool: ...


class Questions(Protocol):
    """When questions are due."""

    @property
    def at_validation(self) -> bool: ...

    def is_due(self, step: int, ends: bool = False) -> bool: ...


@dataclass(frozen=True)
class RunState:
    """Current position of a run. Callables are evaluated again after each event, since early stopping may end the run.

    Args:
        epoch_ends: True if the last step done was the last of its epoch.
        validates: Returns True if a validation follows, by its interval or because the run ends.
        run_ends: Returns True if the run is known to end here.
        is_interrupted: Returns True if any process has been asked to stop. All processes must call it together.
        is_saved: Returns True if a checkpoint of this position exists.
    """

    step: int
    epoch_ends: bool
    validates: Callable[[], bool]
    run_ends: Callable[[], bool]
    is_interrupted: Callable[[], bool]
    is_saved: Callable[[], bool]


@dataclass(frozen=True)
class Events:
    """The rules of a run. Each event is performed before the next one is requested.

    Args:
        checkpoint: When checkpoints are written; None if none are.
        may_stop_early: True if a callback monitors the metrics.
    """

    checkpoint: CheckpointPolicy | None
    samples: Samples
    mmlu: Questions
    publish: Publisher
    may_stop_early: bool

    def at_start(self, resumed: bool) -> Iterator[Event]:
        """Events before the first step of a new or resumed run."""
        if self.samples.wants_base and not resumed:
            yield Event.SAMPLE

    def inside_step(self, now: RunState) -> Iterator[Event]:
        """Events that abandon an unfinished step at the user's request. The state before the step is saved.

        Only for a run of one process. Several processes stop after a step: agreeing within one would make them wait.
        """
        if self.checkpoint is not None and not now.is_saved():
            yield Event.SAVE
        yield Event.STOP

    def after_step(self, now: RunState) -> Iterator[Event]:
        """Events after an optimiser step."""
        yield Event.LOG
        # A validation checks early stopping itself, with fresh metrics.
        if self.may_stop_early and now.epoch_ends and not now.validates():
            yield Event.CHECK_EPOCH
        if self.samples.is_due(now.step, now.run_ends()):
            yield Event.SAMPLE
        # If a validation follows, the questions are asked within it, so that its metrics include their accuracy.
        asked_later = now.validates() and self.mmlu.at_validation
        if not asked_later and self.mmlu.is_due(now.step, now.run_ends()):
            yield Event.ASK
        if now.validates():
            yield Event.VALIDATE
            yield from self.in_validation()
            yield from self.after_validation(now)
        elif self._saves(now):
            yield from self._save(now)

    def in_validation(self) -> Iterator[Event]:
        """Events at the end of a pass over the validation set, whose metrics belong to the validation."""
        if self.mmlu.at_validation:
            yield Event.ASK

    def after_validation(self, now: RunState) -> Iterator[Event]:
        """Events after a validation. The checkpoint follows it: a run resumed from before would skip the validation."""
        if self.may_stop_early:
            yield Event.CHECK_VALIDATION
        if self.checkpoint is not None:
            yield Event.RANK
        yield from self._save(now)

    def at_end(self, now: RunState) -> Iterator[Event]:
        """Events after the last step. If a callback ends the run, no earlier event knew that it was the last."""
        if self.samples.is_due(now.step, ends=True):
            yield Event.SAMPLE
        if self.mmlu.is_due(now.step, ends=True):
            yield Event.ASK
        if self.checkpoint is not None and not now.is_saved():
            yield from self._save(now)
        yield Event.FINISH
        if self.publish.repo is not None:
            yield Event.PUBLISH

    def _saves(self, now: RunState) -> bool:
        by_rule = self.checkpoint is not None and self.checkpoint.is_due(now.step)
        return by_rule or now.run_ends() or now.is_interrupted()

    def _save(self, now: RunState) -> Iterator[Event]:
        if self.checkpoint is not None:
            yield Event.SAVE
        if now.is_interrupted():  # a collective call: all processes come here under the same conditions
            yield Event.STOP
        elif self.checkpoint is not None and self.publish.repo is not None and self.publish.when == "save":
            yield Event.UPLOAD
