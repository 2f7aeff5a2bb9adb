"""When a run validates and how many validations remain, against stepping through the run."""

import pytest

from lmmods.runs.progress import Progress
from lmmods.runs.schedule import Schedule

KEYS = [
    {"val_check_interval": None, "val_epochs": 1}, {"val_check_interval": None, "val_epochs": 2},
    {"val_check_interval": 0.4, "val_epochs": 1}, {"val_check_interval": 4, "val_epochs": None},
    {"val_check_interval": 100, "val_epochs": None}, {"num_val_batches": 0}]
LENGTHS = [{"max_epochs": 3, "max_steps": -1}, {"max_epochs": None, "max_steps": 7},
           {"max_epochs": 1.5, "max_steps": -1}]


def build_schedule(per_epoch: int, per_step: int, **keys) -> tuple[Schedule, list[int]]:
    """Return a schedule and the steps after which it validates."""
    schedule = Schedule.from_keys(**{"batches_per_epoch": per_epoch, "batches_per_step": per_step, "num_val_batches": 2,
                                     "val_check_interval": None, "val_epochs": 1, **keys})
    progress, validation_steps = Progress(), []
    while progress.step < schedule.num_steps:
        progress.epoch_step, progress.step = progress.epoch_step + 1, progress.step + 1
        if schedule.num_val_batches and (schedule.validates_after(progress) or progress.step == schedule.num_steps):
            validation_steps.append(progress.step)
        if schedule.ends_epoch(progress):
            progress.epoch, progress.epoch_step = progress.epoch + 1, 0
    assert schedule.num_epochs == pytest.approx(progress.epoch + progress.epoch_step / schedule.steps_per_epoch)
    return schedule, validation_steps


@pytest.mark.parametrize("keys", KEYS, ids=str)
@pytest.mark.parametrize("length", LENGTHS, ids=str)
def test_the_remaining_validations_are_counted_after_every_step(keys, length):
    schedule, validation_steps = build_schedule(10, 3, **length, **keys)
    for step in range(schedule.num_steps):
        assert schedule.validations_after(step) == sum(validation_step > step for validation_step in validation_steps)
    assert schedule.validations_after(schedule.num_steps) == 0


@pytest.mark.parametrize("keys", KEYS, ids=str)
@pytest.mark.parametrize("length", LENGTHS, ids=str)
@pytest.mark.parametrize("rows", [40, 37, 33])
def test_validations_follow_the_same_steps_with_every_batch_size(rows, keys, length):
    """Steps of 12 rows; the last step of an epoch has the remaining rows."""
    validation_steps = [build_schedule(-(-rows // size), 12 // size, **length, **keys)[1]
                        for size in (1, 2, 3, 4, 6, 12)]
    assert validation_steps == [validation_steps[-1]] * 6
