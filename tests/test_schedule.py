"""How many validations are to come, against going through the run batch by batch."""

import pytest

from lmmods.runs.progress import Progress
from lmmods.runs.schedule import Schedule


@pytest.mark.parametrize("keys", [
    {"val_check_interval": None, "val_epochs": 1}, {"val_check_interval": None, "val_epochs": 2},
    {"val_check_interval": 0.4, "val_epochs": 1}, {"val_check_interval": 4, "val_epochs": None},
    {"val_check_interval": 100, "val_epochs": None}, {"num_val_batches": 0}], ids=str)
@pytest.mark.parametrize("length", [{"max_epochs": 3, "max_steps": -1}, {"max_epochs": None, "max_steps": 7},
                                    {"max_epochs": 1.5, "max_steps": -1}], ids=str)
def test_validations_to_come(keys, length):
    schedule = Schedule.from_keys(**{"batches_per_epoch": 10, "batches_per_step": 3, "num_val_batches": 2,
                                     "val_check_interval": None, "val_epochs": 1, **length, **keys})
    progress, after = Progress(), []  # after: steps done before each validation
    while progress.step < schedule.num_steps:
        progress.batches, progress.total_batches = progress.batches + 1, progress.total_batches + 1
        step_done = progress.batches % 3 == 0 or schedule.ends_epoch(progress)
        progress.step += step_done
        if schedule.num_val_batches and (schedule.validates_after(progress) or progress.step == schedule.num_steps):
            after.append(progress.step if step_done else progress.step + 0.5)
        if schedule.ends_epoch(progress):
            progress.epoch, progress.batches = progress.epoch + 1, 0
    # A validation after the last batch of a step follows it; the step is done when it is counted.
    for step in range(schedule.num_steps):
        assert schedule.validations_after(step) == sum(at > step for at in after)
    assert schedule.validations_after(schedule.num_steps) == 0
    assert schedule.num_epochs * 10 == progress.total_batches
