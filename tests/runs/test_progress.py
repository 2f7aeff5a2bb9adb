"""A run's progress in a checkpoint, also in the format of earlier versions: Lightning's micro-batch counts."""

import lightning as L
import pytest

from lmmods.core.errors import UserError
from lmmods.runs.progress import Progress, update_checkpoint
from lmmods.torch_engine.compat.lightning import loops_state
from tests.finished_runs import paths

DATA = {"num_rows": 38, "batch_size": 3}  # 13 micro-batches an epoch


def build_old_content(epoch: int, batches: int, step: int, window: int = 0, ends_run: bool = False,
                      **data: int) -> dict:
    """Build a checkpoint of an earlier version with four micro-batches per step."""
    epochs = {"ready": epoch + 1, "completed": epoch + ends_run}
    counts = {"current": {"ready": batches, "completed": batches - 1}, "is_last_batch": batches == 13}
    return {"loops": {"fit_loop": {"epoch_loop.batch_progress": counts, "epoch_progress": {"current": epochs}}},
            "global_step": step, "world_size": 1, "identity": {"trainer": {"accumulate_grad_batches": 4}},
            "window": {"num_batches": window} if window else {},
            "Data": {**DATA, "epoch": epoch, **(data or {"batches": batches})}}


@pytest.mark.parametrize(("saved", "progress", "rows"), [
    ((1, 8, 6), Progress(1, 2, 6), 24), ((1, 13, 8), Progress(1, 4, 8, ends_epoch=True), 38),
    # Inside a step, which is computed again; also the last and the first step of an epoch.
    ((1, 10, 6, 2), Progress(1, 2, 6), 24), ((1, 13, 7, 1), Progress(1, 3, 7), 36),
    ((1, 3, 4, 3), Progress(1, 0, 4), 0),
    # At the end of a run, where Lightning counted the epoch as finished.
    ((1, 8, 6, 0, True), Progress(1, 2, 6), 24)])
def test_progress_of_an_earlier_version_is_converted_to_steps_and_rows(saved, progress, rows):
    content = build_old_content(*saved)
    new = update_checkpoint(content)
    assert new["progress"] == progress.state() and new["Data"] == {**DATA, "epoch": 1, "rows": rows}
    assert content["Data"]["batches"] == saved[1] and update_checkpoint(new) is new


def test_an_unfinished_step_of_two_ranks_is_subtracted_from_a_streams_rows():
    content = build_old_content(0, 3, 0, rows=20)
    content["world_size"] = 2
    del content["Data"]["num_rows"]
    content["window"] = {"num_batches": 2}
    content["Data"]["window"] = 2
    assert update_checkpoint(content)["Data"]["rows"] == 20 - 2 * 2 * 3
    content["Data"]["rows"] = 11
    with pytest.raises(UserError, match="spans two buffers.*Resume from an earlier checkpoint"):
        update_checkpoint(content)


def test_lightnings_loops_have_every_restored_key():
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False,
                        enable_progress_bar=False)
    lightning_state = {f"{name}_loop": getattr(trainer, f"{name}_loop").state_dict()
                       for name in ("fit", "validate", "test", "predict")}
    lightning_state["fit_loop"]["epoch_loop.state_dict"] = {"_batches_that_stepped": 0}
    assert set(paths(loops_state(Progress()))) <= set(paths(lightning_state))
