"""A run's progress in a checkpoint, also as earlier versions wrote it: in Lightning's counts of micro-batches."""

import lightning as L
import pytest

from lmmods.core.errors import UserError
from lmmods.runs.progress import Progress, update_checkpoint
from lmmods.torch_engine.compat.lightning import loops_state
from tests.finished_runs import paths

DATA = {"num_rows": 38, "batch_size": 3}  # 13 micro-batches an epoch


def old_content(epoch: int, batches: int, step: int, window: int = 0, ends_run: bool = False, **data: int) -> dict:
    """A checkpoint of an earlier version, whose steps had four micro-batches."""
    epochs = {"ready": epoch + 1, "completed": epoch + ends_run}
    counts = {"current": {"ready": batches, "completed": batches - 1}, "is_last_batch": batches == 13}
    return {"loops": {"fit_loop": {"epoch_loop.batch_progress": counts, "epoch_progress": {"current": epochs}}},
            "global_step": step, "world_size": 1, "identity": {"trainer": {"accumulate_grad_batches": 4}},
            "window": {"num_batches": window} if window else {},
            "Data": {**DATA, "epoch": epoch, **(data or {"batches": batches})}}


@pytest.mark.parametrize(("saved", "progress", "rows"), [
    ((1, 8, 6), Progress(1, 2, 6), 24), ((1, 13, 8), Progress(1, 4, 8, ends_epoch=True), 38),
    # Inside a step, which starts again, also in the last one of an epoch and in the first one.
    ((1, 10, 6, 2), Progress(1, 2, 6), 24), ((1, 13, 7, 1), Progress(1, 3, 7), 36),
    ((1, 3, 4, 3), Progress(1, 0, 4), 0),
    # At the end of a run, where Lightning had counted the epoch as finished.
    ((1, 8, 6, 0, True), Progress(1, 2, 6), 24)])
def test_a_checkpoint_of_an_earlier_version(saved, progress, rows):
    content = old_content(*saved)
    new = update_checkpoint(content)
    assert new["progress"] == progress.state() and new["Data"] == {**DATA, "epoch": 1, "rows": rows}
    assert content["Data"]["batches"] == saved[1] and update_checkpoint(new) is new


def test_a_checkpoint_inside_a_step_of_two_ranks_and_of_a_stream():
    inside = old_content(0, 3, 0, rows=20)
    inside["world_size"] = 2
    del inside["Data"]["num_rows"]
    inside["window"] = {"num_batches": 2}
    inside["Data"]["window"] = 2
    assert update_checkpoint(inside)["Data"]["rows"] == 20 - 2 * 2 * 3
    inside["Data"]["rows"] = 11
    with pytest.raises(UserError, match="spans two buffers.*Resume from an earlier checkpoint"):
        update_checkpoint(inside)


def test_lightnings_loops_have_what_is_restored():
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False,
                        enable_progress_bar=False)
    lightnings = {f"{name}_loop": getattr(trainer, f"{name}_loop").state_dict()
                  for name in ("fit", "validate", "test", "predict")}
    lightnings["fit_loop"]["epoch_loop.state_dict"] = {"_batches_that_stepped": 0}
    assert set(paths(loops_state(Progress()))) <= set(paths(lightnings))
