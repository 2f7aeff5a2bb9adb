"""A run's place among micro-batches, as a checkpoint says it, and counted for other numbers of ranks."""

import pytest

from lmmods.core.errors import UserError
from lmmods.runs.progress import Progress, correct_epochs, read_progress, recount, recount_loops
from tests.runs import paths

DATA = {"num_rows": 38, "batch_size": 3}  # 13 micro-batches an epoch


@pytest.mark.parametrize(("ready", "epoch", "batches", "before", "now", "expected"), [
    (8, 0, 8, 1, 2, (4, 4)),  # the middle of the first epoch
    (4, 0, 8, 2, 1, (8, 8)),
    (7, 0, 13, 2, 1, (13, 13)),  # its end, where two workers had a round half empty
    (13, 1, 13, 1, 2, (7, 14)),  # the end of the second
    (2, 2, 4, 2, 4, (1, 9)),
])
def test_recount(ready, epoch, batches, before, now, expected):
    assert recount(ready, {**DATA, "epoch": epoch, "batches": batches}, before, now, "processes") == expected


def test_a_stream_is_one_epoch():
    assert recount(6, {"epoch": 3, "window": 1, "batches": 2}, 2, 4, "devices") == (3, 3)


def test_inside_a_round_is_refused():
    with pytest.raises(UserError, match="it stands at micro-batch 7, which 2 processes do not share evenly"):
        recount(7, {**DATA, "epoch": 0, "batches": 7}, 1, 2, "processes")


def content(progress: Progress, **data: int) -> dict:
    return {"loops": progress.loops(is_last_of_epoch=False), "global_step": progress.step, "world_size": 1,
            "Data": {**DATA, **data}}


def test_a_checkpoint_says_where_the_run_is():
    progress = Progress(epoch=1, batches=8, total_batches=21, step=7)
    saved = content(progress, epoch=1, batches=8)
    assert read_progress(saved, "Data", 1, "devices") == progress
    assert read_progress(saved, "Data", 2, "devices") == Progress(epoch=1, batches=4, total_batches=11, step=7)
    recount_loops(saved, "Data", 2, "processes")
    assert read_progress({**saved, "world_size": 2}, "Data", 2, "processes").batches == 4


def test_a_checkpoint_of_the_end_of_an_epoch_stands_before_the_next():
    """Lightning, resumed there before, counts neither its end nor the start of the next."""
    saved = content(Progress(epoch=2, batches=13, total_batches=39, step=9))
    counts = saved["loops"]["fit_loop"]["epoch_progress"]
    counts["current"].update(ready=2, started=2, processed=1)
    correct_epochs(saved)
    assert counts["current"] == {"ready": 3, "completed": 2, "started": 3, "processed": 2}


def test_loops_are_lightnings():
    import lightning as L

    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False,
                        enable_progress_bar=False)
    lightnings = {f"{name}_loop": getattr(trainer, f"{name}_loop").state_dict()
                  for name in ("fit", "validate", "test", "predict")}
    assert set(paths(Progress().loops(is_last_of_epoch=False))) == set(paths(lightnings))
