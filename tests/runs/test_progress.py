"""A run's place among micro-batches, as a checkpoint says it, and counted for other numbers of ranks."""

import pytest

from lmmods.core.errors import UserError
from lmmods.runs.progress import Cut, Progress, correct_epochs, read_progress, recount, recount_loops, rewind
from tests.finished_runs import paths

DATA = {"num_rows": 38, "batch_size": 3}  # 13 micro-batches an epoch


@pytest.mark.parametrize(("ready", "epoch", "before", "now", "expected"), [
    (8, 0, (3, 1), (3, 2), (4, 4)),  # the middle of the first epoch
    (4, 0, (3, 2), (3, 1), (8, 8)),
    (7, 0, (3, 2), (3, 1), (13, 13)),  # its end, where two workers had a round half empty
    (13, 1, (3, 1), (3, 2), (7, 14)),  # the end of the second
    (2, 2, (3, 2), (3, 4), (1, 9)),
    (4, 0, (3, 2), (1, 1), (24, 24)), (4, 0, (3, 2), (4, 3), (2, 2)),  # another batch size
    (10, 1, (4, 1), (2, 4), (5, 10)),
])
def test_recount(ready, epoch, before, now, expected):
    assert recount(ready, {**DATA, "epoch": epoch}, before[0] * before[1], Cut(now[0], 1, now[1])) == expected


def test_a_stream_is_one_epoch():
    assert recount(6, {"epoch": 3, "window": 1, "rows": 2}, 2, Cut(1, 1, 4)) == (3, 3)


@pytest.mark.parametrize("now", [(3, 2), (2, 1), (1, 4)])
def test_inside_a_round_is_refused(now):
    with pytest.raises(UserError, match="after 21 rows of an epoch.*do not come to"):
        recount(7, {**DATA, "epoch": 0}, 3, Cut(now[0], 1, now[1]))


def content(progress: Progress, **data: int) -> dict:
    return {"loops": progress.loops(is_last_of_epoch=False), "global_step": progress.step, "world_size": 1,
            "Data": {**DATA, **data}}


def test_a_checkpoint_says_where_the_run_is():
    """After eight micro-batches of three rows, and the same in fewer and larger ones."""
    progress = Progress(epoch=1, batches=8, total_batches=21, step=7)
    saved = content(progress, epoch=1, batches=8)
    assert read_progress(saved, "Data", Cut(3, 8, 1)) == progress
    assert read_progress(saved, "Data", Cut(3, 4, 2)) == Progress(1, 4, 11, step=7)
    assert read_progress(saved, "Data", Cut(12, 2, 1)) == Progress(1, 2, 6, step=7)
    recount_loops(saved, "Data", Cut(1, 12, 2))
    saved["Data"]["batch_size"], saved["world_size"] = 1, 2
    assert read_progress(saved, "Data", Cut(1, 12, 2)) == Progress(1, 12, 31, step=7)


@pytest.mark.parametrize(("batches", "done"), [(8, 4), (4, 4), (3, 1)])
def test_a_checkpoint_inside_a_step_is_read_as_of_its_start(batches, done):
    """As earlier versions wrote it; gradients of its micro-batches are not read."""
    inside = content(Progress(epoch=1, batches=batches, total_batches=13 + batches, step=7), epoch=1, batches=batches)
    inside["window"] = {"num_batches": done, "gradients": {"w": object()}}
    inside["loops"]["fit_loop"]["state_dict"] = {"combined_loader": [{"batches": batches}]}
    start = rewind(inside)
    wanted = Progress(epoch=1, batches=batches - done, total_batches=13 + batches - done, step=7)
    assert read_progress(start, "Data", Cut(3, 8, 1)) == wanted and start["Data"]["batches"] == batches - done
    assert not start["window"] and not start["loops"]["fit_loop"]["state_dict"]
    counts = start["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    # At the start of an epoch nothing is left to complete: Lightning would lose a micro-batch.
    assert counts["completed"] == max(batches - done - 1, 0) and counts["ready"] == batches - done
    assert inside["Data"]["batches"] == batches and rewind(start) is start


def test_a_checkpoint_inside_a_step_of_two_ranks_and_of_a_stream():
    inside = content(Progress(batches=3, total_batches=3), epoch=0, window=2, rows=20)
    inside |= {"window": {"num_batches": 2}, "world_size": 2}
    assert rewind(inside)["Data"]["rows"] == 20 - 2 * 2 * 3
    inside["Data"]["rows"] = 11
    with pytest.raises(UserError, match="spans two buffers.*Resume from an earlier checkpoint"):
        rewind(inside)


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
