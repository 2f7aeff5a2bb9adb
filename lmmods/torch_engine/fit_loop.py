"""Lightning's loop over epochs, which also ends a run that was killed after its last step."""

from lightning.pytorch.loops.fit_loop import _FitLoop

from lmmods.core.console import say
from lmmods.torch_engine.callbacks.early_stopping import SharedEarlyStopping


class FitLoop(_FitLoop):
    """A run resumed with nothing left to train still goes through its end: Lightning's own loop returns at once.

    Samples, metrics, model and curves are then written as they would have been. A run that is complete only says so.
    """

    @property
    def skip(self) -> bool:
        trainer = self.trainer
        if trainer.resumed_from is None or trainer.limit_train_batches == 0:
            return super().skip
        stopped = [callback.rule.begin(trainer.validates) for callback in trainer.callbacks
                   if isinstance(callback, SharedEarlyStopping)]
        if not super().skip and not any(stopped):
            return False
        told, trainer.was_complete = trainer.run_folder.nothing_left(trainer.global_step, *trainer.length, stopped)
        say(told)
        return trainer.was_complete
