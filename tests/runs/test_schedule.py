"""When a run validates, and how many validations are to come, against going through it step by step."""

import pytest

from lmmods.runs.progress import Progress
from lmmods.runs.schedule import Schedule

KEYS = [
    {"val_check_interval": None, "val_epochs": 1}, {"val_check_interval": None, "val_epochs": 2},
    {"val_check_interval": 0.4, "val_epochs": 1}, {"val_check_interval": 4, "val_epochs": None},
    {"val_check_interval": 100, "val_epochs": None}, {"num_val_batches": 0}]
LENGTHS = [{"max_epochs": 3, "max_steps": -1}, {"max_epochs": None, "max_steps": 7},
           {"max_epochs": 1.5, "max_steps": -1}]


def validations(per_epoch: int, per_step: int, **keys) -> tuple[Schedule, list[int]]:
    """A schedule, and the steps that its validations follow."""
    schedule = Schedule.from_keys(**{"batches_per_epoch": per_epoch, "batches_per_step": per_step, "num_val_batches": 2,
                                     "val_check_interval": None, "val_epochs": 1, **keys})
    progress, after = Progress(), []
    while progress.step < schedule.num_steps:
        progress.epoch_step, progress.step = progress.epoch_step + 1, progress.step + 1
        if schedule.num_val_batches and (schedule.validates_after(progress) or progress.step == schedule.num_steps):
            after.append(progress.step)
        if schedule.ends_epoch(progress):
            progress.epoch, progress.epoch_step = progress.epoch + 1, 0
    assert schedule.num_epochs == pytest.approx(progress.epoch + progress.epoch_step / schedule.steps_per_epoch)
    return schedule, after


@pytest.mark.parametrize("keys", KEYS, ids=str)
@pytest.mark.parametrize("length", LENGTHS, ids=str)
def test_validations_to_come(keys, length):
    schedule, after = validations(10, 3, **length, **keys)
    for step in range(schedule.num_steps):
        assert schedule.validations_after(step) == sum(at > step for at in after)
    assert schedule.validations_after(schedule.num_steps) == 0


@pytest.mark.parametrize("keys", KEYS, ids=str)
@pytest.mark.parametrize("length", LENGTHS, ids=str)
@pytest.mark.parametrize("rows", [40, 37, 33])
def test_they_follow_the_same_steps_under_every_cut(rows, keys, length):
    """Steps of 12 rows, of which the last of an epoch has what is left."""
    found = [validations(-(-rows // size), 12 // size, **length, **keys)[1] for size in (1, 2, 3, 4, 6, 12)]
    assert found == [found[-1]] * 6
