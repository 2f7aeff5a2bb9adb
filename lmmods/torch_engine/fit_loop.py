"""What a resumed run does that has nothing left to train."""

from lightning.pytorch.callbacks import Timer

from lmmods.torch_engine.callbacks.early_stopping import SharedEarlyStopping


def is_skipped(trainer, skips: bool) -> bool:
    """Whether fit returns at once.

    A run that was killed after its last step still goes through its end: samples, metrics, model and loss plot are then
    written as they would have been. A run that is complete only says so.

    Args:
        trainer: `lmmods.torch_engine.trainer.Trainer`.
        skips: Whether Lightning's loop would return.
    """
    if trainer.resumed_from is None or trainer.limit_train_batches == 0:
        return skips
    stopped = [callback.rule.begin(trainer.validates) for callback in trainer.callbacks
               if isinstance(callback, SharedEarlyStopping)]
    if not skips and not any(stopped):
        return False
    out_of_time = any(callback.time_remaining() <= 0 for callback in trainer.callbacks if isinstance(callback, Timer))
    return trainer.run_folder.was_complete(trainer.global_step, *trainer.length, stopped, out_of_time)
